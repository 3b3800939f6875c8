"""The most memory that a process has held."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
from lora_moe_rl.telemetry import peak
peak.begin()
before = peak.gib()
held = bytearray(b"1") * (300 * 2**20)
during = peak.gib()
del held
print(before, during, peak.gib())
"""


def test_on_the_cpu_it_is_the_most_that_was_resident_and_does_not_fall():
    child = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True
    )
    before, during, after = map(float, child.stdout.split())
    assert 0.01 < before < 4 and 0.25 < during - before < 0.6
    assert after > during - 0.01  # the kernel counts it in pages that it has not summed up yet
