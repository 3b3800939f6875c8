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


ENDING = """
import atexit, gc, multiprocessing, sys
from lora_moe_rl.rollout.vllm_plugin import collect_nothing_at_the_end

def target(mend):
    if mend == "with":
        collect_nothing_at_the_end()
    atexit.register(lambda: print(gc.isenabled(), flush=True))
    raise SystemExit(1)  # an engine that does not start

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=target, args=(sys.argv[1],))
    child.start()
    child.join()
"""


@pytest.mark.parametrize(("mend", "collected"), [("with", "False"), ("without", "True")])
def test_a_spawned_process_collects_nothing_as_it_ends(mend, collected, tmp_path):
    """What is collected there may wait for ever: an engine that had failed was seen to end after
    255 s, and with the mend after 72 s, on a GPU that the host computes."""
    (tmp_path / "ending.py").write_text(ENDING)
    command = [sys.executable, str(tmp_path / "ending.py"), mend]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == collected, done.stderr
