"""`lora-moe-rl untie`: the same model, with a head of its own."""

from __future__ import annotations

import json

import pytest
import tiny_families
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from lora_moe_rl import cli
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.errors import ExportError, ModelError
from lora_moe_rl.export.untie import write
from lora_moe_rl.verify import hf

IDS = list(range(3, 40))


def quiet(text: str) -> None:
    pass


@pytest.fixture(params=["qwen3"])
def tied(request, tmp_path):
    """As transformers writes it: without a head. A dense Qwen3 in several files, or ERNIE 4.5."""
    if request.param != "qwen3":
        tiny_families.save(request.param, tmp_path / "tied", tie_word_embeddings=True)
        return tmp_path / "tied"
    torch.manual_seed(0)
    sizes = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **more, tie_word_embeddings=True)).float()
    model.save_pretrained(tmp_path / "tied", max_shard_size="100KB")
    return tmp_path / "tied"


@pytest.mark.parametrize("tied", ["qwen3", "ernie4_5_moe"], indirect=True)
def test_it_is_the_same_model_and_is_taken(tied, tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(ModelError, match=r"tie_word_embeddings=true .*`lora-moe-rl untie MODEL"):
        ModelShape.from_hf_config(json.loads((tied / "config.json").read_text()))
    assert cli.main(["untie", str(tied), "--out", str(out)]) == 0
    assert "tensors, the embedding twice" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    ModelShape.from_hf_config(config)
    assert config == json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": False}
    one, other = hf.load(tied), hf.load(out)
    assert other.lm_head.weight.data_ptr() != other.model.embed_tokens.weight.data_ptr()
    assert (hf.logprobs(one, IDS) == hf.logprobs(other, IDS)).all()


def test_a_head_that_nobody_reads_is_left_behind(tied, tmp_path):
    """transformers and vLLM take the embedding in its place."""
    file = max(tied.glob("*.safetensors"))
    save_file(load_file(file) | {"lm_head.weight": torch.ones(131, 64)}, file, {"format": "pt"})
    index = json.loads((path := tied / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = file.name
    path.write_text(json.dumps(index))
    write(tied, tmp_path / "out", quiet)
    other = hf.load(tmp_path / "out")
    assert torch.equal(other.lm_head.weight, other.model.embed_tokens.weight)


def test_a_model_with_a_head_of_its_own_needs_none(tmp_path):
    tiny_families.save("qwen3", tmp_path / "model")
    with pytest.raises(ExportError, match="has a head of its own already"):
        write(tmp_path / "model", tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()
