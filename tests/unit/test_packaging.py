"""The package: its wheel, its links, and that its folders shadow nobody else's packages."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("adapters", "kernels", "refit", "router_replay")


def run(code: str, folder: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_folders_are_relative_links(name):
    link = ROOT / "lora_moe_rl" / name
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


def test_the_folders_are_packages_of_ours_alone(tmp_path):
    code = (
        "import importlib, importlib.util\n"
        f"for name in {FOLDERS}:\n"
        "    importlib.import_module(f'lora_moe_rl.{name}')\n"
        "    assert importlib.util.find_spec(name) is None, name\n"
    )
    child = run(code, tmp_path)
    assert child.returncode == 0, child.stderr


@pytest.mark.slow
def test_other_packages_import_from_the_repository_root():
    """There `kernels` is our folder, and transformers looks for a package of that name."""
    code = (
        "import transformers, peft, vllm\n"
        "import transformers.models.qwen3_moe.modeling_qwen3_moe\n"
        "from transformers.utils import is_kernels_available\n"
        "print(is_kernels_available())\n"
    )
    child = run(code, ROOT)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip().endswith("False")


@pytest.mark.seconds
def test_the_wheel_holds_plain_files(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path)]
    # From a copy, as it would be from a clone: without what other builds left behind.
    clone = tmp_path / "clone"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    for name in files:
        if not name.startswith("tests/") and os.path.lexists(ROOT / name):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                (clone / name).symlink_to(os.readlink(ROOT / name))
            else:
                (clone / name).write_bytes((ROOT / name).read_bytes())
    child = subprocess.run([*command, str(clone)], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    (wheel,) = tmp_path.glob("lora_moe_rl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {info.filename: info for info in archive.infolist()}
        entry_points = archive.read(next(n for n in held if n.endswith("entry_points.txt")))
    sources = {f"lora_moe_rl/{n}" for n in files if n.startswith(FOLDERS) and n.endswith(".py")}
    sources |= {n for n in files if n.startswith("lora_moe_rl/") and n.endswith(".py")}
    assert len(sources) > 20
    assert sources <= set(held)
    for name in sources:
        is_link = (held[name].external_attr >> 16) & 0o170000 == 0o120000
        assert not is_link and held[name].file_size == (clone / name).stat().st_size
    outside = [n for n in held if not n.startswith("lora_moe_rl")]
    assert not outside  # no top-level adapters/ or kernels/
    assert b"lora-moe-rl = lora_moe_rl.cli:main" in entry_points
    assert b"lora_moe_rl.rollout.vllm_plugin:register" in entry_points


@pytest.mark.parametrize(
    "path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda p: p.name
)
def test_requirements_are_pinned_and_name_no_place(path):
    lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
    assert all("==" in line for line in lines)
    assert not any("/" in line or line.startswith("-") for line in lines)
