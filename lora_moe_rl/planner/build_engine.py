"""Which experts vLLM gives each rank of an engine, by its own function and without weights."""

from __future__ import annotations


def vllm_experts(job: int, ranks: int, num_experts: int) -> list[list[int]]:
    """Global numbers, rank by rank. A job of `run_processes`, which has vLLM to itself."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    found = []
    for rank in range(ranks):
        _, local, _ = determine_expert_map(ranks, rank, num_experts)
        assert local is not None, "several ranks"
        found.append((local >= 0).nonzero().flatten().tolist())
    return found
