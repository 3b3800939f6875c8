"""Which linears of a model are adapted, with what ranks, scales and shapes."""

import subprocess
import sys

import pytest
from published_configs import DEEPSEEK_V2_LITE, GPT_OSS_20B, KIMI_K2, QWEN3_30B_A3B

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rollout.facts import SLOT_RANKS, served_module, slot_rank


def build(config, servable=True, **adapter) -> AdapterSpec:
    shape = ModelShape.from_hf_config(config)
    return AdapterSpec.build(shape, AdapterConfig(**adapter), servable)


def test_qwen3_30b_rank_1_has_the_published_number_of_adapter_parameters():
    # MinT (arXiv:2605.13779) reports 105.58 MB in bf16 at rank 1 and 37,248 separate tensors.
    spec = build(QWEN3_30B_A3B, rank=1)
    assert spec.num_parameters * 2 / 1e6 == pytest.approx(105.58, rel=2e-3)
    tensors = sum(2 * (site.num_experts or 1) for site in spec)
    assert tensors == 37_248


def test_kimi_k2_rank_32_is_41_gb():
    spec = build(KIMI_K2, rank=32)
    assert spec.num_parameters * 2 / 1e9 == pytest.approx(41.1, rel=0.01)
    first = [site.module for site in spec if site.layer == 0]
    assert "mlp.gate" in first and "experts.gate" not in first  # the first layer is dense
    assert not any(site.module == "kv_b_proj" for site in spec)


def test_rank_and_scale_of_experts_are_apart():
    spec = build(QWEN3_30B_A3B, rank=16, expert_rank=4, alpha=32)
    q, gate = spec.by_name["layers.0.q_proj"], spec.by_name["layers.0.experts.gate"]
    assert (q.rank, q.scale) == (16, 2.0)
    assert (gate.rank, gate.scale) == (4, 8.0)
    assert gate.shape_A == (128, 4, 2048) and gate.shape_B == (128, 768, 4)
    rslora = build(QWEN3_30B_A3B, rank=16, alpha=32, rslora=True)
    assert rslora.by_name["layers.0.q_proj"].scale == 8.0


def test_targets_are_patterns():
    spec = build(QWEN3_30B_A3B, targets=("experts.*", "q_proj"))
    assert {site.module for site in spec} == {
        "q_proj", "experts.gate", "experts.up", "experts.down",
    }  # fmt: skip


def test_a_target_that_the_model_lacks_is_refused_with_the_list():
    with pytest.raises(ConfigError, match=r"no module that matches 'kv_a_proj'.*q_proj"):
        build(QWEN3_30B_A3B, targets=("kv_a_proj",))


def test_kv_b_proj_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"kv_b_proj: vLLM absorbs it.*merged weights"):
        build(KIMI_K2, targets=("kv_b_proj",))


def test_kv_b_proj_is_adapted_by_its_name_where_no_engine_serves_the_adapter():
    spec = build(KIMI_K2, servable=False, targets=("kv_b_proj", "o_proj"))
    assert spec.by_name["layers.0.kv_b_proj"].shape_B == (64 * 256, 16)
    for pattern in ("*", "kv_*"):
        modules = {site.module for site in build(KIMI_K2, servable=False, targets=(pattern,))}
        assert "kv_a_proj" in modules and "kv_b_proj" not in modules


def ranks(spec: AdapterSpec, module: str) -> list[int]:
    return [site.rank for site in spec if site.module == module]


def test_the_last_pattern_that_matches_counts():
    pattern = {"experts.*": 8, "layers.0-3.*": 32, "layers.2.q_proj": 4, "layers.*.o_proj": 2}
    spec = build(QWEN3_30B_A3B, rank=16, rank_pattern=pattern)
    assert ranks(spec, "experts.up") == [32] * 4 + [8] * 44
    assert ranks(spec, "q_proj") == [32, 32, 4, 32] + [16] * 44
    assert ranks(spec, "o_proj") == [2] * 48
    again = build(QWEN3_30B_A3B, rank=16, rank_pattern=dict(reversed(pattern.items())))
    assert ranks(again, "experts.up") == [8] * 48  # "experts.*" is the last now


