"""The tiny models: shapes, tokenizer, pre-training's pieces, and checks of model directories."""

import json
import math
from dataclasses import replace
from itertools import islice

import hollow_model
import pytest
import torch
from published_configs import KIMI_K2, QWEN3_30B_A3B
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_moe_rl.adapters.families import FAMILIES
from lora_moe_rl.errors import FileError, ModelError
from lora_moe_rl.models.directory import check_model_dir, resolve_model
from lora_moe_rl.tiny import build, make, pretrain, shapes
from lora_moe_rl.tiny.arithmetic import MAX_ANSWER_TOKENS, MAX_PROMPT_TOKENS, problems
from lora_moe_rl.tiny.make import TINY_NAMES, find_tiny, make_tiny
from lora_moe_rl.tiny.muon import orthogonalize
from lora_moe_rl.tiny.tokenizer import make_tokenizer, token_id

EMPTY = b"\2" + bytes(7) + b"{}"  # a safetensors file without a tensor


@pytest.fixture(scope="module", params=TINY_NAMES)
def saved(request, tmp_path_factory):
    """A model that was not trained, and its directory."""
    torch.manual_seed(0)
    model = shapes.build_model(request.param).eval()
    out = tmp_path_factory.mktemp(request.param)
    build._save(request.param, model, {}, out)
    return request.param, model, out


def test_a_saved_model_is_an_ordinary_hugging_face_directory(saved):
    name, model, out = saved
    assert check_model_dir(out)["model_type"] == name
    loaded = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.tensor([make_tokenizer().encode("23+58=81")])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.generation_config.eos_token_id == token_id("<eos>")


def test_weights_are_float32_under_the_names_of_the_hub(saved):
    _, _, out = saved
    with safe_open(out / "model.safetensors", "pt") as file:
        keys = set(file.keys())
        assert {file.get_slice(key).get_dtype() for key in keys} == {"F32"}
    for layer, expert, matrix in [(1, 3, "gate"), (2, 0, "up"), (3, 7, "down")]:
        assert f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight" in keys
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= keys


def test_what_is_particular_to_each_shape():
    models = {name: shapes.build_model(name) for name in TINY_NAMES}
    qwen, deepseek = models["qwen3_moe"], models["deepseek_v3"]
    assert 1.9e6 < qwen.num_parameters() < 2.1e6
    assert not hasattr(deepseek.model.layers[0].mlp, "gate")
    for layer in deepseek.model.layers[1:]:
        bias = layer.mlp.gate.e_score_correction_bias
        assert bias.shape == (8,) and bias.std() > 0.02


def test_vllm_finds_the_keys_it_needs(saved):
    name, _, out = saved
    config = check_model_dir(out)
    if name == "deepseek_v3":
        assert config["topk_method"] == "noaux_tc" and config["scoring_func"] == "sigmoid"
        assert config.get("rope_scaling") is None


def test_the_tokenizer_is_bytes_and_adds_nothing(saved):
    _, _, out = saved
    tokenizer = AutoTokenizer.from_pretrained(out)
    for text in ["23+58=", "a b\n\tc", "é€\U0010ffff", "", " 1"]:
        assert tokenizer.encode(text) == make_tokenizer().encode(text)
        assert len(tokenizer.encode(text)) == len(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == token_id("<eos>") == 254
    assert tokenizer.encode("81<eos>") == [*b"81", 254]


def test_problems_are_right_varied_and_short():
    drawn = list(islice(problems(seed=1), 2000))
    assert drawn == list(islice(problems(seed=1), 2000)) and drawn[:50] != list(
        islice(problems(seed=2), 50)
    )
    for prompt, answer in drawn:
        assert eval(prompt[:-1]) == int(answer) >= 0
        assert len(prompt) <= MAX_PROMPT_TOKENS and len(answer) < MAX_ANSWER_TOKENS
    assert 900 < sum("+" in prompt for prompt, _ in drawn) < 1100


def test_encode_puts_the_loss_on_answer_and_end():
    ids, labels = pretrain.encode(("9-1=", "8"))
    eos, pad, ignore = token_id("<eos>"), token_id("<pad>"), pretrain.IGNORE
    assert ids == [*b"9-1=8", eos, *[pad] * 4]
    assert labels == [ignore] * 3 + [ord("8"), eos] + [ignore] * 5


def test_problems_in_a_row_are_a_conversation_whose_answers_alone_are_learned():
    ids, labels = pretrain.encode(("9-1=", "8"), ("2+31=", "33"))
    eos, pad, ignore = token_id("<eos>"), token_id("<pad>"), pretrain.IGNORE
    assert ids == [*b"9-1=8", eos, *b"2+31=33", eos, *[pad] * 6]
    first, second = [ord("8"), eos], [ord("3"), ord("3"), eos]
    assert labels == [*[ignore] * 3, *first, *[ignore] * 5, *second, *[ignore] * 7]


def test_sums_by_problem_end_with_its_end():
    drawn = [
        pretrain.encode(("9-1=", "8"), ("2+31=", "33")),
        pretrain.encode(("60+60=", "120"), ("1+1=", "2")),
    ]
    labels = torch.tensor([labels for _, labels in drawn])
    sums = pretrain.by_problem(torch.ones(labels.shape), labels)
    assert sums.tolist() == [[2, 3], [4, 2]]


def test_the_teacher_slips_as_often_as_told():
    labels = torch.tensor([[pretrain.IGNORE, ord("8"), token_id("<eos>")]])
    probabilities = torch.full((1, 3, 256), 1e-9)
    probabilities[0, 1, list(b"0123456789")] = 0.3 / 9
    probabilities[0, 1, ord("8")] = 0.7
    probabilities[0, 2, token_id("<eos>")] = 1.0
    # The loss of a student that equals the teacher is the teacher's entropy.
    loss = pretrain.imitation_loss(probabilities.log(), labels, slips=0.3)
    entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3 / 9))
    assert loss.item() == pytest.approx(entropy / 2, rel=1e-4)
    right = pretrain.imitation_loss(probabilities.log(), labels, slips=0.0)
    assert right.item() == pytest.approx(-math.log(0.7) / 2, rel=1e-4)


