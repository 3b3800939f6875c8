"""The packed form of an adapter: vLLM's modules, scales, dtypes, checksums."""

import numpy as np
import pytest
import torch
from published_configs import (
    DEEPSEEK_V3,
    GLM_4_5_AIR,
    MIXTRAL_8X7B,
    QWEN1_5_MOE_A2_7B,
    QWEN3_30B_A3B,
    shrunk,
)

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.buffers import read_shared, shared_buffer
from lora_moe_rl.refit.pack import Manifest, layout, pack, unpack

QWEN = shrunk(QWEN3_30B_A3B) | {"num_hidden_layers": 2, "mlp_only_layers": [0]}
DEEPSEEK = shrunk(DEEPSEEK_V3) | {"num_hidden_layers": 2, "first_k_dense_replace": 1}


def make_spec(model=QWEN, servable=True, **adapter) -> AdapterSpec:
    shape = ModelShape.from_hf_config(model)
    return AdapterSpec.build(shape, AdapterConfig(**adapter), servable)


def make_tensors(spec: AdapterSpec, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal(shape, dtype=np.float32)
        for name, shape in spec.tensor_shapes.items()
    }


def pack_new(spec, tensors, dtype="float32", version=3):
    plan = layout(spec, dtype)
    buffer = np.zeros(plan.nbytes, dtype=np.uint8)
    return pack(spec, plan, tensors, version, buffer), buffer


def test_qwen_sites_go_to_the_modules_of_vllm():
    spec = make_spec(rank=4, expert_rank=2, alpha=8)
    tensors = make_tensors(spec)
    modules = unpack(*pack_new(spec, tensors))
    assert list(modules) == [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.experts",
    ]
    for part, name in enumerate(["q_proj", "k_proj", "v_proj"]):
        lora_a, lora_b = modules["model.layers.1.self_attn.qkv_proj"][part]
        np.testing.assert_array_equal(lora_a, tensors[f"layers.1.{name}.A"])
        np.testing.assert_array_equal(lora_b, 2 * tensors[f"layers.1.{name}.B"])
    for part, name in enumerate(["experts.gate", "experts.down", "experts.up"]):
        lora_a, lora_b = modules["model.layers.1.mlp.experts"][part]
        assert lora_a.shape == spec.by_name[f"layers.1.{name}"].shape_A
        np.testing.assert_array_equal(lora_b, 4 * tensors[f"layers.1.{name}.B"])


def test_deepseek_sites_go_to_the_modules_of_vllm():
    modules = unpack(*pack_new(spec := make_spec(DEEPSEEK), make_tensors(spec)))
    assert [name.removeprefix("model.layers.1.") for name in modules if ".1." in name] == [
        "self_attn.fused_qkv_a_proj",
        "self_attn.q_b_proj",
        "self_attn.o_proj",
        "mlp.experts",
        "mlp.shared_experts.gate_up_proj",
        "mlp.shared_experts.down_proj",
    ]


def test_deepseek_without_q_compression():
    spec = make_spec(DEEPSEEK | {"q_lora_rank": None}, targets=("q_proj", "kv_a_proj"))
    modules = unpack(*pack_new(spec, make_tensors(spec)))
    assert "model.layers.0.self_attn.q_proj" in modules
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa" in modules


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (QWEN1_5_MOE_A2_7B, ["mlp.experts", "mlp.shared_expert.gate_up_proj",
                             "mlp.shared_expert.down_proj"]),
        (MIXTRAL_8X7B, ["block_sparse_moe.experts"]),
        (GLM_4_5_AIR, ["mlp.experts", "mlp.shared_experts.gate_up_proj",
                       "mlp.shared_experts.down_proj"]),
    ],
)  # fmt: skip
def test_blocks_of_experts_have_their_familys_name(model, names):
    spec = make_spec(shrunk(model), targets=("q_proj", "experts.*", "*.down", "*.gate"))
    modules = unpack(*pack_new(spec, make_tensors(spec)))
    last = "model.layers.3."
    found = [name.removeprefix(last) for name in modules if name.startswith(last)]
    assert found == ["self_attn.qkv_proj", *names]


def test_kv_b_proj_has_no_slot():
    spec = make_spec(DEEPSEEK, servable=False, targets=("kv_b_proj",))
    with pytest.raises(RefitError, match=r"layers.0.kv_b_proj has no adapter slot in vLLM: vLLM"):
        layout(spec, "float32")


