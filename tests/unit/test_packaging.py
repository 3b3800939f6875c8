"""The package: its wheel, its links, and that its folders shadow nobody else's packages."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from itertools import chain
from pathlib import Path

import pytest

from lora_moe_rl import __version__, cli

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
@pytest.mark.whole
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


@dataclass(frozen=True)
class Built:
    """A wheel, and the copy of the tree that it was built from."""

    wheel: Path
    clone: Path
    files: list[str]  # of the clone, relative


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    """Built from a copy, as it would be from a clone: without what other builds left behind."""
    folder = tmp_path_factory.mktemp("wheel")
    clone = folder / "clone"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    for name in files:
        if os.path.lexists(ROOT / name):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                (clone / name).symlink_to(os.readlink(ROOT / name))
            else:
                (clone / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder)]
    child = subprocess.run([*command, str(clone)], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    (wheel,) = folder.glob("lora_moe_rl-*.whl")
    return Built(wheel, clone, files)


@pytest.mark.seconds
def test_the_wheel_holds_plain_files(built):
    with zipfile.ZipFile(built.wheel) as archive:
        held = {info.filename: info for info in archive.infolist()}
    sources = {
        f"lora_moe_rl/{n}" for n in built.files if n.startswith(FOLDERS) and n.endswith(".py")
    }
    sources |= {n for n in built.files if n.startswith("lora_moe_rl/") and n.endswith(".py")}
    assert len(sources) > 20
    assert sources <= set(held)
    for name in sources:
        is_link = (held[name].external_attr >> 16) & 0o170000 == 0o120000
        assert not is_link and held[name].file_size == (built.clone / name).stat().st_size
    # No top-level adapters/ or kernels/, no tests, no recipes.
    assert {name.split("/")[0] for name in held} == {
        "lora_moe_rl",
        f"lora_moe_rl-{__version__}.dist-info",
    }
    assert not [name for name in held if "tests/" in name or "test_" in name]


@pytest.mark.seconds
def test_the_wheels_metadata_is_that_of_the_project(built):
    with zipfile.ZipFile(built.wheel) as archive:
        info = f"lora_moe_rl-{__version__}.dist-info"
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == "<3.13,>=3.12"
    extras = {
        "judge",
        "math",
        "mlflow",
        "nixl",
        "reasoning",
        "tensorboard",
        "tinker",
        "trackio",
        "wandb",
    }
    assert set(metadata.get_all("Provides-Extra")) == extras
    assert "lora-moe-rl = lora_moe_rl.cli:main" in entry_points
    assert "lora_moe_rl = lora_moe_rl.rollout.vllm_plugin:register" in entry_points


@pytest.mark.seconds
def test_the_wheel_works_where_there_is_no_clone(built, tmp_path):
    """Installed into an empty folder, which comes before everything else that is installed."""
    place = tmp_path / "place"
    command = ["-m", "pip", "install", "--no-deps", "--no-index", "--target", place, built.wheel]
    child = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    env = {**os.environ, "PYTHONPATH": str(place)}
    imports = "".join(f"import lora_moe_rl.{name} as m; print(m.__file__)\n" for name in FOLDERS)
    script = str(place / "bin/lora-moe-rl")
    for words, said in (
        ([sys.executable, "-c", imports], str(place)),
        ([script, "--version"], f"lora-moe-rl {__version__}"),
        ([script, "plan", "--model", "qwen3-30b-a3b", "--gpus", "8"], "30,532,122,624 parameters"),
    ):
        child = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=env)
        assert child.returncode == 0, child.stderr
        assert said in child.stdout
        assert str(ROOT) not in child.stdout


def _imported() -> set[str]:
    """Packages that our sources import, other than Python's own."""
    found: set[str] = set()
    for folder in ("lora_moe_rl", *FOLDERS):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"lora_moe_rl"}


def _declared() -> set[str]:
    """Packages of pyproject.toml, as pip names them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    return {re.split(r"[\[>=<]", text)[0] for text in wanted}


# What is imported and not declared: the engines (installed apart), what comes with torch, and TRL,
# which a comparison times where it is installed.
APART = {"megatron", "vllm", "triton", "trl"}
# Extras that `make setup` leaves out: they pin others than vLLM and Ray do (cachetools, pillow,
# tabulate).
BY_HAND = {"mlflow-skinny", "sqlalchemy", "alembic", "trackio", "reasoning-gym"}


def test_what_is_imported_is_declared_and_nothing_else():
    modules = {"huggingface-hub": "huggingface_hub", "math-verify": "math_verify"}
    modules |= {"protobuf": "google", "pyyaml": "yaml"}
    by_name = BY_HAND | {"tensorboard"}  # what is imported by its name, as text
    declared = {modules.get(name, name) for name in _declared() - by_name}
    assert declared == _imported() - APART


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_what_is_declared_is_pinned(kind):
    lines = (ROOT / f"requirements/{kind}.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines}
    assert _declared() - BY_HAND <= pinned


def test_the_version_stands_in_one_place(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"lora-moe-rl {__version__}\n"
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest and newest[1].rstrip(",") == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]


def _image() -> list[tuple[str, str]]:
    """(instruction, its words) of the Dockerfile, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], " ".join(line.split()[1:])) for line in lines]


def test_the_image_is_made_by_the_makefile_and_runs_as_nobody_special():
    makefile, image = (ROOT / "Makefile").read_text(), _image()
    words = dict(image)
    assert re.fullmatch(r"python:3\.12[\w.-]*", words["FROM"])  # no place that it comes from
    makes = [text for name, text in image if name == "RUN" and text.startswith("make ")]
    assert makes == ["make setup GPU=$GPU"]
    assert re.search(r"^setup:", makefile, re.M) and "$(if $(GPU),gpu,cpu)" in makefile
    assert words["ARG"] == "GPU=" and image.index(("ARG", "GPU=")) > 0  # after FROM: seen by RUN
    names = [name for name, _ in image]
    assert words["USER"] not in ("root", "0") and names.count("USER") == 1
    assert names.index("USER") < names.index("COPY") < image.index(("RUN", makes[0]))
    assert cli.COMMANDS.keys() >= set(json.loads(words["CMD"])[1:])


def test_the_image_gets_nothing_that_git_ignores():
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {".git", *ignored} == {line.removeprefix("**/") for line in left_out if line[:1] != "#"}


def test_the_page_installs_what_the_makefile_does():
    """One command of pip, of the same files in the same order."""
    makefile = (ROOT / "Makefile").read_text()
    steps = re.findall(r"pip install .*?((?:--no-deps )?-r requirements/\S+)", makefile)
    steps = [step.replace("$(KIND)", "gpu") for step in steps]
    assert len(steps) == 2
    command = " && ".join(f"pip install {step}" for step in steps)
    assert f"\n{command} dist/lora_moe_rl-*.whl\n" in (ROOT / "docs/install.md").read_text()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda p: p.name
)
def test_requirements_are_pinned_and_name_no_place(path):
    lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
    assert all("==" in line for line in lines)
    assert not any("/" in line or line.startswith("-") for line in lines)
