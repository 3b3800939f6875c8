"""Our adapters against Megatron-Bridge 0.6.2's, on the same Megatron model.

One rank: `LoRA(share_expert_adapters=False)` on dense linears and grouped experts;
`CanonicalLoRA(share_expert_adapters=False)`, whose dense q, k, v and gate, up have an A each, as
ours; and `LoRA(experts_shared_outer_loras=True)`. Expert tensor parallelism: Bridge's forward is
not that of the merged weights; ours is.
"""

from __future__ import annotations

from unittest import mock

import bridge_lora
import hf
import linear_loss
import numpy as np
import pytest
import tiny_families
from ranks import random_adapter, run_ranks, spec_of

from lora_moe_rl.config import RunConfig

RANK, ALPHA = 4, 8
RELATIVE = 1e-5
ATTENTION = {
    "qwen3_moe": ["linear_qkv", "linear_proj"],
    "deepseek_v3": ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_proj"],
}


def with_one_A(tensors: dict[str, np.ndarray], experts_only: bool = False) -> dict:
    """The same adapter, in which sites that Megatron fuses have equal A."""
    out = dict(tensors)
    for name in tensors:
        for first, others in {"q_proj": ("k_proj", "v_proj"), "gate": ("up",)}.items():
            if name.endswith(f"{first}.A") and (".experts." in name or not experts_only):
                for other in others:
                    twin = f"{name.removesuffix(f'{first}.A')}{other}.A"
                    if twin in tensors:
                        out[twin] = tensors[name]
    return out


def transforms(family: str, expert_layout: str):
    """`{name: (Bridge's transform, whether only experts share an A)}`."""
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA

    attention = ATTENTION[family]
    modules = [*attention, "linear_fc1", "linear_fc2"]
    if expert_layout == "shared_outer":
        peft = LoRA(modules, dim=RANK, alpha=ALPHA, experts_shared_outer_loras=True)
        return {"shared_outer": (peft, False)}
    parts = {"linear_qkv": ["linear_q", "linear_k", "linear_v"]}
    canonical = [part for name in attention for part in parts.get(name, [name])]
    canonical += ["linear_fc1_gate", "linear_fc1_up", "linear_fc2"]
    options = {"dim": RANK, "alpha": ALPHA, "share_expert_adapters": False}
    return {
        "LoRA": (LoRA(modules, **options), False),
        "CanonicalLoRA": (CanonicalLoRA(canonical, **options), True),
    }


def one_rank(worker, spec, family, expert_layout):
    """By transform: the relative differences of ours to Bridge's, and where they are largest."""
    vocab = spec.shape.vocab_size
    with worker.engine.adapters.off():
        base = linear_loss.megatron_logits(worker.engine.chunks[0], vocab).detach().numpy()
    results = {}
    for case, (peft, experts_only) in transforms(family, expert_layout).items():
        tensors = with_one_A(random_adapter(spec), experts_only)
        logits, gradients = linear_loss.our_step(worker, tensors)
        model = bridge_lora.build(worker, peft)
        bridge_lora.load(model, bridge_lora.in_bridges_form(model, spec.shape, tensors))
        theirs = linear_loss.backward(linear_loss.megatron_logits(model, vocab))
        expected = {n: p.grad.numpy() for n, p in model.named_parameters() if p.requires_grad}
        got = bridge_lora.in_bridges_form(model, spec.shape, gradients, gradients=True)
        results[case] = {
            "logits": linear_loss.relative(logits, theirs),
            "gradients": linear_loss.worst(got, expected),
            "effect": linear_loss.relative(logits, base),
        }
    return results


@pytest.mark.parametrize("expert_layout", ["per_expert", "shared_outer"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_one_rank_equals_bridge(family, expert_layout, tmp_path):
    tiny_families.save(family, tmp_path)
    adapter = {"rank": RANK, "alpha": ALPHA, "expert_layout": expert_layout}
    config = RunConfig(model=str(tmp_path), adapter=adapter)
    (results,) = run_ranks(config, tmp_path, one_rank, family, expert_layout)
    for case, result in results.items():
        assert result["effect"] > 0.01, f"{case}: the adapter changes nothing"
        assert result["logits"] < RELATIVE, case
        difference, name = result["gradients"]
        print(f"{case}: logits {result['logits']:.1e}, gradients {difference:.1e} ({name})")
        assert difference < RELATIVE, (case, name)


def expert_tensor_parallel(worker, spec):
    """(our logits, Bridge's) of experts cut over two ranks."""
    import torch
    from megatron.bridge.peft.lora import LoRA
    from megatron.core import parallel_state as ps

    experts = ["*.mlp.experts.linear_fc1", "*.mlp.experts.linear_fc2"]
    peft = LoRA(target_modules=experts, dim=RANK, alpha=ALPHA, share_expert_adapters=False)
    tensors = with_one_A(random_adapter(spec))
    worker.set_adapter(tensors)
    model = bridge_lora.build(worker, peft)
    whole = bridge_lora.in_bridges_form(model, spec.shape, tensors)
    place = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
    bridge_lora.load(model, whole, bridge_lora.cut_experts(*place))
    with torch.no_grad():
        return [
            linear_loss.megatron_logits(m.eval(), spec.shape.vocab_size).numpy()
            for m in (worker.engine.chunks[0], model)
        ]


def test_expert_tensor_parallel_equals_merged_weights_where_bridge_does_not(tmp_path):
    with mock.patch.dict(tiny_families.COMMON, vocab_size=132):  # which two ranks divide
        reference = tiny_families.save("qwen3_moe", tmp_path)
    config = RunConfig(
        model=str(tmp_path),
        trainer={"world_size": 2, "tp": 2, "etp": 2},
        adapter={"rank": RANK, "alpha": ALPHA, "targets": ("experts.*",)},
    )
    spec = spec_of(tmp_path, config)
    vocab = spec.shape.vocab_size
    base = linear_loss.hugging_face_logits(reference, vocab).detach().numpy()
    hf.merge(reference, spec, with_one_A(random_adapter(spec)))
    merged = linear_loss.hugging_face_logits(reference, vocab).detach().numpy()
    assert linear_loss.relative(base, merged) > 0.01, "the adapter changes nothing"
    for ours, bridges in run_ranks(config, tmp_path, expert_tensor_parallel):
        assert linear_loss.relative(ours, merged) < RELATIVE
        # Megatron-Bridge 0.6.2 does not sum fc2's A x over ranks, and gathers an output that the
        # dispatcher then sums: GroupedExpertLinearAdapter in megatron/bridge/peft/utils.py.
        off = np.abs(bridges - merged).max()
        print(f"logits: ours {np.abs(ours - merged).max():.1e} off, Bridge's {off:.1e} off")
        assert off > 0.05, f"logits only {off:.1e} off: has Megatron-Bridge been mended?"