def test_measured_accuracy_is_that_of_sampling():
    class Coin(torch.nn.Module):
        """Right with 0.8 a token, so 0.64 for one digit and the end token."""

        def forward(self, input_ids, use_cache):
            logits = torch.full((*input_ids.shape, 256), math.log(0.2 / 255))
            ids = torch.roll(input_ids, -1, dims=1)
            return type("Out", (), {"logits": logits.scatter(2, ids[..., None], math.log(0.8))})

    ids, labels = (torch.tensor([row]) for row in pretrain.encode(("9-1=", "8")))
    accuracy = pretrain.measure(Coin(), ids, labels)
    assert accuracy.sampled == pytest.approx(0.64, rel=1e-5) and accuracy.greedy == 1.0


def test_muon_orthogonalises_every_matrix_of_a_stack():
    torch.manual_seed(0)
    for shape in [(3, 16, 48), (48, 16)]:
        singular = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert singular.min() > 0.5 and singular.max() < 1.3


@pytest.fixture
def model_dir(tmp_path):
    hollow_model.save(tmp_path, QWEN3_30B_A3B)
    return tmp_path


def test_a_good_directory_passes(model_dir):
    assert check_model_dir(model_dir)["model_type"] == "qwen3_moe"
    assert resolve_model(str(model_dir)) == model_dir


def test_kimi_counts_as_deepseek(model_dir):
    hollow_model.save(model_dir, KIMI_K2)
    assert check_model_dir(model_dir)["model_type"] == "kimi_k2"


def test_no_config(tmp_path):
    with pytest.raises(ModelError, match=r"has no config.json"):
        check_model_dir(tmp_path)


def test_an_unsupported_architecture_lists_the_supported(model_dir):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="LlamaForCausalLM.* is not supported") as error:
        check_model_dir(model_dir)
    assert all(name in str(error.value) for name in FAMILIES)


def test_missing_shards(model_dir):
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model-1.safetensors").write_bytes(EMPTY)
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight shards \(model-2.safetensors"):
        check_model_dir(model_dir)


def test_two_models_in_one_directory_are_refused(model_dir):
    """transformers loads model.safetensors, whatever the index says."""
    (model_dir / "model-1.safetensors").write_bytes(EMPTY)
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(FileError, match="index.json that does not name it: .*; remove the one"):
        check_model_dir(model_dir)
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    check_model_dir(model_dir)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is truncated: it has 0 bytes"),
        (EMPTY[:-1], "is truncated: it has 9 bytes, and its header claims 2"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS"),
    ],
)
def test_shards_must_be_whole(model_dir, data, reason):
    (model_dir / "model.safetensors").write_bytes(data)
    with pytest.raises(FileError, match=f"{model_dir}/model.safetensors {reason}"):
        check_model_dir(model_dir)


@pytest.mark.parametrize("pickled", [True, False])
def test_weights_must_be_safetensors(model_dir, pickled):
    (model_dir / "model.safetensors").unlink()
    if pickled:
        (model_dir / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ModelError, match="would have to be unpickled" if pickled else "none"):
        check_model_dir(model_dir)


def test_names_that_are_no_model(tmp_path, monkeypatch):
    for path in ["qwen4_moe", str(tmp_path / "absent"), "a/b/c"]:
        with pytest.raises(ModelError, match="qwen3_moe, deepseek_v3"):
            resolve_model(path)
    with pytest.raises(ModelError, match="is not a tiny model"):
        make_tiny("llama")


