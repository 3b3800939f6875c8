"""Modules of every family from config.json alone, against the model classes of transformers."""

import json
from collections import defaultdict

import pytest
import torch
import transformers
from published_configs import (
    KIMI_K2,
    MIXTRAL_8X7B,
    PUBLISHED,
    QWEN3_30B_A3B,
    hf_config,
    shrunk,
)
from torch import nn

from lora_moe_rl.adapters.families import (
    FAMILIES,
    ModelShape,
    hf_path,
    language_config,
    transformers_path,
)
from lora_moe_rl.errors import ModelError

# Linears that are no sites: routers, the gate of Qwen2-MoE's shared expert, and the head.
NO_SITES = ("mlp.gate", "mlp.shared_expert_gate", "lm_head")
# Published parameters, of which the numbers in the models' names are roundings, in 1e9.
PARAMETERS = {
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-8B": 8.2,
    "Qwen1.5-MoE-A2.7B": 14.3,
    "Mixtral-8x7B": 46.7,
    "DeepSeek-V2-Lite": 15.7,
    "DeepSeek-V3": 671,
    "Kimi-K2": 1026,
    "Moonlight-16B-A3B": 16.0,
    "GLM-4.5-Air": 107,
    "GLM-4.7-Flash": 30,
    "Qwen3-Next-80B-A3B": 79.7,
    "Qwen3.5-35B-A3B": 34.7,
    "Qwen3.5-35B-A3B, by itself": 34.7,
    "GPT-OSS-20B": 20.9,
    "OLMoE-1B-7B": 6.92,
    "MiniMax-M2": 228.7,
    "Ling-mini-2.0": 16.3,
    "ERNIE-4.5-300B-A47B": 300,
    "Hy3": 295,
}


def hf_linears(config: dict) -> dict[str, tuple[int, ...]]:
    """`{path below model.: weight shape}` of transformers' own model, with stacked experts."""
    with torch.device("meta"):
        (name,) = language_config(config)["architectures"]
        own = FAMILIES[name].reference_class
        model = (own() if own else getattr(transformers, name))(hf_config(config))
    found = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    found |= {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    return {
        name.removeprefix("model."): shape
        for name, shape in stacked(found).items()
        if not name.endswith(NO_SITES)
    }


def stacked(linears: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same, where experts are modules of their own, with those of a layer in one."""
    found, experts = {}, defaultdict(list)
    for name, shape in linears.items():
        block, _, rest = name.partition(".experts.")
        if rest[:1].isdigit():
            experts[block, rest.partition(".")[2]].append(shape)
        else:
            found[name] = shape
    for (block, name), shapes in experts.items():
        (shape,) = set(shapes)
        if name == "down_proj":
            found[f"{block}.experts.down_proj"] = (len(shapes), *shape)
        elif name == "gate_proj":
            assert experts[block, "up_proj"] == shapes
            found[f"{block}.experts.gate_up_proj"] = (len(shapes), 2 * shape[0], shape[1])
    return found


def our_linears(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The same, from our modules; gate and up of the experts as one tensor."""
    found = {}
    for layer in range(shape.num_layers):
        for module, (n_in, n_out, experts) in shape.modules(layer).items():
            if experts is None:
                found[f"layers.{layer}.{transformers_path(shape, module)}"] = (n_out, n_in)
                continue
            part, rows = ("down", n_out) if module == "experts.down" else ("gate_up", 2 * n_out)
            sizes = (n_in, rows) if shape.family.experts == "interleaved" else (rows, n_in)
            found[f"layers.{layer}.mlp.experts.{part}_proj"] = (experts, *sizes)
    return found


def of_layers(config: dict, layers: int) -> dict:
    if "text_config" in config:
        return config | {"text_config": of_layers(config["text_config"], layers)}
    return config | {"num_hidden_layers": layers}


@pytest.mark.parametrize("config", [*PUBLISHED.values()], ids=[*PUBLISHED])
@pytest.mark.parametrize("size", ["published", "tiny"])
def test_modules_are_those_of_transformers(config, size):
    config = shrunk(config) if size == "tiny" else of_layers(config, 5)
    shape = ModelShape.from_hf_config(config)
    assert our_linears(shape) == hf_linears(config)


@pytest.mark.parametrize("name", [*PUBLISHED])
def test_published_models_have_their_published_sizes(name):
    shape = ModelShape.from_hf_config(PUBLISHED[name])
    linears = sum(
        n_in * n_out * (experts or 1)
        for layer in range(shape.num_layers)
        for n_in, n_out, experts in shape.modules(layer).values()
    )
    embeddings = 2 * shape.vocab_size * shape.hidden_size
    assert (linears + embeddings) / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize(
    ("config", "moe_layers"),
    [
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 2]}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
    ],
)
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B"])
def test_dense_layers_between_moe_layers(name, config, moe_layers):
    config = shrunk(PUBLISHED[name]) | config
    shape = ModelShape.from_hf_config(config)
    assert shape.moe_layers == moe_layers
    assert our_linears(shape) == hf_linears(config)


@pytest.mark.parametrize("name", [*PUBLISHED])
def test_a_config_that_transformers_wrote_is_read_the_same(name):
    config = shrunk(PUBLISHED[name])
    written = json.loads(hf_config(config).to_json_string())
    assert ModelShape.from_hf_config(written) == ModelShape.from_hf_config(language_config(config))


def test_experts_have_the_names_of_the_checkpoint():
    qwen, mixtral = (ModelShape.from_hf_config(c) for c in (QWEN3_30B_A3B, MIXTRAL_8X7B))
    assert hf_path(qwen, "experts.up") == "mlp.experts.{}.up_proj"
    parts = ("experts.gate", "experts.up", "experts.down")
    assert [hf_path(mixtral, part) for part in parts] == [
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ]


def test_every_family_has_a_published_member():
    assert {c["architectures"][0] for c in PUBLISHED.values()} == set(FAMILIES)
    for config in PUBLISHED.values():
        assert config["model_type"] in FAMILIES[config["architectures"][0]].model_types


def test_another_architecture_is_refused_with_the_list():
    with pytest.raises(ModelError, match=r"LlamaForCausalLM is not supported.*Qwen3-MoE") as error:
        ModelShape.from_hf_config({"architectures": ["LlamaForCausalLM"]})
    assert all(name in str(error.value) for name in FAMILIES)
    with pytest.raises(ModelError, match="architecture missing is not supported"):
        ModelShape.from_hf_config({})


def test_a_missing_key_is_named():
    config = {key: value for key, value in KIMI_K2.items() if key != "kv_lora_rank"}
    with pytest.raises(ModelError, match="DeepseekV3ForCausalLM lacks the key 'kv_lora_rank'"):
        ModelShape.from_hf_config(config)
