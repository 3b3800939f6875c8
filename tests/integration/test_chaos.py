"""`lora-moe-rl chaos`: a short run with four kinds of fault, and one whose promise is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_run import RECIPE, ROOT

from lora_moe_rl.models.directory import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def chaos(out: Path, *arguments: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    resolve_model("qwen3_moe")
    command = [sys.executable, "-m", "lora_moe_rl", "chaos", str(RECIPE), "--out", str(out)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    console = out / "console.txt"
    print(done.stdout, done.stderr, console.read_text() if console.exists() else "", sep="\n")
    return done.returncode, done.stdout


def test_a_run_with_four_kinds_of_fault_is_the_run_without_them_to_the_last_bit(tmp_path):
    kinds = ["rank.kill", "engine.kill", "controller.kill", "shm.corrupt"]
    code, _ = chaos(
        tmp_path / "out",
        *("--faults", ",".join(kinds), "--rate", "4/14", "--steps", "14", "--compare", "bits"),
        "checkpoint.every=3",
    )
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert sorted(fault["kind"] for fault in report["faults"]) == sorted(kinds)
    assert all(fault["as_promised"] for fault in report["faults"])
    assert len(report["checks"]) == 14 and all(check["passed"] for check in report["checks"])
    assert code == 0


def test_a_run_that_is_not_started_again_is_no_promise_kept(tmp_path):
    code, text = chaos(
        tmp_path / "out",
        *("--faults", "controller.kill", "--rate", "1/6", "--steps", "6"),
        "faults.max_resumes=0",
    )
    assert code == 1
    report = json.loads((tmp_path / "out/report.json").read_text())
    (fault,) = report["faults"]
    assert fault["happened"] and fault["outcome"] == "ended otherwise"
    failed = {check["name"] for check in report["checks"] if not check["passed"]}
    assert {"the run came to its end", "steps on record"} <= failed
    assert "FAIL" in text and "no process is left" not in failed
