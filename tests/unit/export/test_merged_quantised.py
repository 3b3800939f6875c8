"""Merging into quantised weights, and into another dtype than the base's."""

from __future__ import annotations

import json

import pytest
import torch
from merge_bases import (
    CONFIGS,
    DENSE,
    INDEX,
    STOCHASTIC,
    WEIGHTS,
    check_told,
    dequantise,
    expected_weights,
    quantise,
    random_adapter,
    read_all,
    shards_of,
    spec_of,
)

from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.errors import ConfigError, ExportError
from lora_moe_rl.export import merged
from lora_moe_rl.export.merged import export_merged
from lora_moe_rl.export.merged_weights import Form

IN_OTHER_ORDER = {"config_groups": {"g": {"weights": WEIGHTS | {"actorder": "group"}}}}
ROTATED = {"transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": []}}}}
# A step of the form, over the largest element of its block.
STEPS = {
    "fp8": 2**-4,
    "int4": 1 / 15 + 2**-8,  # and the rounding of a bfloat16 scale
    "mxfp4": 1 / 4,  # of what lies below 8, and becomes 6
}


@pytest.mark.parametrize("per_shard", [3, 1000], ids=["scales in other shards", "one shard"])
@pytest.mark.parametrize("form", CONFIGS)
def test_a_quantised_base_stays_quantised(plain, form, per_shard, tmp_path):
    _, weights, config = plain
    base = quantise(weights, form)
    config = config | {"quantization_config": CONFIGS[form]}
    folder = shards_of(base, config, tmp_path / "base", per_shard)
    spec = spec_of(folder, DENSE)
    tensors = random_adapter(spec)
    report = export_merged(spec, tensors, folder, tmp_path / "out")
    found, plain_base = read_all(tmp_path / "out"), dequantise(base)
    exact = expected_weights(spec, tensors, plain_base)
    assert {n: v.dtype for n, v in found.items()} == {n: v.dtype for n, v in base.items()}
    values = dequantise(found)
    for name in base:
        if name.rpartition(".")[0] not in exact:
            assert torch.equal(found[name].view(torch.uint8), base[name].view(torch.uint8)), name
    for path, expected in exact.items():
        error = values[f"{path}.weight"] - expected
        assert error.abs().max() <= STEPS[form] * expected.abs().max(), path
        check_told(
            report.arrived[f"{path}.weight"],
            *(plain_base[f"{path}.weight"], expected, values[f"{path}.weight"]),
        )
    assert report.arrived.keys() == {f"{path}.weight" for path in exact}
    written = json.loads((tmp_path / "out/merge.json").read_text())["rounding"]
    assert written.keys() == report.arrived.keys() | {"all"}


@pytest.mark.parametrize("form", [*CONFIGS, "float"])
def test_another_dtype(plain, form, tmp_path):
    _, weights, config = plain
    base = weights if form == "float" else quantise(weights, form)
    if form != "float":
        config = config | {"quantization_config": CONFIGS[form], "torch_dtype": "bfloat16"}
    folder = shards_of(base, config, tmp_path / "base", 5)
    spec = spec_of(folder, DENSE)
    tensors = random_adapter(spec)
    export_merged(spec, tensors, folder, tmp_path / "out", Form(dtype="float16"))
    found, plain_base = read_all(tmp_path / "out"), dequantise(base)
    exact = expected_weights(spec, tensors, plain_base)
    assert found.keys() == plain_base.keys()
    for name, value in found.items():
        expected = exact.get(name.removesuffix(".weight"), plain_base[name].double())
        kept = form != "float" and name.endswith("e_score_correction_bias")
        assert value.dtype == (torch.float32 if kept else torch.float16), name
        torch.testing.assert_close(value.double(), expected, rtol=6e-4, atol=1e-6)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in written
    assert "float16" in (written.get("dtype"), written.get("torch_dtype"))
    files = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert files.keys() == found.keys()


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("fp8", {"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]; known is"),
        ("fp8", {"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0', which a merge does not write; write"),
        ("int4", {"format": "marlin"}, "format='marlin'"),
        ("int4", {"config_groups": {"g": {"weights": WEIGHTS | {"group_size": 128}}}}, "128"),
        ("mxfp4", {"format": "pack-quantized"}, "format='pack-quantized'.*'mxfp4-pack-quantized'"),
        ("mxfp4", {"config_groups": {"g": {"weights": WEIGHTS}}}, "'type': 'int'"),
        ("int4", IN_OTHER_ORDER, "pack-quantized with actorder='group'"),
        ("int4", ROTATED, "transform_config=.*rotations"),
        ("fp8", ROTATED, "transform_config=.*rotations"),
    ],
)
def test_other_quantisations_are_refused(plain, form, change, message, tmp_path):
    _, weights, config = plain
    config = config | {"quantization_config": CONFIGS[form] | change}
    folder = shards_of(quantise(weights, form), config, tmp_path / "base", 1000)
    spec = spec_of(folder, DENSE)
    with pytest.raises(ExportError, match=message):
        export_merged(spec, random_adapter(spec), folder, tmp_path / "out")
    if "scale_fmt" not in change:  # of which only what is written is another
        for write in numbers_of(spec, folder, tmp_path / "out"):
            with pytest.raises(ExportError, match=message):
                write()
    assert not (tmp_path / "out").exists()


