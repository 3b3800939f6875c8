"""An actor's output goes into its file, whoever writes it."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lora_moe_rl.cluster.log import redirect
from lora_moe_rl.files.jsonl import tail

CODE = """
import logging, os, subprocess, sys
from lora_moe_rl.cluster.log import redirect
logging.basicConfig(level=logging.WARNING)
redirect(sys.argv[1])
print("from Python")
os.write(1, b"from C\\n")
os.write(2, b"from C, stderr\\n")
subprocess.run([sys.executable, "-c", "print('from a child')"])
logging.getLogger("a.module").info("from logging")
if sys.argv[2:]:
    os.kill(os.getpid(), int(sys.argv[2]))
raise RuntimeError("from a traceback")
"""


def run(log: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", CODE, str(log), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_all_output_of_a_process(tmp_path):
    log = tmp_path / "logs" / "engine-0.log"
    child = run(log)
    assert child.returncode == 1 and child.stdout == "" and child.stderr == ""
    text = log.read_text()
    for source in ("Python", "C", "C, stderr", "a child", "a traceback"):
        assert f"from {source}\n" in text
    assert " I a.module: from logging\n" in text
    assert tail(log, 1) == "RuntimeError: from a traceback"


def test_a_second_start_appends(tmp_path):
    run(tmp_path / "a.log")
    run(tmp_path / "a.log")
    assert (tmp_path / "a.log").read_text().count("from Python\n") == 2


def test_a_crash_in_native_code_leaves_the_python_stack(tmp_path):
    child = run(tmp_path / "a.log", str(int(signal.SIGSEGV)))
    assert child.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in (tmp_path / "a.log").read_text()


CHATTER = """
import logging, sys, warnings
from lora_moe_rl.cluster.log import redirect
redirect(sys.argv[1])
own = logging.getLogger("megatron.bridge.utils.import_utils")
own.addHandler(logging.StreamHandler())  # as that module does when it is imported
own.info("Import of FP8GlobalStateManager failed")
warnings.warn("Apex is not installed")
logging.getLogger("megatron.core.optimizer").warning("Falling back to Torch")
logging.getLogger("megatron.core.optimizer").error("what matters of Megatron")
logging.getLogger("lora_moe_rl.refit").warning("what matters of ours")
"""


def test_what_libraries_say_at_import_stands_in_a_file_of_its_own(tmp_path):
    log = tmp_path / "trainer-0.log"
    subprocess.run([sys.executable, "-c", CHATTER, str(log)], check=True)
    lines = log.read_text().splitlines()
    assert len(lines) == 2 and "of Megatron" in lines[0] and "of ours" in lines[1]
    aside = (tmp_path / "trainer-0.libraries.log").read_text()
    for chatter in ("FP8GlobalStateManager", "Apex is not", "Falling back"):
        assert aside.count(chatter) == 1


class Chatty:
    def __init__(self, log_path: str):
        redirect(log_path)

    def speak(self) -> str:
        print("from a Ray actor")
        os.write(2, b"from its C code\n")
        logging.getLogger("actor").info("from its logging")
        return "spoken"


@pytest.mark.slow
@pytest.mark.whole
def test_in_a_ray_actor(tmp_path):
    import ray

    from lora_moe_rl.cluster.ray_start import local_ray

    local_ray(1)
    try:
        log = tmp_path / "actor.log"
        actor = ray.remote(Chatty).remote(str(log))
        assert ray.get(actor.speak.remote()) == "spoken"
        for line in ("from a Ray actor", "from its C code", "from its logging"):
            assert line in log.read_text()
    finally:
        ray.shutdown()
