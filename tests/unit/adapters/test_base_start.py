"""An adapter that begins at its base: the function that it trains against PEFT's, and where the
base's weights are read."""

from __future__ import annotations

import json

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_moe_rl.adapters.base_start import BaseStart, BaseWeights
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.adapters.starts import start
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.errors import FileError, ModelError

RANK, ALPHA = 3, 8
CPU = torch.device("cpu")


def peft_layer(weight: torch.Tensor, rank: int = RANK):
    """(PEFT's layer with OLoRA on that weight, the weight as PEFT leaves it)."""
    model = torch.nn.Sequential(torch.nn.Linear(*reversed(weight.shape), bias=False))
    model[0].weight.data.copy_(weight)
    config = peft.LoraConfig(
        r=rank, lora_alpha=ALPHA, target_modules=["0"], init_lora_weights="olora"
    )
    return peft.get_peft_model(model, config).base_model.model[0]


def test_trained_like_peft_over_the_untouched_base():
    """The same Adam steps on A and B: PEFT over its moved base, ours over the base itself."""
    torch.manual_seed(0)
    weight, x, target = torch.randn(9, 7), torch.randn(20, 7), torch.randn(20, 9)
    theirs = peft_layer(weight)
    A0, B0 = start("olora", weight, RANK, ALPHA / RANK)
    A, B = A0.clone().requires_grad_(), B0.clone().requires_grad_()

    def ours(x):
        whole_A, whole_B = torch.cat([A, A0]), torch.cat([B, -B0], dim=1)
        return x @ weight.T + ALPHA / RANK * x @ whole_A.T @ whole_B.T

    torch.testing.assert_close(ours(x), x @ weight.T, rtol=1e-5, atol=1e-5)
    factors = [theirs.lora_A["default"].weight, theirs.lora_B["default"].weight]
    for function, parameters in ((theirs, factors), (ours, [A, B])):
        optimizer = torch.optim.Adam(parameters, lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            (function(x) - target).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    assert (ours(x) - x @ weight.T).abs().max() > 0.05, "nothing was trained"


# The reader ---------------------------------------------------------------------------------

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8,
    "vocab_size": 16, "max_position_embeddings": 32, "num_attention_heads": 2,
    "num_experts_per_tok": 2, "q_lora_rank": 6, "kv_lora_rank": 5, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "intermediate_size": 12, "moe_intermediate_size": 6,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
SHAPE = ModelShape.from_hf_config(DEEPSEEK)
SPEC = AdapterSpec.build(SHAPE, AdapterConfig(rank=RANK, init="olora"))


@pytest.fixture
def model_dir(tmp_path):
    """The adapted weights of layer 1, in two files: experts in the second."""
    torch.manual_seed(0)
    hidden, inner = 8, 6
    prefix = "model.layers.1."
    first = {
        f"{prefix}self_attn.kv_a_proj_with_mqa.weight": torch.randn(9, hidden),
        f"{prefix}mlp.shared_experts.down_proj.weight": torch.randn(hidden, inner).bfloat16(),
    }
    second = {
        f"{prefix}mlp.experts.{e}.up_proj.weight": torch.randn(inner, hidden) for e in range(4)
    }
    save_file(first, tmp_path / "a.safetensors")
    save_file(second, tmp_path / "b.safetensors")
    names = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    return tmp_path


def start_of(model_dir, name: str, experts: range | None = None):
    return BaseStart("olora", model_dir, SHAPE, CPU).tensors(
        SPEC.by_name[f"layers.1.{name}"], experts
    )


@pytest.mark.parametrize("name", ["kv_a_proj", "shared_expert.down"])
def test_a_dense_site_is_read_by_its_hugging_face_name(model_dir, name):
    A0, B0 = start_of(model_dir, name)
    keys = {"kv_a_proj": "self_attn.kv_a_proj_with_mqa",
            "shared_expert.down": "mlp.shared_experts.down_proj"}  # fmt: skip
    weight = load_file(model_dir / "a.safetensors")[f"model.layers.1.{keys[name]}.weight"].float()
    expected_A, expected_B = start("olora", weight, RANK, ALPHA / RANK)
    np.testing.assert_array_equal(A0, expected_A)
    np.testing.assert_array_equal(B0, expected_B)
    assert A0.dtype == np.float32


def test_experts_are_read_by_their_global_number(model_dir):
    A0, B0 = start_of(model_dir, "experts.up", range(1, 3))
    assert A0.shape == (2, RANK, 8) and B0.shape == (2, 6, RANK)
    weights = load_file(model_dir / "b.safetensors")
    for local, expert in enumerate((1, 2)):
        weight = weights[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        A, B = start("olora", weight, RANK, ALPHA / RANK)
        np.testing.assert_array_equal(A0[local], A)
        np.testing.assert_array_equal(B0[local], B)


def test_a_missing_weight_names_it_and_the_directory(model_dir):
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.o_proj\.weight is not in .*olora"):
        start_of(model_dir, "o_proj")


def test_a_missing_file_is_named(model_dir):
    (model_dir / "a.safetensors").unlink()
    with pytest.raises(ModelError, match=r"a\.safetensors is missing; the index says it holds"):
        start_of(model_dir, "kv_a_proj")


def test_a_directory_without_safetensors_is_refused(tmp_path):
    with pytest.raises(ModelError, match="neither model.safetensors nor"):
        start_of(tmp_path, "kv_a_proj")


def test_quantised_bases_are_refused(tmp_path):
    key = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    save_file({key: torch.zeros(9, 8).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="F8_E4M3: of a quantised base"):
        start_of(tmp_path, "kv_a_proj")
    packed = {f"{key}_packed": torch.zeros(9, 1, dtype=torch.int32)}
    save_file(packed, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="only .*weight_packed: a quantised base"):
        start_of(tmp_path, "kv_a_proj")


def test_a_weight_of_another_shape_is_refused(tmp_path):
    key = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    save_file({key: torch.zeros(8, 9)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has shape \(8, 9\); config.json says \(9, 8\)"):
        start_of(tmp_path, "kv_a_proj")


def test_an_index_cannot_lead_out_of_its_directory(tmp_path):
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="elsewhere.safetensors', which is not a file beside it"):
        BaseWeights(tmp_path, "olora").read("model.norm")


def test_two_models_in_one_directory_are_refused(tmp_path):
    for name, value in (("model-1.safetensors", 1.0), ("model.safetensors", 2.0)):
        save_file({"model.norm.weight": torch.full((2,), value)}, tmp_path / name)
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match="that does not name it"):
        BaseWeights(tmp_path, "olora").read("model.norm")