def test_a_directory_of_ones_own_is_taken_for_the_model_that_was_made_in_it_alone(
    tmp_path, monkeypatch
):
    def made(name, target, progress):
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text(name)

    monkeypatch.setattr(make, "_make", made)
    mine = tmp_path / "mine"
    for _ in range(2):
        assert make_tiny("qwen3_moe", out=mine) == mine
    with pytest.raises(ModelError, match="mine holds another model than deepseek_v3"):
        make_tiny("deepseek_v3", out=mine)
    assert (mine / "config.json").read_text() == "qwen3_moe"
    make_tiny("deepseek_v3", out=mine, force=True)
    assert (make_tiny("deepseek_v3", out=mine) / "config.json").read_text() == "deepseek_v3"
    monkeypatch.setattr(make, "_cache_key", lambda name: "of other sources")
    with pytest.raises(ModelError, match="another model than deepseek_v3 as it is made now"):
        make_tiny("deepseek_v3", out=mine)
    with pytest.raises(ModelError, match="config.json is no directory"):
        make_tiny("deepseek_v3", out=mine / "config.json")


def test_a_hub_name_without_network(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="could not be fetched from the hub"):
        resolve_model("nobody/no-such-model")


def test_two_processes_may_make_the_same_model(tmp_path):
    out = tmp_path / "model"
    for scratch in (tmp_path / "first", tmp_path / "second"):
        scratch.mkdir()
        (scratch / build.RECORD).write_text(scratch.name)
        build.put(scratch, out)
    assert (out / build.RECORD).read_text() in ("first", "second")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_progress_does_not_stand_in_what_a_program_reads(tmp_path, monkeypatch, capfd):
    """`verify layout --json` makes a tiny model where there is none."""
    monkeypatch.setattr(pretrain, "pretrain", lambda *given: pretrain.Accuracy(0.3, 0.8))
    build.build("qwen3_moe", tmp_path / "model", progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "pre-training qwen3_moe" in err


def sample_accuracy(path, num_problems=64, num_samples=8):
    """The share of sampled answers that are right, by generating them."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    torch.manual_seed(0)
    right = 0
    for prompt, answer in islice(problems(seed=99), num_problems):
        ids = torch.tensor([tokenizer.encode(prompt)] * num_samples)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
                             temperature=1.0, max_new_tokens=8)  # fmt: skip
        texts = [tokenizer.decode(row[len(ids[0]) :]) for row in out]
        right += sum(text.replace("<pad>", "") == f"{answer}<eos>" for text in texts)
    return right / (num_problems * num_samples)


@pytest.mark.seconds
def test_one_of_turns_goes_on_from_the_model_of_its_shape(tmp_path, monkeypatch):
    """Of no steps more it is that model, with the accuracy on several problems in a row."""
    monkeypatch.setenv("LORA_MOE_RL_CACHE", str(tmp_path))
    anything = {"slip_steps": 0, "accuracy": (0.0, 1.0), "eval_problems": 12}
    for name, steps, turns in [("deepseek_v3", 2, 1), ("deepseek_v3-turns", 0, 3)]:
        recipe = pretrain.Recipe(steps=steps, turns=turns, **anything)
        monkeypatch.setitem(pretrain.RECIPES, name, recipe)
    path = make_tiny("deepseek_v3-turns", progress=False)
    record = json.loads((path / build.RECORD).read_text())
    assert record["name"] == "deepseek_v3-turns" and record["recipe"]["turns"] == 3
    found, known = (load_file(at / "model.safetensors") for at in (path, find_tiny("deepseek_v3")))
    assert all(torch.equal(found[name], known[name]) for name in known | found)
    monkeypatch.setitem(pretrain.RECIPES, "deepseek_v3-turns", replace(recipe, slip_steps=2))
    make_tiny("deepseek_v3-turns", force=True, progress=False)
    found = load_file(path / "model.safetensors")
    assert not torch.equal(found["lm_head.weight"], known["lm_head.weight"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [pytest.param("qwen3_moe", marks=pytest.mark.whole), "deepseek_v3", "qwen3_moe-turns"],
)
def test_a_made_model_is_right_between_20_and_60_percent(name):
    path = make_tiny(name, progress=False)
    accuracy = sample_accuracy(path)
    print(f"{name}: {accuracy:.1%} of the samples right")
    assert 0.2 <= accuracy <= 0.6


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("name", TINY_NAMES)
def test_pre_training_is_deterministic(name):
    recipe = pretrain.Recipe(steps=4, slip_steps=2, accuracy=(0.0, 1.0))
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        model = shapes.build_model(name)
        pretrain.pretrain(model, recipe, lambda *_: None)
        weights.append({key: value.clone() for key, value in model.state_dict().items()})
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
