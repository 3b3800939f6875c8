"""What a start has used, by process, and when a stage was there."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from lora_moe_rl.bench import start
from lora_moe_rl.bench.start import CONSOLE, CONTROLLER, OTHERS, core_seconds
from lora_moe_rl.errors import BenchmarkError

WORK = "import time; end = time.process_time() + {seconds}\nwhile time.process_time() < end: pass\n"
RUN = """
import subprocess, sys, time
kept = []
for log, seconds in (("trainer-0", 0.3), ("engine-0", 0.2), ("engine-0", 0.1), ("monitor", 0.1)):
    file = open(f"{sys.argv[1]}/logs/{log}.log", "a")
    work = sys.argv[2].format(seconds=seconds) + "time.sleep(60)"
    kept.append(subprocess.Popen([sys.executable, "-c", work], stdout=file))
time.sleep(60)
"""


@pytest.mark.seconds
def test_seconds_of_a_core_are_told_by_the_log_that_a_process_writes(tmp_path):
    (tmp_path / "logs").mkdir()
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), WORK])
    try:
        deadline = time.monotonic() + 60
        while (used := core_seconds(run.pid))["engine-0"] < 0.3 or used["trainer-0"] < 0.3:
            assert time.monotonic() < deadline, used
            time.sleep(0.05)
        while core_seconds(run.pid)[OTHERS] < 0.1:
            time.sleep(0.05)
        assert set(used) == {CONTROLLER, "trainer-0", "engine-0", OTHERS}
    finally:
        start._end(run)
    assert run.returncode == -9


def test_a_run_that_ends_before_its_first_step_has_no_seconds_and_is_quoted(tmp_path):
    with open(tmp_path / CONSOLE, "w") as console:
        run = subprocess.Popen([sys.executable, "-c", "print('no such recipe')"], stdout=console)
    run.wait()
    with pytest.raises(BenchmarkError, match="has not come to its first step; it said\nno such"):
        start._seen(run, tmp_path, "run/metrics.jsonl", "\n")
    assert start._seen(run, tmp_path, CONSOLE, "such recipe") <= time.perf_counter()
