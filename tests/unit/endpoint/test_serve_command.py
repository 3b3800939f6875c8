"""What `lora-moe-rl serve` refuses before an engine starts, and what it takes from its words."""

from __future__ import annotations

import shutil

import huggingface_hub
import pytest
from engine_fixtures import save_random_model
from template_run import save_run

from lora_moe_rl.cli import main
from lora_moe_rl.endpoint import command
from lora_moe_rl.errors import ConfigError, ModelError

OWN = "{% for m in messages %}<<{{ m.content }}>>{% endfor %}"
MESSAGES = [{"role": "user", "content": "2+3="}]


def planned(*words: str) -> command.Plan:
    return command.planned(command._parser().parse_intermixed_args([str(word) for word in words]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_random_model("qwen3_moe", folder)
    return folder


def test_settings_of_the_engine_are_taken(model):
    config = planned(model, "rollout.tp=2", "model.max_length=128", "trainer.dtype=float32").config
    assert (config.rollout.tp, config.model.max_length) == (2, 128)
    assert (config.rollout.engines, config.trainer.world_size) == (1, 1)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rollout.engines=3", "serve does not read rollout.engines; it reads rollout.*"),
        ("rollout.temperature=0.5", "serve does not read rollout.temperature; .* in its requests"),
        ("rollout.max_response_tokens=5", "serve does not read rollout.max_response_tokens; it "),
        ("rollout.silent_s=5", "serve does not read rollout.silent_s"),
        ("refit.slots=9", "serve does not read refit.slots"),
        ("trainer.lr=5", "serve does not read trainer.lr"),
        ("adapter.rank=4", "serve does not read adapter.rank"),
        ("model=deepseek_v3", "serve does not read model.path"),
        ("@settings.yaml", "serve does not read trainer.world_size"),
        ("--versions=7", "--versions 7 has no effect: SOURCE is a model"),
        ("--base=x", "--base x has no effect"),
    ],
)
def test_what_it_does_not_read_is_refused(model, word, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.yaml").write_text("rollout: {tp: 1}\ntrainer: {world_size: 4}\n")
    with pytest.raises(ConfigError, match=said):
        planned(model, word)


def test_a_source_that_is_none_is_called_so():
    with pytest.raises(ModelError, match="^SOURCE 'nowhere' is not a directory"):
        planned("nowhere")


def test_a_folder_that_holds_runs_and_is_none_is_called_so(run):
    with pytest.raises(ModelError, match=r"is nothing to serve: no run \(it has no checkpoints/\)"):
        planned(run.parent)


@pytest.fixture
def run(model, tmp_path):
    settings = {"model": {"max_length": 96}, "rollout": {"stop": ("@",), "max_response_tokens": 8}}
    return save_run(tmp_path / "run", model, "of a later life", noted=OWN, **settings)


@pytest.fixture
def peft(run, tmp_path):
    assert main(["export", str(run), "--to", "peft", "--out", str(tmp_path / "peft")]) == 0
    return tmp_path / "peft"


def ids(plan: command.Plan) -> list[int]:
    return plan.chats("json").whole(MESSAGES, (), {})


def test_a_run_its_checkpoint_and_what_is_exported_of_it_render_alike(run, peft, model):
    checkpoint = run / "checkpoints/step-000003"
    found = [ids(planned(source)) for source in (run, checkpoint, peft)]
    assert found == [planned(model).chats("json").encode("<<2+3=>>")] * 3
    assert planned(run).template == planned(checkpoint).template == f"that of {run} at step-000003"
    assert planned(peft).template == f"{peft}/chat_template.jinja"
    assert planned(model).template == "the tokenizer's own"


def test_a_checkpoint_is_served_with_the_settings_of_its_step(model, tmp_path):
    settings = {"model": {"max_length": 96}, "rollout": {"stop": ("@",), "max_response_tokens": 8}}
    run = save_run(tmp_path / "run", model, None, **settings)
    for source in (run, run / "checkpoints/step-000003"):
        config = planned(source).config
        assert (config.model.max_length, config.rollout.stop) == (96, ("@",))
        assert planned(source, "model.max_length=64").config.model.max_length == 64
    shutil.move(run / "checkpoints/step-000003", tmp_path)
    alone = planned(tmp_path / "step-000003")
    assert (alone.config.model.max_length, alone.template) == (512, "the tokenizer's own")


def test_a_template_of_the_command_line_takes_the_place_of_the_runs(run, peft, model, tmp_path):
    (tmp_path / "mine.jinja").write_text("mine")
    for word in ("model.chat_template=mine", f"model.chat_template_file={tmp_path}/mine.jinja"):
        for source in (run, run / "checkpoints/step-000003", peft, model):
            plan = planned(source, word)
            assert plan.chats("json").tokenizer.chat_template == "mine"
            assert plan.template == "that of the command line"
    assert planned(peft, "model.chat_template=null").template == "the tokenizer's own"


@pytest.mark.parametrize("source", ["runs/mine-modle", "runs/mine-model/checkpoints/step-000099"])
def test_a_path_that_is_mistyped_is_called_so_and_no_model_of_the_hub(
    tmp_path, monkeypatch, source
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "runs/mine-model/checkpoints/step-000009").mkdir(parents=True)
    near = {"runs/mine-modle": "mine-model"}.get(source, "step-000009")
    message = f"^there is no {source} here; .* has {near}. Taken for a model: SOURCE '{source}' is"
    with pytest.raises(ModelError, match=message):
        planned(source)
