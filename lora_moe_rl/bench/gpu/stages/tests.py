"""Files of tests/gpu, run by pytest: how each test ended, and how long it took."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from lora_moe_rl.bench.gpu.parts import Parts
from lora_moe_rl.errors import BenchmarkError

ROOT = Path(__file__).resolve().parents[4]
ENDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}
NO_TESTS = 5  # pytest's exit code


def run(parts: Parts, device: str, *files: str) -> None:
    for file in files:
        parts.part(file, lambda file=file: outcome(file, device))
        _raise_failures(parts, file)


def outcome(file: str, device: str) -> dict[str, Any]:
    """Raises BenchmarkError when pytest could not run the file, and on a GPU when no test of it
    ran."""
    path = ROOT / "tests/gpu" / file
    if not path.is_file():
        raise BenchmarkError(f"{path} is not there: run this in a clone of the repository")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:cacheprovider"]
        code = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT).returncode
        if not report.is_file():
            raise BenchmarkError(f"pytest ended with exit code {code}, and no report")
        cases = read(report)
    counts = Counter(case["end"] for case in cases)
    if code == NO_TESTS or (device == "cuda" and not counts["passed"] + counts["failed"]):
        raise BenchmarkError(f"no test of {file} ran: {dict(counts)}")
    return {"counts": dict(counts), "tests": cases}


def read(report: Path) -> list[dict[str, Any]]:
    """The tests of a JUnit file."""
    cases = []
    for case in ElementTree.parse(report).iter("testcase"):
        ends = [child for child in case if child.tag in ENDS]
        cases.append(
            {
                "name": case.get("name"),
                "end": ENDS[ends[0].tag] if ends else "passed",
                "seconds": float(case.get("time", 0)),
                **({"message": (ends[0].get("message") or "")[:500]} if ends else {}),
                **{one.get("name", ""): one.get("value") for one in case.iter("property")},
            }
        )
    return cases


def _raise_failures(parts: Parts, file: str) -> None:
    """A file with tests that failed is a part that failed, which has its figures none the less."""
    found = parts.values[file]
    failed = [case["name"] for case in found.get("tests", ()) if case["end"] == "failed"]
    if failed:
        parts.put(file, found | {"error": f"{len(failed)} tests failed: {', '.join(failed)}"[:500]})
