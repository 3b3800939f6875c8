"""What is asked of a GPU, with numbers, on a machine without one: see tests/helpers/host_cuda."""

from __future__ import annotations

import json
import re
from pathlib import Path

import host_cuda
import noop_cuda
import pytest

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.skipif(bool(noop_cuda.missing()), reason=noop_cuda.missing()),
]
TESTS = Path(__file__).parents[1] / "gpu"
REFUSED = {
    "values": "a tensor of the host among those of a device",
    "two": "tensors of two devices",
    "index": "of a tensor of the host, by indices of a device",
    "numpy": "can't convert cuda:0 device type tensor to numpy",
    "collective": "No backend type associated with device type cpu",
    "kernel": "cannot be accessed from Triton (cpu tensor?)",
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("host_cuda")


def passed(folder: Path, tests: str, *more: str, timeout_s: float, gpus: int = 1) -> int:
    """How many tests of that file of tests/gpu have."""
    command = ("-m", "pytest", "-q", str(TESTS / tests), *more)
    shown = host_cuda.run(folder, *command, timeout_s=timeout_s, gpus=gpus)
    assert "skipped" not in shown
    found = re.search(r"(\d+) passed", shown)
    return int(found[1]) if found else 0


def test_versions_go_from_gpu_to_gpu(folder):
    """By CUDA IPC, and out of page-locked memory; checksums of a part on the device. NIXL asks the
    driver for more than there is."""
    assert passed(folder, "test_channels.py", "-k", "not nixl", timeout_s=200) == 7


@pytest.mark.slow
def test_what_a_gpu_refuses_is_refused(folder):
    shown = host_cuda.run(folder, "-m", "host_cuda.refusals", timeout_s=200, gpus=2)
    said = json.loads(shown.splitlines()[-1])
    for name, reason in REFUSED.items():
        assert reason in said.pop(name, "nothing"), name
    assert not said


@pytest.mark.slow
def test_a_base_is_held_once_on_one_gpu_and_on_two(folder):
    assert passed(folder, "test_held.py", timeout_s=280, gpus=2) == 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainers_steps_are_those_of_the_cpu(folder):
    """With Triton's kernels of adapters, in float32 and bfloat16, of one rank and of two."""
    assert passed(folder, "test_trainer_step.py", timeout_s=800, gpus=2) == 11


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(host_cuda.without_vllm()), reason=host_cuda.without_vllm())
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("qwen3_moe", "float32", 1e-5),
        ("qwen3_moe", "bfloat16", 0.3),
        ("deepseek_v3", "bfloat16", 0.3),  # vLLM has MLA on GPUs in 16 bits alone
    ],
)
def test_vllms_cuda_build_serves_what_hugging_face_computes(name, dtype, tolerance, folder):
    """Its V2 model runner, and the slots that its kernels read adapters from."""
    shown = host_cuda.run(folder, "-m", "host_cuda.engine", name, dtype, timeout_s=800)
    found = json.loads(shown.splitlines()[-1])
    assert found["base"] < tolerance and found["adapter"] < tolerance
    assert found["effect"] > 1


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.skipif(bool(host_cuda.without_vllm()), reason=host_cuda.without_vllm())
@pytest.mark.parametrize(
    ("gpus", "mode", "engine", "trainer"),
    [(1, "adapter", "tp1", "tp1"), (1, "merged", "tp1", "tp1"), (2, "adapter", "tp2ep", "tp2")],
)
def test_what_is_published_is_what_is_served(gpus, mode, engine, trainer, folder):
    """In slots, as vLLM's own loader has it there; and merged into the engine's weights."""
    arguments = ["--model", "qwen3_moe", "--samples", "4", "--json", "--mode", mode]
    arguments += ["--transports", "shm,cuda_ipc"]
    command = ["-m", "host_cuda.refit", *arguments, "--engines", engine, "--trainers", trainer]
    shown = host_cuda.run(folder, *command, timeout_s=1200, gpus=gpus)
    found = json.loads(shown[shown.index("{") :])
    assert found["passed"] and (found["device"], found["dtype"]) == ("cuda", "bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.skipif(bool(host_cuda.without_vllm()), reason=host_cuda.without_vllm())
@pytest.mark.parametrize(
    "settings",
    [
        ("refit.transport=cuda_ipc",),
        ("placement.mode=colocated",),
        ("placement.mode=colocated", "placement.gives_back=weights"),
    ],
)
def test_a_run_has_trainer_and_engine_on_one_gpu(settings, folder):
    shown = host_cuda.run(folder, "-m", "host_cuda.demo", *settings, timeout_s=1200)
    steps = json.loads(shown.splitlines()[-1])
    assert [one["replay/coverage"] for one in steps] == [1, 1]
    assert all(0 < one["mismatch/kl"] < 1e-4 for one in steps)
    assert steps[-1]["optim/grad_norm"] > 0
