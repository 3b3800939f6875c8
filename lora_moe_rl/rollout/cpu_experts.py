"""Mend for vLLM on the CPU: LoRA on routed experts, and experts of which each rank has some.

`vllm/model_executor/layers/fused_moe/oracle/unquantized.py` always picks Triton when LoRA is on,
which the CPU has not, and vLLM's CPU kernels know no LoRA. Nor do they look at the map from experts
to a rank's own (`expert_map`): without LoRA they read other experts, or beyond their memory. Here:
an experts class in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import pad, silu
from vllm.distributed import (
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle

from lora_moe_rl.kernels.dequant import Packed, dequantise
from lora_moe_rl.kernels.grouped_lora.torch_path import grouped
from lora_moe_rl.rollout.cpu_lora import GroupedLoRA, SlotGroup, group_by_slot
from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/rollout/cpu_experts.py"

# [E, out, in], as numbers or quantised.
Weights = torch.Tensor | Packed


class SlotRows(NamedTuple):
    """Rows start:stop of the sorted tokens are in one slot (-1: no adapter); counts [E] of them go
    to each expert, in order."""

    slot: int
    start: int
    stop: int
    counts: torch.Tensor

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x [N, ...]."""
        return x[self.start : self.stop]


def _swiglu(hidden: torch.Tensor) -> torch.Tensor:
    """[N, I] from gate and up, one after the other."""
    gate, up = hidden.chunk(2, dim=-1)
    return silu(gate) * up