def test_a_tensor_that_experts_share_travels_once():
    spec = make_spec(expert_layout="shared_outer", rank=4, targets=("experts.*",), alpha=4)
    tensors = make_tensors(spec)
    modules = unpack(*pack_new(spec, tensors))
    (gate_a, gate_b), (down_a, down_b), _ = modules["model.layers.1.mlp.experts"]
    assert (gate_a.shape, gate_b.shape) == ((4, 48), (5, 14, 4))
    assert (down_a.shape, down_b.shape) == ((5, 4, 14), (48, 4))
    np.testing.assert_array_equal(down_b, tensors["layers.1.experts.down.B"])
    per_expert = make_spec(rank=4, targets=("experts.*",))
    assert layout(spec, "float32").nbytes < layout(per_expert, "float32").nbytes / 2


def test_parts_of_one_module_may_differ_in_rank():
    spec = make_spec(rank=4, rank_pattern={"k_proj": 3, "experts.up": 2, "experts.down": 5})
    modules = unpack(*pack_new(spec, make_tensors(spec)))
    qkv, experts = (
        modules[f"model.layers.1.{name}"] for name in ("self_attn.qkv_proj", "mlp.experts")
    )
    assert [pair[0].shape[-2] for pair in qkv if pair] == [4, 3, 4]
    assert [pair[1].shape[-1] for pair in experts if pair] == [4, 5, 2]  # gate, down, up


def test_parts_that_are_not_adapted_are_absent():
    spec = make_spec(targets=("k_proj", "experts.up"))
    modules = unpack(*pack_new(spec, make_tensors(spec)))
    qkv = modules["model.layers.1.self_attn.qkv_proj"]
    experts = modules["model.layers.1.mlp.experts"]
    assert [pair is not None for pair in qkv] == [False, True, False]
    assert [pair is not None for pair in experts] == [False, False, True]


def test_bfloat16_is_rounded_as_torch_rounds():
    spec = make_spec(targets=("o_proj",), rank=4, alpha=4)
    tensors = make_tensors(spec)
    # Ties, subnormals, and the largest value that does not overflow.
    tensors["layers.0.o_proj.A"].flat[:4] = [1.00390625, 1.01171875, 1e-40, 3.38e38]
    modules = unpack(*pack_new(spec, tensors, "bfloat16"))
    got = torch.from_numpy(modules["model.layers.0.self_attn.o_proj"][0][0]).view(torch.bfloat16)
    assert torch.equal(got, torch.from_numpy(tensors["layers.0.o_proj.A"]).bfloat16())


def test_the_manifest_survives_json():
    spec = make_spec()
    manifest, _ = pack_new(spec, make_tensors(spec))
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_equal_adapters_have_equal_checksums_and_others_not():
    spec = make_spec()
    first = make_tensors(spec)
    changed = make_tensors(spec)
    changed["layers.1.experts.down.B"][3, 2, 1] += 1e-3
    checksums = [pack_new(spec, t)[0].checksum for t in (first, make_tensors(spec), changed)]
    assert checksums[0] == checksums[1] != checksums[2]


def test_one_changed_byte_is_found_and_named():
    spec = make_spec()
    manifest, buffer = pack_new(spec, make_tensors(spec))
    entry = manifest.entries[5]
    buffer[entry.offset + 7] ^= 1
    with pytest.raises(RefitError, match=f"checksum of {entry.site}.{entry.matrix} differs"):
        unpack(manifest, buffer)


def test_a_short_buffer_is_an_error():
    spec = make_spec()
    manifest, buffer = pack_new(spec, make_tensors(spec))
    with pytest.raises(RefitError, match="bytes arrived"):
        unpack(manifest, buffer[:-64])


def test_a_shared_buffer_is_read_back_and_removed():
    with shared_buffer(1000) as (path, buffer):
        buffer[:] = np.arange(1000) % 251
        np.testing.assert_array_equal(read_shared(path, 1000), buffer)
    with pytest.raises(FileNotFoundError):
        read_shared(path, 1000)


def test_a_shared_buffer_larger_than_memory_is_an_error():
    with pytest.raises(RefitError, match="no room for an adapter"), shared_buffer(2**60):
        pass
