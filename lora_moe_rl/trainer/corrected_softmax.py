"""A softmax router with a correction bias: ERNIE 4.5.

Experts are chosen by their score and correction, and weighed by the scores of those chosen, which
add up to one. megatron-core (`core/transformer/moe/`) corrects sigmoids alone: its config refuses a
softmax with a correction, and `topk_routing_with_score_function` would leave the correction out.
Megatron-Bridge 0.6.2 builds the model with sigmoids, which is another one.
"""

from __future__ import annotations

from functools import wraps

import torch
from megatron.core.transformer.moe import router

from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "lora_moe_rl/trainer/corrected_softmax.py"
_PARAMETERS = (
    "logits", "topk", "use_pre_softmax", "num_groups", "group_topk", "scaling_factor",
    "score_function", "expert_bias", "fused", "router_replay", "dense_output",
    "precomputed_indices",
)  # fmt: skip
_upstream = router.topk_routing_with_score_function


@wraps(_upstream)
def topk_routing_with_score_function(logits, topk, *, expert_bias=None, score_function, **options):
    """As upstream's, of logits `[T, E]`; a softmax with a correction is chosen here, and upstream
    weighs what was chosen: a softmax over their logits is their scores divided by the sum."""
    if score_function == "softmax" and expert_bias is not None:
        scores = torch.softmax(logits.detach(), dim=-1, dtype=torch.float32) + expert_bias
        options |= {
            "use_pre_softmax": False,
            "precomputed_indices": _chosen(scores, topk, options["router_replay"]),
        }
    return _upstream(
        logits, topk, score_function=score_function, expert_bias=expert_bias, **options
    )


def _chosen(scores: torch.Tensor, topk: int, replay) -> torch.Tensor:
    if replay is None:
        return _best(scores, topk)[1]
    return replay.get_replay_topk(scores, topk, None, None, _best)[1]


def _best(scores, topk, num_groups=None, group_topk=None):
    return torch.topk(scores, k=topk, dim=1)


def install(provider) -> None:
    """Makes the routers of models that the provider builds, which is finalised, weigh by a softmax.
    Those of others in this process compute as before: upstream has no softmax with a correction."""
    require_version("megatron-core", WHO)
    require_parameters(_upstream, _PARAMETERS, WHO)
    router.topk_routing_with_score_function = topk_routing_with_score_function
    provider.moe_router_score_function = "softmax"