def _clamped_swiglu(hidden: torch.Tensor) -> torch.Tensor:
    """[N, I] from gate and up in turn; its numbers are in vLLM's code too (SwigluOAIAndMul)."""
    gate, up = hidden[:, ::2].clamp(max=7.0), hidden[:, 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


ACTIVATIONS = {MoEActivation.SILU: _swiglu, MoEActivation.SWIGLUOAI: _clamped_swiglu}


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
        gate_up, down = self.weights(w1, w2)
        activated = ACTIVATIONS.get(activation)
        assert activated is not None, f"{WHO} does not know the activation {activation}"
        tokens, top_k = topk_ids.shape
        experts = topk_ids.reshape(-1).long()
        if expert_map is not None:
            experts = expert_map.long()[experts]  # -1: an expert of another worker
        order, slots = sort_by_expert(experts, gate_up.shape[0], self._slot_groups(), top_k)

        lora = self._lora_context if any(rows.slot >= 0 for rows in slots) else None
        hidden = self._gate_up(hidden_states[order // top_k], gate_up, slots, lora)
        if self.w1_bias is not None:
            hidden += self.w1_bias[experts[order]]
        result = self._down(activated(hidden), down, slots, lora).float()
        if self.w2_bias is not None:  # of one rank that shares an expert; the others' are zero
            result += self.w2_bias[experts[order]]
        if not apply_router_weight_on_input:
            result *= topk_weights.reshape(-1)[order].unsqueeze(1).float()
        scattered = result.new_zeros(tokens * top_k, output.shape[-1])
        scattered[order] = result
        output.copy_(scattered.view(tokens, top_k, -1).sum(dim=1))

    def weights(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[Weights, Weights]:
        """Of gate and up, and of down: `[E, 2I, H]` and `[E, H, I]`."""
        return w1, w2

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """What the base's weights are multiplied with in place of x."""
        return x

    def _gate_up(
        self, x: torch.Tensor, w1: Weights, slots: list[SlotRows], lora: MoELoRAContext | None
    ):
        """gate(x) and up(x), [N, 2I], as the rows of w1 have them, for sorted rows x [N, H]."""
        hidden = _matmul(self.activations(x), w1, slots)
        if lora is None:
            return hidden
        start = 0  # gate and up one after the other, or both in one
        pairs = zip(lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, strict=True)
        for lora_a, lora_b in pairs:
            low = _shrink(x, lora_a, slots)
            if lora.fully_sharded:  # each worker has a part of the rank
                low = tensor_model_parallel_all_gather(low)
            width = lora_b.shape[2]
            _expand(hidden[:, start : start + width], low, lora_b, slots)
            start += width
        return hidden

    def _down(
        self, inner: torch.Tensor, w2: Weights, slots: list[SlotRows], lora: MoELoRAContext | None
    ):
        """[N, H] from sorted rows inner [N, I]; the workers' results are summed later."""
        result = _matmul(self.activations(inner), w2, slots)
        if lora is not None:
            low, target = _shrink(inner, lora.w2_lora_a_stacked[0], slots), result
            lora_b = lora.w2_lora_b_stacked[0]
            if lora.fully_sharded:  # each worker has a part of the columns of the output
                low = tensor_model_parallel_all_reduce(low)
                width = lora_b.shape[2]
                target = result[:, lora.tp_rank * width : (lora.tp_rank + 1) * width]
            _expand(target, low, lora_b, slots)
        return result

    def _slot_groups(self) -> list[SlotGroup]:
        """Tokens by adapter slot, those of other data-parallel ranks too; none when no expert takes
        adapters."""
        if self._lora_context is None:
            return []
        if (slots := self._lora_context.local_token_lora_mapping) is not None:
            return group_by_slot(slots)
        wrapper = self._lora_context.punica_wrapper
        assert isinstance(wrapper, GroupedLoRA), f"{WHO} needs {GroupedLoRA.__qualname__}"
        return wrapper.slot_groups


def sort_by_expert(
    experts: torch.Tensor, num_experts: int, slot_groups: list[SlotGroup], top_k: int
) -> tuple[torch.Tensor, list[SlotRows]]:
    """(token-expert pairs sorted by slot and expert, their slots); pairs of expert -1 are left out.

    `experts` [T * top_k] is the local expert of each pair.
    """
    number = torch.zeros(len(experts) // top_k, dtype=torch.long)  # 0: no adapter
    for slot, tokens in slot_groups:
        number[slice(None) if tokens is None else tokens] = slot + 1
    key = number.repeat_interleave(top_k) * num_experts + experts
    key.masked_fill_(experts < 0, -1)
    counts = torch.bincount(key + 1, minlength=1)
    remote, counts = int(counts[0]), counts[1:]
    counts = pad(counts, (0, -len(counts) % num_experts)).view(-1, num_experts)
    slots, start = [], 0
    for slot, (of_slot, rows) in enumerate(zip(counts, counts.sum(1).tolist(), strict=True), -1):
        if rows:
            slots.append(SlotRows(slot, start, start + rows, of_slot))
        start += rows
    return torch.argsort(key, stable=True)[remote:], slots


def _matmul(x: torch.Tensor, weights: Weights, slots: list[SlotRows]) -> torch.Tensor:
    """Each row of x [N, in] times its expert's weight: weights [E, out, in]."""
    if isinstance(weights, torch.Tensor):
        return _of_slots(x, slots, lambda slot: weights, weights.shape[1])
    result, start = x.new_empty(len(x), weights.shape[1]), 0
    for rows in slots:
        for expert, count in enumerate(rows.counts.tolist()):
            if count:
                weight, stop = dequantise(weights.of(expert), x.dtype), start + count
                torch.mm(x[start:stop], weight.T, out=result[start:stop])
                start = stop
    return result


def _shrink(x: torch.Tensor, lora_a: torch.Tensor, slots: list[SlotRows]) -> torch.Tensor:
    """x A^T, [N, r] in the dtype of A [slots, E, r, in] (1 for E: of all experts); zero in rows
    without an adapter."""

    def of_slot(slot: int) -> torch.Tensor | None:
        return _of_experts(lora_a[slot]) if slot >= 0 else None

    return _of_slots(x.to(lora_a.dtype), slots, of_slot, lora_a.shape[2])


def _of_slots(
    x: torch.Tensor,
    slots: list[SlotRows],
    weights: Callable[[int], torch.Tensor | None],
    width: int,
) -> torch.Tensor:
    """[N, width]: x [N, in] times its slot's weights [E, width, in], or [width, in] for all
    experts; zero where it has none."""
    parts = []
    for rows in slots:
        of_slot = weights(rows.slot)
        if of_slot is None:
            parts.append(x.new_zeros(rows.stop - rows.start, width))
        else:
            parts.append(grouped(rows.of(x), of_slot.mT, rows.counts))
    return parts[0] if len(parts) == 1 else torch.cat([x.new_empty(0, width), *parts])


def _expand(
    target: torch.Tensor, low: torch.Tensor, lora_b: torch.Tensor, slots: list[SlotRows]
) -> None:
    """target [N, out] += low B^T for rows with an adapter; B [slots, E, out, r] (1 for E: of all
    experts)."""
    for rows in slots:
        if rows.slot >= 0:
            part = grouped(rows.of(low), _of_experts(lora_b[rows.slot]).mT, rows.counts)
            rows.of(target).add_(part)


def _of_experts(slot: torch.Tensor) -> torch.Tensor:
    """[E, ...] as it is, and [1, ...] without that dimension: one matrix for all experts."""
    return slot[0] if len(slot) == 1 else slot


def install() -> None:
    """Makes vLLM pick this class wherever LoRA is on, or a rank has some of the experts."""
    require_version("vllm", WHO)
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
        if moe_config.is_lora_enabled or moe_config.use_ep:
            return oracle.UnquantizedMoeBackend.CPU, TorchLoRAExperts
        return stock(moe_config)

    unquantized_fused_moe_method.select_unquantized_moe_backend = select
