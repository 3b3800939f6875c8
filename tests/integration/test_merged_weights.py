"""The weights of vLLM's models after two merged refits are those of a load of a checkpoint merged
by hand, to the bit: no refit adds to the one before it, and none forgets a packed form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FAMILIES = ("deepseek_v3", "qwen2_moe", "qwen3_moe")  # MLA; biases; a dense layer between


def test_weights_after_two_refits_are_those_of_a_restart(tmp_path):
    here = Path(__file__).parent
    paths = f"{here}:{here.parent / 'helpers'}"
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    job = [sys.executable, here / "merged_weights.py", tmp_path, *FAMILIES]
    done = subprocess.run(job, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, found in json.loads((tmp_path / "found.json").read_text()).items():
        assert found["errors"] == [], name
        assert found["unlike_restart"] == [], name
        assert found["unlike_sent"] == [], name
        assert found["unnoticed"] == [], name  # each linear that was made the base's again is named
        assert len(found["unlike_base"]) >= 8, name  # every adapted module has changed
