"""The language model of a checkpoint of text and images, as a checkpoint of its own."""

from __future__ import annotations

import json

import pytest
import quantised
import tiny_families
import torch
from merge_bases import read_all, shards_of

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.cli import main
from lora_moe_rl.errors import FileError, ModelError
from lora_moe_rl.models.directory import check_model_dir

VISION = {
    "vision_tower.patch_embed.proj.weight": torch.ones(8, 3, 14, 14),
    "mm_projector.proj.0.weight": torch.ones(8, 8),
}


def kimi_k25(plain, folder, sizes=7, **outside):
    """A checkpoint laid out as Kimi-K2.5's, around the language model of the directory `plain`."""
    language = json.loads((plain / "config.json").read_text())
    language.pop("architectures")
    language |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.It"}}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": language,
        "vision_config": {"hidden_size": 8},
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        **outside,
    }
    tensors = {f"language_model.{name}": value for name, value in read_all(plain).items()}
    base = shards_of(VISION | tensors, config, folder, sizes)
    (base / "preprocessor_config.json").write_text("{}")
    (base / "generation_config.json").write_text('{"eos_token_id": 3}')
    return base


def test_it_is_the_model_that_the_larger_one_was_made_around(tmp_path, capsys):
    tiny_families.save("kimi_k2", tmp_path / "plain")
    base = kimi_k25(tmp_path / "plain", tmp_path / "base")
    with pytest.raises(ModelError, match="`lora-moe-rl language-model MODEL --out DIR` writes"):
        check_model_dir(base)
    out = tmp_path / "out"
    assert main(["language-model", str(base), "--out", str(out)]) == 0
    expected = read_all(tmp_path / "plain")
    assert f"{len(expected)} tensors of the language model" in capsys.readouterr().out
    found = read_all(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    written = json.loads((out / "config.json").read_text())
    assert written == json.loads((tmp_path / "plain/config.json").read_text())
    assert (out / "generation_config.json").exists()
    assert not (out / "preprocessor_config.json").exists()
    again = tmp_path / "again"  # of the language model: nothing is inside
    assert main(["language-model", str(out), "--out", str(again)]) == 1
    assert "needs no copy of that" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["inside", "beside"])
def test_int4_stays_as_it_is(place, tmp_path, capsys):
    packed, _ = quantised.make_pair("deepseek_v3", tmp_path, "int4")
    config = json.loads((packed / "config.json").read_text())
    form = config["quantization_config"]
    named = [one if one.startswith("re:") else f"language_model.{one}" for one in form["ignore"]]
    assert "language_model.lm_head" in named
    form = form | {"ignore": named}
    base = kimi_k25(packed, tmp_path / "vl")
    outer = json.loads((base / "config.json").read_text())
    del outer["text_config"]["quantization_config"]
    (outer["text_config"] if place == "inside" else outer)["quantization_config"] = form
    (base / "config.json").write_text(json.dumps(outer))
    assert main(["language-model", str(base), "--out", str(tmp_path / "out")]) == 0
    found, expected = read_all(tmp_path / "out"), read_all(packed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["quantization_config"] == config["quantization_config"]
    assert ModelShape.from_hf_config(written) == ModelShape.from_hf_config(config)


def test_weights_have_the_names_that_megatron_bridge_knows_them_by(tmp_path):
    """The names of the published checkpoint, by one who reads it."""
    from lora_moe_rl.trainer import bridge

    bridge.load()
    from megatron.bridge.models.kimi_vl.kimi_k25_vl_bridge import KimiK25VLBridge

    tiny_families.save("kimi_k2", tmp_path / "plain")
    names = {*read_all(kimi_k25(tmp_path / "plain", tmp_path / "base"))}
    registry = KimiK25VLBridge().mapping_registry()
    unknown = {name for name in names if registry.hf_to_megatron_lookup(name) is None}
    assert not unknown and len(names) > 40
    assert registry.hf_to_megatron_lookup("model.embed_tokens.weight") is None


def test_what_is_laid_out_otherwise_is_refused_before_anything_is_written(tmp_path, capsys):
    tiny_families.save("kimi_k2", tmp_path / "plain")
    base = kimi_k25(tmp_path / "plain", tmp_path / "base", sizes=1000)
    good = json.loads((base / "config.json").read_text())

    def refused(message: str, code: int = 1, **config) -> None:
        (base / "config.json").write_text(json.dumps(good | config))
        assert main(["language-model", str(base), "--out", str(tmp_path / "out")]) == code
        assert message in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "out").exists()

    refused("lacks text_config", text_config=None)
    refused("hidden_act='gelu'", 2, text_config=good["text_config"] | {"hidden_act": "gelu"})
    refused("no model of text and images that is known", architectures=["LlavaForCausalLM"])
    tensors = read_all(base) | {"audio_tower.weight": torch.ones(2)}
    more = shards_of(tensors, good, tmp_path / "more", 1000)
    assert main(["language-model", str(more), "--out", str(tmp_path / "out")]) == 1
    assert "has audio_tower.weight beside language_model.*" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named(tmp_path):
    tiny_families.save("kimi_k2", tmp_path / "plain")
    base = kimi_k25(tmp_path / "plain", tmp_path / "base")
    file = sorted(base.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-8])
    from lora_moe_rl.export.language_model import write

    with pytest.raises(FileError, match=file.name):
        write(base, tmp_path / "out", lambda text: None)