def test_patterns_of_alpha_and_rank_give_the_scale():
    adapter = {
        "rank": 4, "alpha": 8, "expert_alpha": 2, "rank_pattern": {"*_proj": 16},
        "alpha_pattern": {"experts.up": 3, "layers.1.*": 6},
    }  # fmt: skip
    spec = build(QWEN3_30B_A3B, **adapter)
    scales = [spec.by_name[f"layers.0.{m}"].scale for m in ("q_proj", "experts.up", "experts.down")]
    assert scales == [8 / 16, 3 / 4, 2 / 4]
    assert spec.by_name["layers.1.experts.up"].scale == 6 / 4
    root = build(QWEN3_30B_A3B, rslora=True, **adapter)
    assert root.by_name["layers.0.q_proj"].scale == 8 / 4


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("expert.*", "did you mean 'experts.*'?"),
        ("qproj", "did you mean 'q_proj'?"),
        ("xyz", "adapted are q_proj, k_proj"),
        ("layers.60.q_proj", "q_proj is adapted in layers 0 to 47"),
        ("kv_b_proj", "matches no adapted linear"),
        ("layers.3", "write layers.3.q_proj"),
        ("layers.x.q_proj", "write layers.3.q_proj"),
        ("layers.4-2.q_proj", "layers run from 4 to 2"),
    ],
)
@pytest.mark.parametrize("option", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_nothing_is_refused(option, key, message):
    with pytest.raises(ConfigError) as caught:
        build(QWEN3_30B_A3B, **{option: {"*": 4, key: 2}})
    assert f"adapter.{option}: '{key}': 2" in str(caught.value)
    assert message in str(caught.value)


def test_the_rank_of_experts_over_top_k():
    spec = build(QWEN3_30B_A3B, rank=20, expert_rank_over_top_k=True)  # 8 experts a token
    assert (ranks(spec, "q_proj")[0], ranks(spec, "experts.down")[0]) == (20, 2)
    with pytest.raises(ConfigError, match=r"rank=7 by the model's 8 experts .* to 8 or more"):
        build(QWEN3_30B_A3B, rank=7, expert_rank_over_top_k=True)


@pytest.mark.parametrize(
    "option",
    [
        {"expert_rank": 4},
        {"expert_alpha": 4},
        {"expert_rank_over_top_k": True},
        {"expert_layout": "shared_outer"},
    ],
)
def test_an_option_of_experts_without_experts_is_refused(option):
    key, value = next(iter(option.items()))
    with pytest.raises(ConfigError, match=rf"adapter.{key}={value}.* has no effect.*q_proj,o_proj"):
        build(QWEN3_30B_A3B, targets=("q_proj", "o_proj"), **option)


def test_experts_share_the_tensor_on_the_hidden_side():
    spec = build(QWEN3_30B_A3B, rank=4, expert_layout="shared_outer")
    gate, down = spec.by_name["layers.0.experts.gate"], spec.by_name["layers.0.experts.down"]
    assert (gate.shared, gate.shape_A, gate.shape_B) == ("A", (4, 2048), (128, 768, 4))
    assert (down.shared, down.shape_A, down.shape_B) == ("B", (128, 4, 768), (2048, 4))
    assert spec.by_name["layers.0.q_proj"].shared is None


def test_kimi_k2_with_shared_tensors_is_9_5_gb():
    spec = build(KIMI_K2, rank=32, expert_layout="shared_outer")
    assert spec.num_parameters * 2 / 1e9 == pytest.approx(9.5, rel=0.01)


def test_olora_doubles_the_rank_and_keeps_the_scale():
    pattern = {"experts.*": 3}
    spec = build(QWEN3_30B_A3B, rank=12, alpha=24, rank_pattern=pattern, init="olora")
    q, up = spec.by_name["layers.0.q_proj"], spec.by_name["layers.0.experts.up"]
    assert (q.rank, q.frozen_rank, q.trained_rank, q.scale) == (24, 12, 12, 2.0)
    assert (up.rank, up.frozen_rank, up.scale, up.shape_A) == (6, 3, 8.0, (128, 6, 2048))
    assert slot_rank(spec) == 32


def test_gate_and_up_share_a_slot_where_they_are_interleaved():
    spec = build(GPT_OSS_20B, rank=12, expert_rank=8)
    assert slot_rank(spec) == 16
    assert slot_rank(build(GPT_OSS_20B, rank=12, expert_rank=12)) == 32
    assert slot_rank(build(GPT_OSS_20B, rank=12, targets=("experts.down",))) == 16
    for module, served in (("q_proj", "qkv_proj"), ("o_proj", "o_proj")):
        site = spec.by_name[f"layers.0.{module}"]
        assert served_module(spec.shape, site)[0] == f"model.layers.0.attn.{served}"


def test_olora_cannot_have_more_rank_than_the_weight():
    narrow = DEEPSEEK_V2_LITE | {"kv_lora_rank": 8, "qk_rope_head_dim": 4}
    with pytest.raises(ConfigError, match=r"rank 16 of layers.0.kv_a_proj, which is 12 by 2048"):
        build(narrow, init="olora")


@pytest.mark.parametrize(
    ("adapter", "slot"),
    [
        ({"rank": 1}, 1),
        ({"rank": 2}, 8),
        ({"rank": 16, "expert_rank": 24}, 32),
        ({"rank": 48, "expert_rank": 8}, 64),
        ({"rank": 8, "rank_pattern": {"layers.47.v_proj": 65}}, 128),
        ({"rank": 64, "rank_pattern": {"*": 4}}, 8),
        ({"rank": 16, "expert_rank_over_top_k": True, "targets": ("experts.*",)}, 8),
    ],
)
def test_the_slot_holds_the_largest_rank(adapter, slot):
    assert slot_rank(build(QWEN3_30B_A3B, **adapter)) == slot
    assert slot in SLOT_RANKS


def test_the_spec_needs_no_torch():
    code = "import sys, lora_moe_rl.adapters.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_factors_of_the_learning_rate_are_by_pattern_and_each_pattern_has_to_match():
    spec = build(QWEN3_30B_A3B, rank=8)
    factors = spec.lr_factors({"experts.*": 0.5, "layers.0-1.experts.down": 0, "q_proj": 2})
    assert factors.keys() == {site.name for site in spec}
    assert factors["layers.0.experts.down"] == 0 and factors["layers.2.experts.down"] == 0.5
    assert factors["layers.0.experts.gate"] == 0.5
    assert factors["layers.7.q_proj"] == 2 and factors["layers.7.k_proj"] == 1
    with pytest.raises(ConfigError, match="trainer.lr_pattern: 'q_prj': 2 matches no adapted lin"):
        spec.lr_factors({"q_prj": 2})
    with pytest.raises(ConfigError, match="is 0 for every adapter: nothing would be trained"):
        spec.lr_factors({"*": 0})
    assert set(spec.lr_factors({"*": 0, "q_proj": 1}).values()) == {0, 1}
