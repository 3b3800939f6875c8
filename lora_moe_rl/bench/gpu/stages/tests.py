"""Files of tests/gpu, run by pytest: how each test ended, and how long it took."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lora_moe_rl.bench.gpu import recorder
from lora_moe_rl.bench.gpu.parts import Parts, left_s
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.upstream.versions import importable

ROOT = Path(__file__).resolve().parents[4]
ONE_TEST = 3  # a test that hangs takes this part of the time that is left
NO_TESTS = 5  # pytest's exit code


def run(parts: Parts, device: str, *files: str) -> None:
    for file in files:
        parts.part(file, lambda file=file: outcome(parts, file, device))


def outcome(parts: Parts, file: str, device: str) -> dict[str, Any]:
    """Raises BenchmarkError when tests failed, when pytest could not run the file, and on a GPU
    when no test of it ran."""
    path = ROOT / "tests/gpu" / file
    if not path.is_file():
        raise BenchmarkError(f"{path} is not there: run this in a clone of the repository")
    code = run_pytest(parts, file, path, left_s() / ONE_TEST)
    found = parts.values.get(file, {})
    tests, counts = found.get("tests", ()), found.get("counts", {})
    if failed := [test["name"] for test in tests if test["end"] == "failed"]:
        raise BenchmarkError(f"{len(failed)} tests failed: {', '.join(failed)}"[:500])
    if code not in (0, NO_TESTS):
        raise BenchmarkError(f"pytest ended with exit code {code} in {found.get('running')}")
    if device == "cuda" and not counts.get("passed"):
        raise BenchmarkError(f"no test of {file} ran: {counts}")
    return found


def run_pytest(parts: Parts, name: str, path: Path, one_test_s: float) -> int:
    """Pytest's exit code. What it finds is put as the part `name`, test by test."""
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:cacheprovider"]
    if importable("pytest_timeout"):
        command.append(f"--timeout={one_test_s:.0f}")
    environment = {recorder.FILE: str(parts.path.resolve()), recorder.PART: name}
    return subprocess.run(
        [*command, "-p", recorder.__name__], cwd=ROOT, env=os.environ | environment
    ).returncode
