"""vLLM's own kernels on GPUs for adapters of routed experts, as far as a CPU can run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "helpers" / "vllm_expert_kernels.py"


@pytest.mark.seconds
def test_they_read_what_experts_share_and_take_slots_of_the_ranks_that_are_allowed():
    """In a process of its own: the interpreter is chosen before triton is imported."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, env=env)
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-5000:]
