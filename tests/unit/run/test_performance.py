"""Operations of a step, worked out by hand from a model's config."""

import numpy as np
import pytest

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Sample, Segment
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.trainer import TrainerMemory
from lora_moe_rl.run.performance import Performance, peak_of, planned_gib

RANK = 8
# The tiny Qwen3-MoE: 4 layers, width 96, 4 heads and 2 of keys and values of 32, 8 experts of 192
# of which a token has 2, 256 tokens in the vocabulary.
H, Q, KV, E, M, V, LAYERS, TOP_K = 96, 4 * 32, 2 * 32, 8, 192, 256, 4, 2
P = LAYERS * (H * Q + 2 * H * KV + Q * H + H * E + TOP_K * 3 * H * M) + H * V
# q, k, v, o; gate and up share what they read, and each has an A and a B; down.
A = LAYERS * RANK * ((H + Q) + 2 * (H + KV) + (Q + H) + TOP_K * (2 * (H + M) + (M + H)))
C = 4 * LAYERS * Q


def performance(peak: float | None = None, **sections) -> Performance:
    adapter = {"rank": RANK, "expert_rank": RANK}
    config = RunConfig.model_validate({"adapter": adapter, "replay": {"mode": "r3"}} | sections)
    facts = find("qwen3_moe")
    return Performance(config, AdapterSpec.build(facts.shape, config.adapter), facts, peak)


def forward(n: int) -> float:
    return n * (2 * P + 2 * A) + C * n * n / 2


def backward(n: int) -> float:
    return n * (2 * P + 4 * A) + C * n * n


def test_a_forward_and_a_backward_without_the_bases_weight_gradients():
    found = performance()
    assert (found.active, found.adapter, found.attention) == (P, A, C)
    assert found.operations([7, 30]) == sum(forward(n) + backward(n) for n in (7, 30))


def test_further_epochs_and_the_forwards_that_an_algorithm_asks_for():
    train, n = forward(20) + backward(20), 20
    twice = performance(algorithm={"epochs": 2})  # whose ratio is not 1: old logprobs
    assert twice.operations([n]) == 2 * train + forward(n)
    to_base = performance(algorithm={"kl_coef": 0.1})
    assert to_base.operations([n]) == train + 2 * n * P + C * n * n / 2
    to_start = performance(algorithm={"kl_coef": 0.1, "reference": "start"})
    assert to_start.operations([n]) == train + forward(n)


def test_shares_of_time_and_of_the_gpus_peak():
    sample = Sample(
        (Segment.given("user", [1, 2]), Segment.sampled([3] * 6, np.zeros(6, np.float32), 0)),
        "stop",
        "",
    )
    sections = {"trainer": {"world_size": 2, "ep": 2}, "rollout": {"engines": 2}}
    found = performance(peak=1e9, **sections).of_step([sample] * 3, train=2.0, step=4.0)
    assert found["perf/tokens_per_second_per_gpu"] == 3 * 8 / 4.0 / (2 + 2)
    done = 3 * (forward(8) + backward(8)) / 2 / 2.0
    assert found["perf/tflops_per_gpu"] == pytest.approx(done / 1e12, rel=1e-12)
    assert found["perf/mfu"] == pytest.approx(done / 1e9, rel=1e-12)
    assert not {"perf/mfu", "memory/planned"} & set(performance().of_step([sample], 1.0, 1.0))


def test_the_memory_that_was_planned_is_the_plans_of_the_heaviest_rank_without_what_no_tensor_is():
    sections = {"adapter": {"rank": RANK}, "trainer": {"pp": 2, "world_size": 2}}
    config = RunConfig.model_validate(sections)
    facts = find("qwen3_moe")
    spec = AdapterSpec.build(facts.shape, config.adapter)
    classes = TrainerMemory(facts, spec, "bf16").classes(config)
    tensors = [
        sum(n for what, n in one.memory.items() if what not in ("runtime", "allocator"))
        for one in classes
    ]
    assert len(tensors) == 2
    planned = planned_gib(config, spec, facts, "bfloat16")
    assert planned == max(tensors) / 2**30 < planned_gib(config, spec, facts, "float32")
    found = Performance(config, spec, facts, planned=planned).of_step([], 1.0, 1.0)
    assert found["memory/planned"] == planned


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA L4", None),
    ],
)
def test_a_gpus_peak_goes_by_its_name(name, peak):
    assert peak_of(name) == peak
