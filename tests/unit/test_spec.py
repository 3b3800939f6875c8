"""Which linears of a model are adapted, from its config alone."""

import subprocess
import sys

import pytest

from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.errors import ConfigError, ModelError

# Sizes of the published configs.
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936,
    "max_position_embeddings": 40960, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}  # fmt: skip


def build(config, **adapter) -> AdapterSpec:
    return AdapterSpec.build(ModelShape.from_hf_config(config), AdapterConfig(**adapter))


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
    with pytest.raises(ConfigError, match=r"kv_b_proj: vLLM absorbs it"):
        build(KIMI_K2, targets=("kv_b_proj",))


def test_another_architecture_is_refused_with_the_list():
    with pytest.raises(ModelError, match=r"LlamaForCausalLM is not supported.*Qwen3-MoE"):
        ModelShape.from_hf_config({"architectures": ["LlamaForCausalLM"]})


def test_the_spec_needs_no_torch():
    code = "import sys, lora_moe_rl.adapters.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
