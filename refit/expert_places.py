"""Where a vLLM worker has each of the routed experts that it holds, as vLLM's own map tells it. Who
asks has checked vLLM's version."""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from lora_moe_rl.upstream.checks import require_attributes

WHO = "lora_moe_rl/refit/expert_places.py"


def expert_places(layer: RoutedExperts) -> dict[int, int]:
    """`{global_expert: its place in the worker's stacks}` of one layer."""
    manager: ExpertMapManager = layer.expert_map_manager
    require_attributes(manager, ("expert_map", "global_num_experts"), WHO)
    if manager.expert_map is None:  # all are here
        return {expert: expert for expert in range(manager.global_num_experts)}
    # Shared experts that a kernel takes for routed ones come after these.
    places = manager.expert_map[: manager.global_num_experts].tolist()
    return {expert: place for expert, place in enumerate(places) if place != -1}
