"""Any Python program on such GPUs.

PYTHONPATH=tests/helpers:tests/integration python -m host_cuda [--gpus 2] -m pytest tests/gpu
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import host_cuda

if __name__ == "__main__":
    program, gpus = sys.argv[1:], 1
    if program[:1] == ["--gpus"]:
        gpus, program = int(program[1]), program[2:]
    with tempfile.TemporaryDirectory(prefix="host_cuda-") as folder:
        environment = host_cuda.environment(Path(folder), gpus=gpus)
        raise SystemExit(subprocess.call([sys.executable, *program], env=environment))
