"""PYTHONPATH=tests/helpers python -m noop_cuda memory qwen3_30b_a3b 48 full"""

import json
import sys
import tempfile
from pathlib import Path

import noop_cuda

if reason := noop_cuda.missing():
    sys.exit(f"error: {reason}")
print(json.dumps(noop_cuda.run(Path(tempfile.gettempdir()) / "noop_cuda", *sys.argv[1:])))
