"""The CPU engine's experts against one token and one expert at a time, in float64."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from lora_moe_rl.rollout.cpu_experts import TorchLoRAExperts
from lora_moe_rl.rollout.cpu_lora import GroupedLoRA

TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH, SLOTS = 24, 2, 4, 16, 12, 3
EVEN = torch.arange(0, TOKENS, 2)

# The slot of tokens, as the engine groups them.
GROUPS = {
    "base": [],
    "one slot": [(1, None)],
    "two slots": [(0, EVEN), (2, EVEN + 1)],
    "some without": [(2, EVEN)],
}


def layer(groups, rank: int) -> tuple[TorchLoRAExperts, SimpleNamespace]:
    """(experts, their context) with adapters of all slots."""
    wrapper = object.__new__(GroupedLoRA)
    wrapper.slot_groups = groups
    context = SimpleNamespace(
        w13_lora_a_stacked=[torch.randn(SLOTS, EXPERTS, rank, HIDDEN) for _ in range(2)],
        w13_lora_b_stacked=[torch.randn(SLOTS, EXPERTS, WIDTH, rank) for _ in range(2)],
        w2_lora_a_stacked=[torch.randn(SLOTS, EXPERTS, rank, WIDTH)],
        w2_lora_b_stacked=[torch.randn(SLOTS, EXPERTS, HIDDEN, rank)],
        fully_sharded=False,
        local_token_lora_mapping=None,
        punica_wrapper=wrapper,
    )
    experts = object.__new__(TorchLoRAExperts)
    experts.quant_config = SimpleNamespace(w1_bias=None, w2_bias=None)
    experts._lora_context = context
    return experts, context


def by_hand(context, slot: int, expert: int, x, w1, w2) -> torch.Tensor:
    """One expert on one token, with the adapter of its slot."""

    def linear(x, weight, lora_a, lora_b):
        y = weight.double() @ x
        return (
            y
            if slot < 0
            else y + lora_b[slot, expert].double() @ (lora_a[slot, expert].double() @ x)
        )

    a, b = context.w13_lora_a_stacked, context.w13_lora_b_stacked
    gate = linear(x.double(), w1[expert, :WIDTH], a[0], b[0])
    up = linear(x.double(), w1[expert, WIDTH:], a[1], b[1])
    inner = torch.nn.functional.silu(gate) * up
    return linear(inner, w2[expert], context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0])


@pytest.mark.parametrize("rank", [8, 1])  # 1: no grouped product takes it
@pytest.mark.parametrize("held", [None, [0, -1, 2, 1], [-1] * EXPERTS], ids=["all", "some", "none"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_experts_with_adapters(groups, held, rank):
    torch.manual_seed(0)
    experts, context = layer(groups, rank)
    x, output = torch.randn(TOKENS, HIDDEN), torch.full((TOKENS, HIDDEN), torch.nan)
    w1 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 4
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH) / 4
    ids = torch.randint(0, EXPERTS - 1, (TOKENS, TOP_K))  # the last expert has no token
    weights = torch.rand(TOKENS, TOP_K)
    of_worker = None if held is None else torch.tensor(held)
    nothing = [None] * 4
    experts.apply(
        *(output, x, w1, w2, weights, ids, MoEActivation.SILU, EXPERTS, of_worker),
        *(*nothing, None, False),
    )
    slots = torch.full((TOKENS,), -1)
    for slot, tokens in groups:
        slots[slice(None) if tokens is None else tokens] = slot
    for token in range(TOKENS):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            local = expert if held is None else held[expert]
            if local >= 0:
                one = by_hand(context, int(slots[token]), local, x[token], w1, w2)
                expected += weight.double() * one
        scale = max(1.0, float(expected.abs().max()))
        assert (output[token].double() - expected).abs().max() <= 1e-5 * scale
