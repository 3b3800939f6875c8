"""Mend for vLLM 0.31.0 on the CPU: LoRA on routed experts.

`vllm/model_executor/layers/fused_moe/oracle/unquantized.py` always picks Triton when LoRA is on,
which the CPU has not, and vLLM's CPU kernels know no LoRA. Here: an experts class in plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import vllm
from torch.nn.functional import silu
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle

from lora_moe_rl.rollout.cpu_lora import GroupedLoRA
from lora_moe_rl.upstream import require_attributes, require_parameters, require_version

KNOWN_VLLM = ("0.31.0",)
WHO = "lora_moe_rl/rollout/cpu_experts.py"


class Run(NamedTuple):
    """Rows start:stop of the sorted tokens go to one expert, in one slot (-1: no adapter)."""

    slot: int
    expert: int
    start: int
    stop: int


class TorchLoRAExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """Gated experts on sorted tokens. Weights stay as loaded: w1 [E, 2I, H], w2 [E, H, I]."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keeps the weights: upstream would repack them for its own kernel."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta,
        apply_router_weight_on_input: bool,
    ) -> None:
        """output [T, H] = sum over k of topk_weights[t, k] * expert(topk_ids[t, k])(x[t])."""
        assert activation == MoEActivation.SILU, f"{WHO} knows silu, not {activation}"
        tokens, top_k = topk_ids.shape
        experts = topk_ids.reshape(-1).long()
        if expert_map is not None:
            experts = expert_map.long()[experts]  # -1: an expert of another worker
        order, runs = sort_by_expert(experts, w1.shape[0], self._slot_groups(tokens), top_k)

        lora = self._lora_context
        inner = _gate_up(hidden_states[order // top_k], w1, runs, lora)
        result = _down(inner, w2, runs, lora).float()
        if not apply_router_weight_on_input:
            result *= topk_weights.reshape(-1)[order].unsqueeze(1).float()
        scattered = result.new_zeros(tokens * top_k, output.shape[-1])
        scattered[order] = result
        output.copy_(scattered.view(tokens, top_k, -1).sum(dim=1))

    def _slot_groups(self, tokens: int) -> list:
        """Tokens by adapter slot; none when no expert takes adapters."""
        if self._lora_context is None:
            return []
        wrapper = self._lora_context.punica_wrapper
        assert isinstance(wrapper, GroupedLoRA), f"{WHO} needs {GroupedLoRA.__qualname__}"
        assert self._lora_context.local_token_lora_mapping is None, (
            f"{WHO} does not know expert parallelism with tokens dispatched over workers"
        )
        return wrapper.slot_groups


def sort_by_expert(
    experts: torch.Tensor, num_experts: int, slot_groups: list, top_k: int
) -> tuple[torch.Tensor, list[Run]]:
    """(token-expert pairs in sorted order, their runs); pairs of expert -1 are left out.

    `experts` [T * top_k] is the local expert of each pair.
    """
    slots = torch.zeros(len(experts) // top_k, dtype=torch.long)  # 0: no adapter
    for slot, tokens in slot_groups:
        slots[slice(None) if tokens is None else tokens] = slot + 1
    key = slots.repeat_interleave(top_k) * num_experts + experts
    key.masked_fill_(experts < 0, -1)
    order = torch.argsort(key, stable=True)
    values, counts = torch.unique_consecutive(key[order], return_counts=True)
    values, counts = values.tolist(), counts.tolist()
    remote = counts.pop(0) if values and values[0] < 0 else 0
    runs, start = [], 0
    for value, count in zip(values[1:] if remote else values, counts, strict=True):
        slot, expert = divmod(value, num_experts)
        runs.append(Run(slot - 1, expert, start, start + count))
        start += count
    return order[remote:], runs


def _gate_up(x: torch.Tensor, w1: torch.Tensor, runs: list[Run], lora: MoELoRAContext | None):
    """silu(gate(x)) * up(x), [N, I], for sorted rows x [N, H]."""
    width = w1.shape[1] // 2
    hidden = x.new_empty(len(x), 2 * width)
    for slot, expert, start, stop in runs:
        rows, target = x[start:stop], hidden[start:stop]
        torch.mm(rows, w1[expert].T, out=target)
        if slot >= 0 and lora is not None:
            for i in range(2):  # gate, up
                _add_lora(
                    target[:, i * width : (i + 1) * width],
                    rows,
                    lora.w13_lora_a_stacked[i][slot, expert],
                    lora.w13_lora_b_stacked[i][slot, expert],
                )
    return silu(hidden[:, :width]) * hidden[:, width:]


def _down(inner: torch.Tensor, w2: torch.Tensor, runs: list[Run], lora: MoELoRAContext | None):
    """[N, H] from sorted rows inner [N, I]."""
    result = inner.new_empty(len(inner), w2.shape[1])
    for slot, expert, start, stop in runs:
        rows, target = inner[start:stop], result[start:stop]
        torch.mm(rows, w2[expert].T, out=target)
        if slot >= 0 and lora is not None:
            lora_a, lora_b = lora.w2_lora_a_stacked[0], lora.w2_lora_b_stacked[0]
            _add_lora(target, rows, lora_a[slot, expert], lora_b[slot, expert])
    return result


def _add_lora(target: torch.Tensor, x: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor):
    target.addmm_((x.to(lora_a.dtype) @ lora_a.T).to(target.dtype), lora_b.T.to(target.dtype))


def install() -> None:
    """Makes vLLM pick this class wherever LoRA is on."""
    require_version("vllm", vllm.__version__, KNOWN_VLLM, WHO)
    require_attributes(oracle, ("select_unquantized_moe_backend",), WHO)
    require_parameters(
        CPUUnquantizedExperts.apply,
        ("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids"),
        WHO,
    )
    stock = oracle.select_unquantized_moe_backend
    if unquantized_fused_moe_method.select_unquantized_moe_backend is not stock:
        return  # installed already: a process may load its plugins twice

    def select(moe_config):
        if moe_config.is_lora_enabled:
            return oracle.UnquantizedMoeBackend.CPU, TorchLoRAExperts
        return stock(moe_config)

    unquantized_fused_moe_method.select_unquantized_moe_backend = select