def numbers_of(spec, folder, out):
    """What writes a base as numbers."""
    yield lambda: export_merged(spec, random_adapter(spec), folder, out, Form(dtype="float32"))
    yield lambda: merged.dequantise(folder, out)


@pytest.mark.parametrize("what", ["weight_g_idx", "weight_zero_point"])
def test_tensors_that_change_a_packed_weight_are_refused(plain, what, tmp_path):
    _, weights, config = plain
    base = quantise(weights, "int4")
    path = "model.layers.1.mlp.experts.0.gate_proj"
    base[f"{path}.{what}"] = torch.zeros(160, dtype=torch.int32)
    config = config | {"quantization_config": CONFIGS["int4"]}
    folder = shards_of(base, config, tmp_path / "base", 3)
    spec, message = spec_of(folder, DENSE), f"{path}.{what} stands beside a packed weight"
    out = tmp_path / "out"
    with pytest.raises(ExportError, match=message):
        export_merged(spec, random_adapter(spec), folder, out)
    attention = spec_of(folder, AdapterConfig(rank=2, targets=("q_b_proj",)))
    for write in (*numbers_of(spec, folder, out), *numbers_of(attention, folder, out)):
        with pytest.raises(ExportError, match=message):
            write()
    assert not out.exists()
    export_merged(attention, random_adapter(attention), folder, out)  # it is copied as it is
    assert f"{path}.{what}" in read_all(out)


def test_a_form_that_does_not_fit_the_base_is_refused(plain, tmp_path):
    folder, weights, config = plain
    spec = spec_of(folder)
    with pytest.raises(ConfigError, match="--rounding stochastic has no effect"):
        export_merged(spec, random_adapter(spec), folder, tmp_path / "out", STOCHASTIC)
    config = config | {"quantization_config": CONFIGS["fp8"]}
    quantised = shards_of(quantise(weights, "fp8"), config, tmp_path / "base", 1000)
    spec = spec_of(quantised, DENSE)
    for form, message in (
        (STOCHASTIC, "--rounding stochastic has no effect"),
        (Form(adapted_float32=True), "weight is quantised, .*another form with --dtype"),
    ):
        with pytest.raises((ConfigError, ExportError), match=message):
            export_merged(spec, random_adapter(spec), quantised, tmp_path / "out", form)
    form = Form("bfloat16", rounding="stochastic")
    assert export_merged(spec, random_adapter(spec), quantised, tmp_path / "out", form).arrived


def test_stacks_of_gpt_oss_are_refused_by_name(plain, tmp_path):
    _, weights, config = plain
    name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    config = config | {"quantization_config": CONFIGS["mxfp4"]}
    base = {k: v for k, v in quantise(weights, "mxfp4").items() if ".experts." not in k}
    folder = shards_of(base | {name: torch.zeros(4, dtype=torch.uint8)}, config, tmp_path / "b", 99)
    spec = spec_of(folder, AdapterConfig(rank=2, targets=("experts.gate",)))
    with pytest.raises(ExportError, match=f"{name}: experts in gpt-oss's stacks of MXFP4"):
        export_merged(spec, random_adapter(spec), folder, tmp_path / "out")


def test_an_exponent_that_is_no_number_is_refused(plain, tmp_path):
    _, weights, config = plain
    base = quantise(weights, "mxfp4")
    scale = next(n for n in base if n.endswith("experts.0.gate_proj.weight_scale"))
    base[scale][0, 0] = 255
    config = config | {"quantization_config": CONFIGS["mxfp4"]}
    folder = shards_of(base, config, tmp_path / "base", 99)
    spec = spec_of(folder, DENSE)
    with pytest.raises(ExportError, match="NaN or infinity in the base"):
        export_merged(spec, random_adapter(spec), folder, tmp_path / "out")
