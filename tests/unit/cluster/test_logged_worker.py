"""A rank's actor is light until it starts: what it sets up is there before torch is."""

import subprocess
import sys


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_who_makes_actors_imports_no_torch():
    code = "import sys, lora_moe_rl.cluster.engines, lora_moe_rl.cluster.trainer\n"
    assert run(code + "sys.exit('torch' in sys.modules)").returncode == 0


def test_a_rank_has_its_log_and_its_environment_before_torch(tmp_path):
    log = tmp_path / "trainer-0.log"
    code = (
        "import os, sys\n"
        "from lora_moe_rl.cluster.logged_worker import LoggedWorker\n"
        f"worker = LoggedWorker({str(log)!r}, {{'OMP_WAIT_POLICY': 'PASSIVE'}}, *'abcd')\n"
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules, worker.rank)"
    )
    assert run(code).returncode == 0
    assert log.read_text() == "PASSIVE False d\n"
