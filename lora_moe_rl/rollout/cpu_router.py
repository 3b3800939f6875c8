"""Mend for vLLM on the CPU: scores with a correction bias, without groups (MiniMax-M2, ERNIE 4.5).

The router of the CPU (`cpu_router.py` of vLLM) knows sigmoids and corrections where experts stand
in groups alone: without them it fails an assertion for a sigmoid, and leaves the correction of a
softmax out. Without groups is one group of all experts.
"""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "lora_moe_rl/rollout/cpu_router.py"
_PARAMETERS = ("self", "hidden_states", "router_logits", "indices_type", "input_ids")

stock = CPURouter._compute_routing


def _compute_routing(
    self: CPURouter, hidden_states, router_logits, indices_type, *, input_ids=None
):
    ungrouped = not self.use_grouped_topk and self.custom_routing_function is None
    corrected = self.scoring_func == "softmax" and self.e_score_correction_bias is not None
    if ungrouped and (corrected or self.scoring_func == "sigmoid"):
        self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
    return stock(self, hidden_states, router_logits, indices_type, input_ids=input_ids)


def install() -> None:
    require_version("vllm", WHO)
    require_parameters(stock, _PARAMETERS, WHO)
    CPURouter._compute_routing = _compute_routing
