"""Which quantised bases are supported, by what their config.json says."""

import copy
import re

import pytest

from lora_moe_rl.errors import ModelError
from lora_moe_rl.models.quantised import SUPPORTED, form, refused, tensors_refused

# As moonshotai/Kimi-K2-Thinking and deepseek-ai/DeepSeek-V3 have it.
KIMI = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
MXFP4 = copy.deepcopy(KIMI) | {"format": "mxfp4-pack-quantized"}
MXFP4["config_groups"]["group_0"]["weights"]["type"] = "float"
DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def test_what_is_supported():
    for config, expected in (
        ({}, None), (KIMI, "int4"), (DEEPSEEK, "fp8"), (MXFP4, "mxfp4")
    ):  # fmt: skip
        whole = {"quantization_config": config} if config else {}
        assert list(refused(whole)) == [] and form(whole) == expected


@pytest.mark.parametrize(
    "said", ["fp8", ["fp8"], KIMI | {"config_groups": [1]}, KIMI | {"config_groups": {"a": "b"}}]
)
def test_what_nobody_has_written_so_is_refused(said):
    with pytest.raises(ModelError, match="config.json has quantization_config="):
        list(refused({"quantization_config": said}))


def changed(config, path, value):
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    target = config
    for parent in parents:
        target = target[parent]
    target[last] = value
    return {"quantization_config": config}


WEIGHTS = "config_groups.group_0.weights"
ROTATED = {"config_groups": {"u": {"type": "hadamard", "apply": [{"location": "weight_input"}]}}}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (changed(KIMI, f"{WEIGHTS}.group_size", 128), "'group_size': 128"),
        (changed(KIMI, f"{WEIGHTS}.symmetric", False), "'symmetric': False"),
        (changed(KIMI, f"{WEIGHTS}.num_bits", 8), "'num_bits': 8"),
        (changed(KIMI, f"{WEIGHTS}.actorder", "group"), "actorder"),
        (changed(KIMI, f"{WEIGHTS}.actorder", "Dynamic"), "actorder='Dynamic'"),
        (changed(KIMI, f"{WEIGHTS}.actorder", True), "actorder=True"),
        (changed(KIMI, "transform_config", ROTATED), "transform_config=.*rotations"),
        (changed(DEEPSEEK, "transform_config", ROTATED), "transform_config=.*rotations"),
        (changed(KIMI, "config_groups.group_0.transform_config", ROTATED), "transform_config="),
        (changed(KIMI, "format", "mxfp4-pack-quantized"), "'type': 'int'"),
        (changed(MXFP4, f"{WEIGHTS}.group_size", 16), "'group_size': 16"),
        (changed(KIMI, "format", "nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (changed(KIMI, "config_groups.group_0.input_activations", {"num_bits": 8}), "activations"),
        (changed(KIMI, "config_groups.group_0.output_activations", {"num_bits": 8}), "activations"),
        (changed(KIMI, "kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme=.*round the cache"),
        (changed(KIMI, "config_groups", {}), r"weights \[\]"),
        (changed(DEEPSEEK, "weight_block_size", None), "weight_block_size=None"),
        (changed(DEEPSEEK, "activation_scheme", "static"), "activation_scheme='static'"),
        (changed(DEEPSEEK, "quant_method", "mxfp4"), "quant_method='mxfp4'"),
        ({"quantization_config": {"bits": 4}}, "quant_method=None"),
    ],
)
def test_what_is_not_is_named_with_what_is(config, named):
    (reason, *_) = refused(config)
    assert SUPPORTED in reason
    assert re.search(named, reason)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((f"{WEIGHTS}.actorder", order) for order in (None, False, "weight", "Static")),
        *(("transform_config", none) for none in (None, {}, {"config_groups": {}})),
    ],
)
def test_columns_in_their_order_and_no_rotation_are_supported(path, value):
    assert list(refused(changed(KIMI, path, value))) == []


def test_tensors_that_change_a_packed_weight_are_named():
    """What compressed-tensors computes from beside those that are read here."""
    read = {f"a.weight_{what}" for what in ("packed", "scale", "shape")}
    assert list(tensors_refused(read | {"b.weight_g_idx", "a.bias", "c.weight_scale_inv"})) == []
    for what in ("g_idx", "zero_point", "global_scale"):
        (reason,) = tensors_refused(read | {f"a.weight_{what}"})
        assert reason.startswith(f"a.weight_{what} stands beside a packed weight")
        assert SUPPORTED in reason
