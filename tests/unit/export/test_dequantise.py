"""A quantised checkpoint as numbers, against what transformers and compressed-tensors read."""

from __future__ import annotations

import json

import gpt_oss_quantised
import pytest
import quantised
import tiny_families
import torch
import transformers
from merge_bases import CONFIGS, read_all, shards_of
from safetensors.torch import load_file

from lora_moe_rl.cli import main
from lora_moe_rl.errors import ExportError, FileError, ModelError
from lora_moe_rl.export.merged import _config_of, dequantise
from lora_moe_rl.kernels.merge import formats
from lora_moe_rl.models.directory import check_model_dir


def by_transformers(folder, form) -> dict[str, torch.Tensor]:
    """The weights under transformers' names, with every expert in a stack."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=form
    )
    return model.state_dict()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.fixture
def gpt_oss(tmp_path):
    """(tensors, config) of a quantised one."""
    return gpt_oss_quantised.make(tmp_path / "plain")


def test_gpt_oss_is_what_transformers_makes_of_it(gpt_oss, tmp_path, capsys):
    base = shards_of(*gpt_oss, tmp_path / "base", 5)  # codes and scales in several shards
    with pytest.raises(ModelError, match="'mxfp4'.*`lora-moe-rl dequantise MODEL --out DIR"):
        check_model_dir(base)
    assert main(["dequantise", str(base), "--out", str(tmp_path / "out")]) == 0
    assert "6 quantised tensors as bfloat16" in capsys.readouterr().out
    form = transformers.Mxfp4Config(dequantize=True)
    assert_same(read_all(tmp_path / "out"), by_transformers(base, form))
    check_model_dir(tmp_path / "out")


def test_fp8_is_what_transformers_makes_of_it(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256}  # transformers' own blocks are whole
    tiny_families.save("minimax_m2", tmp_path / "plain", **sizes)
    tensors = {}
    for name, value in load_file(tmp_path / "plain/model.safetensors").items():
        tensors[name] = value.bfloat16()
        if value.dim() == 2 and (".experts." in name or "_proj" in name):
            tensors[name], tensors[f"{name}_scale_inv"] = formats.quantise_fp8(value)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    config["quantization_config"] = CONFIGS["fp8"]
    base = shards_of(tensors, config, tmp_path / "base", 7)
    with pytest.raises(ModelError, match="lora-moe-rl dequantise MODEL --out DIR"):
        check_model_dir(base)
    dequantise(base, tmp_path / "out")
    kept = ["gate", "lm_head", "e_score_correction_bias"]
    form = transformers.FineGrainedFP8Config(dequantize=True, modules_to_not_convert=kept)
    assert_same(by_transformers(tmp_path / "out", None), by_transformers(base, form))
    check_model_dir(tmp_path / "out")


@pytest.mark.parametrize("form", ["int4", "mxfp4", "fp8"])
def test_packed_weights_are_what_compressed_tensors_makes_of_them(form, tmp_path):
    packed, plain = quantised.make_pair("deepseek_v3", tmp_path, form)
    report = dequantise(packed, tmp_path / "out", "float32")
    assert_same(read_all(tmp_path / "out"), read_all(plain))
    scales = ("weight_scale", "weight_scale_inv")
    assert report.changed_tensors == sum(name.endswith(scales) for name in read_all(packed)) > 20


def test_columns_in_another_order_are_refused_by_runs_and_here(tmp_path):
    """compressed-tensors reads another weight by `weight_g_idx`, in whichever shard it is."""
    packed, _ = quantised.make_pair("qwen3_moe", tmp_path, "int4")
    tensors = read_all(packed)
    name = next(n for n in tensors if n.endswith("weight_packed"))
    order = name.replace("packed", "g_idx")
    columns = torch.arange(8 * tensors[name].shape[1], dtype=torch.int32)
    config = json.loads((packed / "config.json").read_text())
    base = shards_of(tensors | {order: columns.flip(0) // 32}, config, tmp_path / "ordered", 9)
    message = f"{order} stands beside a packed weight"
    with pytest.raises(ModelError, match=message):
        check_model_dir(base)
    with pytest.raises(ExportError, match=message):
        dequantise(base, tmp_path / "out")


def test_numbers_are_refused(tmp_path):
    tiny_families.save("qwen3_moe", tmp_path / "plain")
    with pytest.raises(ExportError, match="holds numbers already: it can be taken as it is"):
        dequantise(tmp_path / "plain", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "mxfp8"}, "stacks of MXFP4.*quant_method='mxfp8'; known is 'mxfp4'"),
        ({"without": "scales"}, "the form of .*_blocks is not known"),
        ({"scales": torch.float8_e4m3fn}, "_scales is F8_E4M3 .*its weight takes U8"),
        ({"cut": True}, r"is U8 \[6, 128, 3, 8\], and its weight takes U8"),
        ({"more": torch.zeros(4, 4, dtype=torch.uint8)}, "qweight is U8, and no scales that are"),
        ({"more": torch.zeros(4, 4, dtype=torch.int32)}, "qweight is I32, and no scales that are"),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(gpt_oss, change, message, tmp_path):
    tensors, config = gpt_oss
    name = "model.layers.1.mlp.experts.gate_up_proj"
    if "without" in change:
        del tensors[f"{name}_scales"]
    if "scales" in change:
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"].to(change["scales"])
    if "cut" in change:
        tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][..., :8]
    if "more" in change:
        tensors["model.layers.0.self_attn.k_proj.qweight"] = change["more"]
    config["quantization_config"]["quant_method"] = change.get("method", "mxfp4")
    base = shards_of(tensors, config, tmp_path / "base", 99)
    with pytest.raises(ExportError, match=message):
        dequantise(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_exponent_that_is_no_number_is_named(gpt_oss, tmp_path):
    tensors, config = gpt_oss
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 0, 0] = 255
    base = shards_of(tensors, config, tmp_path / "base", 99)
    with pytest.raises(ExportError, match="layers.1.mlp.experts.down_proj.*NaN or infinity"):
        dequantise(base, tmp_path / "out")


def test_a_stopped_one_goes_on_and_keeps_what_is_finished(gpt_oss, tmp_path):
    base = shards_of(*gpt_oss, tmp_path / "base", 20)
    dequantise(base, tmp_path / "whole")
    stop = {"at": 2}

    def say(text: str) -> None:
        if text.startswith(f"writing shard {stop['at']}"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dequantise(base, tmp_path / "out", say=say)
    with pytest.raises(ExportError, match="unfinished result of another form"):
        dequantise(base, tmp_path / "out", "float32")
    stop["at"] = 0
    assert dequantise(base, tmp_path / "out", say=say).kept_shards == 1
    assert_same(read_all(tmp_path / "out"), read_all(tmp_path / "whole"))


def an_fp8(tmp_path, change) -> tuple:
    """(its directory, the tensors) of a small DeepSeek-V3 in FP8 that `change` was called with."""
    packed, _ = quantised.make_pair("deepseek_v3", tmp_path, "fp8")
    tensors = read_all(packed)
    change(tensors)
    config = json.loads((packed / "config.json").read_text())
    return shards_of(tensors, config, tmp_path / "changed", 999), tensors


def test_fp8_scales_in_bfloat16_are_read_here_and_refused_by_a_run(tmp_path):
    def halve(tensors):
        for name, value in tensors.items():
            if name.endswith("weight_scale_inv"):
                tensors[name] = value.bfloat16()

    base, tensors = an_fp8(tmp_path, halve)
    with pytest.raises(
        ModelError, match="is BF16; scales of an fp8 base are F32; `lora-moe-rl deq"
    ):
        check_model_dir(base)
    dequantise(base, tmp_path / "out", "float32")
    whole = {n: v.float() if n.endswith("scale_inv") else v for n, v in tensors.items()}
    assert_same(read_all(tmp_path / "out"), quantised.dequantised(whole))


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_scales_that_are_none_are_refused(value, tmp_path):
    """As of a file with a hole, of which nothing else tells."""

    def spoil(tensors):
        tensors["model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv"][0, 0] = value

    base, _ = an_fp8(tmp_path, spoil)
    with pytest.raises(ExportError, match="experts.0.gate_proj.weight: 1 scales are not above z"):
        dequantise(base, tmp_path / "out")


def test_places_and_links_are_looked_at_before_anything_is_written(gpt_oss, tmp_path, capsys):
    base = shards_of(*gpt_oss, tmp_path / "base", 99)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/tools.jinja").write_text("{{ messages }}")
    dequantise(base, tmp_path / "good")
    assert (tmp_path / "good/additional_chat_templates/tools.jinja").is_file()
    full, away = tmp_path / "full", tmp_path / "tokenizer.json"
    full.mkdir()
    for file in (full / "mine", away):
        file.touch()
    assert main(["dequantise", "owner/nowhere", "--out", str(full)]) != 0
    assert "is not empty" in capsys.readouterr().err
    (base / "tokenizer.json").symlink_to(away)
    with pytest.raises(FileError, match="tokenizer.json, a link to"):
        dequantise(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_there_twice_or_in_codes_of_another_tool_is_no_number(tmp_path):
    config = {"quantization_config": {"group_size": 64, "bits": 4}}
    mlx = {"a.weight": torch.zeros(8, 8, dtype=torch.uint32), "a.scales": torch.ones(8, 1)}
    with pytest.raises(ExportError, match="a.weight is U32, and no scales that are known"):
        dequantise(shards_of(mlx, config, tmp_path / "mlx", 9), tmp_path / "out")
    codes, scale = formats.quantise_mxfp4(torch.randn(8, 64))
    twice = {"a.weight_packed": codes, "a.weight_scale": scale, "a.weight": torch.zeros(8, 64)}
    with pytest.raises(ExportError, match="has a.weight twice, as numbers and packed"):
        dequantise(shards_of(twice, config, tmp_path / "twice", 9), tmp_path / "out")


def test_the_dtype_of_a_model_inside_is_written_too():
    inside = {"dtype": "bfloat16", "rope": {"factor": 2}, "quantization_config": {"bits": 4}}
    config = {"model_type": "m", "dtype": "bfloat16", "text_config": inside}
    expected = {"dtype": "float32", "rope": {"factor": 2}}
    whole = {"model_type": "m", "dtype": "float32", "text_config": expected}
    assert _config_of(config, "float32") == whole
    assert _config_of({"text_config": inside}, "float32") == {
        "text_config": expected, "dtype": "float32",
    }  # fmt: skip
