"""Tokenizers of the forms that published models have, by the real transformers."""

import json
import shutil
import sys

import pytest

from lora_moe_rl.errors import ConfigError, ModelError
from lora_moe_rl.models.tokenizer import (
    check_tokenizer,
    foreign_ids,
    load_tokenizer,
    model_vocab_size,
    stop_ids,
)
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from tests.helpers import remote_tokenizer
from tests.helpers.remote_tokenizer import FIRST_SPECIAL, SPECIAL

IDS = {token: FIRST_SPECIAL + i for i, token in enumerate(SPECIAL)}
# transformers knows the first, and makes a tokenizer of its own for it; it asks for the second.
TYPES = ("deepseek_v3", "kimi_k2")
YARN = {
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}
INSIDE = {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}  # with a text_config


@pytest.fixture(params=TYPES)
def directory(request, tmp_path):
    remote_tokenizer.write(tmp_path)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": request.param,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }
    if request.param == "kimi_k2":
        config |= YARN
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def change(directory, **values):
    path = directory / "tokenizer_config.json"
    changed = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


def test_the_models_own_tokenizer_is_loaded_where_its_code_is_trusted(directory):
    tokenizer = load_tokenizer(directory, trust_remote_code=True)
    assert type(tokenizer).__name__ == "ByteRanksTokenizer"
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL} == IDS
    assert tokenizer.encode("ab<|im_end|>") == [255 - 97, 255 - 98, IDS["<|im_end|>"]]
    assert tokenizer.decode(tokenizer.encode("ä+1")) == "ä+1"


@pytest.mark.parametrize("kind", TYPES)
def test_one_without_code_is_loaded_whatever_the_models_type(tmp_path, kind):
    """As `lora-moe-rl language-model` leaves config.json, without auto_map."""
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(YARN | {"model_type": kind}))
    assert load_tokenizer(tmp_path, trust_remote_code=False).encode("1+2") == [*b"1+2"]


def test_without_trust_it_is_refused_at_once_and_nothing_of_it_runs(directory, monkeypatch):
    def asked(*args):
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=r"tokenization_bytes.*set model.trust_remote_code=true"):
        load_tokenizer(directory, trust_remote_code=False)
    assert not [name for name in set(sys.modules) - before if "tokenization_bytes" in name]


def test_a_class_of_another_name_is_refused(directory):
    change(directory, tokenizer_class="TikTokenTokenizer")
    with pytest.raises(ModelError, match="is a TikTokenTokenizer .* makes a ByteRanksTokenizer"):
        load_tokenizer(directory, trust_remote_code=True)


def test_a_generic_class_in_place_of_the_models_is_refused(directory):
    """What transformers does by itself, where nothing names the code."""
    change(directory, auto_map=None)
    with pytest.raises(ModelError, match="ByteRanksTokenizer"):
        load_tokenizer(directory, trust_remote_code=True)


def test_other_ids_of_special_tokens_are_refused(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path, trust_remote_code=False).convert_tokens_to_ids("<eos>") == 254
    change(tmp_path, added_tokens_decoder={"251": {"content": "<eos>"}})
    with pytest.raises(ModelError, match="<eos> is 251 there and 254 here"):
        load_tokenizer(tmp_path, trust_remote_code=False)


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_what_tokenizer_json_describes_in_full_is_taken_by_any_name(tmp_path, name):
    """DeepSeek-V3 calls its tokenizer.json a LlamaTokenizerFast."""
    make_tokenizer().save_pretrained(tmp_path)
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    change(tmp_path, tokenizer_class=name)
    assert load_tokenizer(tmp_path, trust_remote_code=False).encode("1") == [ord("1")]


def test_missing_files_are_named_without_transformers(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails
    (directory / "tokenization_bytes.py").unlink()
    with pytest.raises(ModelError, match="there is no .*tokenization_bytes.py"):
        check_tokenizer(directory, trust_remote_code=True)
    (directory / "tiktoken.model").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer \(none of tokenizer.json"):
        check_tokenizer(directory, trust_remote_code=True)


def test_code_that_fails_is_one_line(directory, tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(directory, folder, dirs_exist_ok=True)
    (folder / "tokenization_bytes.py").write_text("1 / 0\n")
    with pytest.raises(ModelError, match="cannot be loaded: ZeroDivisionError: division by zero"):
        load_tokenizer(folder, trust_remote_code=True)


@pytest.mark.parametrize(
    ("text", "found"),
    [('{"eos_token_id": 2}', {2}), ('{"eos_token_id": [2, 3]}', {2, 3}), ("{}", set())],
)
def test_ends_are_those_that_the_models_files_name(tmp_path, text, found):
    (tmp_path / "generation_config.json").write_text(text)
    assert stop_ids(tmp_path) == found
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert stop_ids(tmp_path) == found | {5}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"eos_token_id": "</s>"}', "eos_token_id of .*generation_config.json is '</s>'; it must"),
        ('{"eos_token_id": [2, "3"]}', r"is \[2, '3'\]; it must be the id of a token"),
        ('{"eos_token_id": [-1]}', r"is \[-1\]; it must be the id of a token"),
        ('{"eos_token_id": true}', "is True; it must be the id of a token"),
        ("{no", "generation_config.json is no JSON object"),
        ("[]", "generation_config.json is no JSON object"),
    ],
)
def test_an_end_that_is_no_token_is_an_error(tmp_path, text, reason):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=reason):
        stop_ids(tmp_path)


def test_a_model_inside_a_larger_one_names_its_own_end(tmp_path):
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "eos_token_id": 9}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": {"eos_token_id": 7}}))
    assert stop_ids(tmp_path) == {7}


@pytest.mark.parametrize(
    ("config", "foreign"),
    [
        ({"vocab_size": 254}, [-1, 254, 300]),
        ({"vocab_size": 512}, [-1]),  # an embedding that is padded
        (INSIDE | {"text_config": {"vocab_size": 254}}, [-1, 254, 300]),
        ({}, []),
        (INSIDE, []),
    ],
)
def test_a_tokenizer_knows_which_ids_its_model_has(tmp_path, config, foreign):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path, trust_remote_code=False)
    assert foreign_ids(tokenizer, [0, -1, 253, 254, 300]) == foreign
    assert foreign_ids(make_tokenizer(), [300]) == [] and model_vocab_size(make_tokenizer()) is None
