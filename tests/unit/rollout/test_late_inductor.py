"""vLLM's CPU build does not import the kernels of torch's compiler, which works when it is used."""

import subprocess
import sys
import textwrap

import pytest

from lora_moe_rl.upstream.versions import vllm_on_cpu

PROGRAM = textwrap.dedent(
    """
    import os, sys
    from lora_moe_rl.config import RolloutConfig
    from lora_moe_rl.rollout.device import environment
    from lora_moe_rl.rollout.late_inductor import COMPILER, import_vllm

    import_vllm()
    os.environ |= environment(RolloutConfig(), cpu=True)
    assert "vllm.env_override" in sys.modules
    assert COMPILER not in sys.modules, "left behind"
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.cpu_worker import CPUWorker

    assert "torch._inductor.lowering" not in sys.modules, "imported after all"

    from torch._inductor.lowering import lowerings

    assert len(lowerings) > 100
    print("both")
    """
)

pytestmark = pytest.mark.skipif(not vllm_on_cpu(), reason="vLLM's CPU build alone")


@pytest.mark.slow
def test_an_engine_is_imported_without_the_compilers_kernels():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.strip().endswith("both"), done.stderr


@pytest.mark.seconds
def test_a_vllm_without_the_list_is_refused():
    program = (
        "from lora_moe_rl.rollout import late_inductor\n"
        "late_inductor.TAKES_IT = 'another'\n"
        "late_inductor.import_vllm()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ConfigError: lora_moe_rl/rollout/late_inductor.py expects" in done.stderr
    assert "to have another: the upstream code has changed" in done.stderr


def test_another_build_is_left_alone(monkeypatch):
    from lora_moe_rl.rollout import late_inductor

    monkeypatch.setattr(late_inductor, "vllm_on_cpu", lambda: False)
    monkeypatch.setitem(sys.modules, late_inductor.COMPILER, None)
    late_inductor.import_vllm()
    assert sys.modules[late_inductor.COMPILER] is None  # nobody took it out again
