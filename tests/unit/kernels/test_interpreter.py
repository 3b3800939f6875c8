"""The Triton kernels, in Triton's interpreter: the tests of the other kernel files once more.

In a process of its own, since the interpreter is chosen before triton is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("dequant", "marlin", "grouped_lora", "merge", "route_codec")


@pytest.mark.seconds
@pytest.mark.minute
def test_triton_kernels_in_the_interpreter():
    here = Path(__file__).parent
    files = [str(here / f"test_{name}.py") for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, capture_output=True, text=True, env=env)
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    assert " passed" in child.stdout
