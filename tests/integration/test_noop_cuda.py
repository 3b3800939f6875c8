"""A trainer's update through torch's own CUDA code, on a device that computes nothing: what waits,
and what memory the allocator gives, at the full width of published models. Numbers are those of
tests/gpu, on a GPU."""

from __future__ import annotations

import noop_cuda
import pytest
import tiny_families

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.skipif(bool(noop_cuda.missing()), reason=noop_cuda.missing()),
]
ROUNDED = 8 * 2**20  # bytes; an activation of one layer has 32 MiB and more
# Upstream makes a layer's first state on the host.
KNOWN = {"qwen3_next": "megatron/core/ssm/gated_delta_net/common.py"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("noop_cuda")


@pytest.mark.parametrize(
    ("family", "trainer"),
    [
        ("qwen3_moe", "{}"),
        ("qwen3_next", "{}"),
        ("gpt_oss", '{"recompute": "full"}'),
        pytest.param("deepseek_v3", "{}", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", '{"recompute": "full"}', marks=pytest.mark.slow),
        pytest.param("qwen3_moe", '{"offload": "both"}', marks=pytest.mark.slow),
        pytest.param("glm4_moe", "{}", marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", "{}", marks=pytest.mark.slow),
    ],
)
def test_torch_reports_no_wait_of_ours_between_the_micro_batches(family, trainer, folder, tmp_path):
    tiny_families.save(family, tmp_path)
    found = noop_cuda.run(folder, "waits", str(tmp_path), trainer)
    assert found["micro_batches"] > 1
    assert found["ours"] == {}
    known = KNOWN.get(family)
    assert all(known and known in place for place in found["others"])
    assert bool(found["others"]) == bool(known)  # and so it sees them


@pytest.mark.parametrize(
    ("name", "layers", "recompute"),
    [
        ("qwen3_30b_a3b", 4, "full"),
        ("deepseek_v3", 4, "none"),
        pytest.param("qwen3_30b_a3b", 48, "full", marks=pytest.mark.slow),
        pytest.param("qwen3_30b_a3b", 8, "none", marks=pytest.mark.slow),
        pytest.param("kimi_k2", 2, "none", marks=pytest.mark.slow),
        pytest.param("kimi_k2", 4, "full", marks=pytest.mark.slow),
        pytest.param("glm_4_7_flash", 47, "full", marks=pytest.mark.slow),
        pytest.param("glm_4_7_flash", 8, "none", marks=pytest.mark.slow),
    ],
)
def test_memory_is_what_the_planner_says(name, layers, recompute, folder):
    """All that is held to the byte, and none of a step left over, but for what the allocator rounds
    up; at the most no more than planned, and not much less."""
    found = noop_cuda.run(folder, "memory", name, str(layers), recompute)
    planned = found["planned"]
    assert found["held"] == planned["held"]
    assert abs(found["after"] - found["before"]) < ROUNDED
    assert 0.9 < found["peak"] / planned["peak"] <= 1
