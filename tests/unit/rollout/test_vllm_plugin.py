"""What runs in every process of vLLM."""

import subprocess
import sys

import pytest

# As in a process that vLLM has spawned: its default is then to spawn too.
BAR = """
import multiprocessing, sys
multiprocessing.set_start_method("spawn")
from lora_moe_rl.rollout.vllm_plugin import keep_no_semaphore
if sys.argv[1] == "with":
    keep_no_semaphore()
from tqdm import tqdm
list(tqdm(range(3)))
print("/dev/shm/sem." in open("/proc/self/maps").read())
"""


@pytest.mark.parametrize(("mend", "named"), [("with", "False"), ("without", "True")])
def test_a_bar_keeps_no_semaphore_in_shared_memory(mend, named):
    """Without the mend it does, or the mend is needed no more."""
    command = [sys.executable, "-c", BAR, mend]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == named
