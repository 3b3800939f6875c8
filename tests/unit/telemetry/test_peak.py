"""The most memory that a process has held."""

from __future__ import annotations

import subprocess
import sys

from lora_moe_rl.telemetry import peak

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


def test_of_a_process_on_the_cpu_it_is_the_same_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(peak.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(peak.torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(peak.torch.cuda, "max_memory_allocated", lambda: 0)
    peak.begin()
    assert peak.gib() > 0.01
    monkeypatch.setattr(peak.torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    assert peak.gib() == 3
