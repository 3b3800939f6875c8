"""`lora-moe-rl check`: everything wrong at once, prompts as the model gets them, and no more."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from template_run import save_run

from lora_moe_rl import cli
from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.cluster import bundles
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override, with_settings
from lora_moe_rl.errors import AdapterError, DataError, RunDirError
from lora_moe_rl.files.untrusted import read_json
from lora_moe_rl.run import machine, start
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from lora_moe_rl.upstream import versions
from lora_moe_rl.verify.inputs import random_adapter

pytestmark = pytest.mark.seconds


def test_a_run_that_is_right(check, tmp_path):
    code, found, prompts = check("data.chat_template=true")
    assert code == 0 and {state for state, _ in found.values()} == {"ok"}
    assert found["reward"][1].endswith(
        "gave 1 for the answer '0', 0 for '', 0 for 'I do not know.'"
    )
    assert found["prompts"][1] == "22 to 22 tokens of 504 that fit"
    assert prompts.count("tokens\n") == 3
    assert "prompt 1, 22 tokens\nuser: 1+1=\nassistant: \ncolumns: {'answer': '2'}" in prompts
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}  # Python's, of rewards.py
    assert left == {"rewards.py", "rows.jsonl"}


def test_a_chat_template_of_ones_own_renders_the_prompts(check):
    mine = "model.chat_template=<{{ messages[0].content }}>"
    code, found, prompts = check(mine, "data.chat_template=true")
    assert code == 0 and "<0+0=>" in prompts
    code, found, _ = check(mine)
    state, told = found["prompts"]
    assert code == 2 and state == "error"
    assert "model.chat_template has no effect: the prompts are strings" in told
    assert "set data.chat_template=true" in told
    judge = ["reward.function=lora_moe_rl.rewards:Judge", "reward.args.url=engines"]
    code, found, prompts = check(mine, *judge, "reward.args.model=base")
    assert code == 0 and "<0+0=>" not in prompts  # its questions are rendered, no prompt is
    agent = ["environment=external", "environment.command=true"]
    code, found, prompts = check(mine, *agent)
    assert code == 0 and "<0+0=>" not in prompts  # what an agent makes of it is


def test_all_that_is_wrong_is_told_at_once(check):
    code, found, prompts = check("trainer.ep=3", "trainer.world_size=3", "data.path=gone.jsonl")
    assert code == 2 and prompts == ""
    assert found["layout"][0] == "error" and "trainer.ep=3 does not divide" in found["layout"][1]
    assert found["data"][0] == "error" and "gone.jsonl" in found["data"][1]
    assert found["model"][0] == "ok" and "that needs the data" in found["reward"][1]
    assert found["machine"] == ("skipped", "needs the layout")
    assert found["prompts"] == ("skipped", "needs the data")


def test_a_form_of_quantisation_that_is_not_supported_is_named(check, model, tmp_path):
    other = tmp_path / "quantised"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (other / "config.json").write_text(json.dumps(config))
    state, text = check(f"model={other}", "trainer.device=cpu")[1]["model"]
    assert state == "error" and "quant_method='awq'" in text
    assert "int4 (quant_method compressed-tensors" in text and "fp8 (quant_method fp8" in text


def test_nothing_is_fetched_or_made(check, monkeypatch, tmp_path):
    monkeypatch.setenv("LORA_MOE_RL_CACHE", str(tmp_path / "cache"))
    for model in ("nobody/nothing", "qwen3_moe"):
        code, found, _ = check(f"model={model}")
        assert code == 0 and found["model"][0] == "skipped"
        assert found["prompts"] == ("skipped", "needs the model")
    assert not (tmp_path / "cache").exists()


def test_what_the_machine_lacks_is_a_warning(check, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    state, text = check()[1]["machine"]
    assert state == "warning" and "RAY_ADDRESS=127.0.0.1:1 cannot be reached" in text
    monkeypatch.delenv("RAY_ADDRESS")
    state, text = check("trainer.device=cpu", "rollout.cpu_kv_cache_gib=1e6")[1]["machine"]
    assert state == "warning" and "use a smaller model or fewer ranks" in text
    many = ("checkpoint.keep=1000000000", "checkpoint.every=1", "trainer.steps=1000000000")
    state, text = check(*many)[1]["machine"]
    assert state == "warning" and "the disk may be full before the run is done" in text


def test_engines_that_do_not_start_without_a_gpu_are_a_warning(check, monkeypatch):
    monkeypatch.setattr(bundles, "vllm_on_cpu", lambda: False)
    monkeypatch.setattr(machine, "gpu_memory", list)
    state, text = check()[1]["machine"]
    assert state == "warning" and "`make setup` without GPU=1" in text
    monkeypatch.setattr(machine, "gpu_memory", lambda: [80.0])
    assert "without GPU=1" not in check()[1]["machine"][1]


def test_a_host_with_too_little_memory_beside_its_gpus_is_a_warning(check, monkeypatch):
    monkeypatch.setattr(machine, "gpu_memory", lambda: [80.0, 80.0])
    state, text = check("trainer.device=cuda")[1]["machine"]
    assert "in its host's memory" not in text
    little = SimpleNamespace(total=2 * 2**30)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: little)
    state, text = check("trainer.device=cuda")[1]["machine"]
    assert state == "warning" and "in its host's memory of 2: most of it is its processes" in text


def test_a_warm_up_that_goes_on_after_the_run_is_a_warning(check):
    steps = ("trainer.steps=4", "algorithm.epochs=2")
    code, found, _ = check(*steps, "trainer.warmup_steps=9")
    assert code == 0 and found["layout"][0] == "warning"
    assert "trainer.warmup_steps=9 of the run's 8 optimizer steps" in found["layout"][1]
    assert check(*steps, "trainer.warmup_steps=8")[1]["layout"][0] == "ok"
    assert check(*steps, "trainer.warmup_steps=6", "trainer.lr_schedule=linear")[0] == 0
    code, found, _ = check(*steps, "trainer.warmup_steps=7", "trainer.lr_schedule=linear")
    assert code == 2 and "trainer.lr_schedule=linear has no effect" in found["layout"][1]
    # A critic's own steps warm nothing up.
    code, found, _ = check("algorithm=ppo", "algorithm.critic_warmup=2", "trainer.steps=4",
                           "trainer.warmup_steps=3")  # fmt: skip
    assert "trainer.warmup_steps=3 of the run's 2 optimizer steps" in found["layout"][1]


def test_bounds_of_a_ratio_that_is_always_1_are_a_warning(check):
    code, found, _ = check("algorithm=dapo", "algorithm.clip_high=0.3")
    assert code == 0 and found["layout"][0] == "warning"
    assert "algorithm.clip_high=0.3 has no effect with one update a step" in found["layout"][1]
    several = ("algorithm.clip_high=0.3", "algorithm.epochs=2")
    assert check("algorithm=dapo", *several)[1]["layout"][0] == "ok"


def write_adapter(folder, model, **settings):
    """A PEFT directory, as another run exports it."""
    config = with_settings(RunConfig(), {"model": str(model), "adapter": settings})
    shape = ModelShape.from_hf_config(read_json(model / "config.json"))
    spec = AdapterSpec.build(shape, config.adapter)
    peft.write(folder, spec, random_adapter(spec, 0), config)


def test_an_adapter_to_start_from_has_to_be_there_and_to_fit(check, model, tmp_path):
    code, found, _ = check("adapter.init_from=sft")
    assert code == 2 and found["adapter"][0] == "error" and "sft is no run" in found["adapter"][1]
    write_adapter(tmp_path / "sft", model)
    code, found, _ = check("adapter.init_from=sft")
    assert code == 0 and found["adapter"] == ("ok", f"starting from {tmp_path}/sft: 28 sites")
    code, found, _ = check("adapter.init_from=sft", "adapter.rank=8")
    assert code == 2 and "q_proj 16 -> 8" in found["adapter"][1]
    assert check("adapter.init_from=sft", "adapter.rank=8", "adapter.resize=true")[0] == 0
    assert "adapter" not in check()[1]


def test_an_adapter_of_another_chat_template_is_a_warning(check, model, tmp_path):
    write_adapter(tmp_path / "sft", model)
    mine, start = "model.chat_template=<{{ messages[0].content }}>", "adapter.init_from=sft"
    asked = ("data.chat_template=true", start)
    assert check(*asked)[1]["adapter"][0] == "ok"
    code, found, _ = check(mine, *asked)
    assert code == 0 and found["adapter"][0] == "warning"
    assert "was trained with the tokenizer's own chat template" in found["adapter"][1]
    (tmp_path / "sft" / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    assert check(mine, *asked)[1]["adapter"][0] == "ok"
    state, text = check(*asked)[1]["adapter"]
    assert state == "warning" and "prompts are rendered with another" in text
    assert f"model.chat_template_file={tmp_path}/sft/chat_template.jinja" in text


def test_a_run_to_start_from_has_the_template_of_its_newest_checkpoint(check, model, tmp_path):
    save_run(tmp_path / "warm", model, "of a later life", noted="<{{ messages[0].content }}>")
    mine, start = "model.chat_template=<{{ messages[0].content }}>", "adapter.init_from=warm"
    asked = ("data.chat_template=true", start, "adapter.rank=2")
    assert check(mine, *asked)[1]["adapter"][0] == "ok"
    state, text = check(*asked)[1]["adapter"]
    assert state == "warning" and "set model.chat_template as that run had it" in text


def test_a_kl_to_the_base_beside_an_adapter_to_start_from_is_a_warning(check, model, tmp_path):
    """It pulls away from what the adapter has learned."""
    start = "adapter.init_from=sft"
    write_adapter(tmp_path / "sft", model)
    code, found, _ = check(start, "algorithm.kl_coef=0.1")
    assert code == 0 and found["layout"][0] == "warning"
    assert "algorithm=grpo measures the policy against the bare base" in found["layout"][1]
    assert "away from adapter.init_from=" in found["layout"][1]
    assert "set algorithm.reference=start" in found["layout"][1]
    assert check(start)[1]["layout"][0] == check("algorithm.kl_coef=0.1")[1]["layout"][0] == "ok"
    to_start = (start, "algorithm.kl_coef=0.1", "algorithm.reference=start")
    assert check(*to_start)[1]["layout"][0] == "ok"


def test_a_run_that_is_there_is_told_of(check, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "run" / name).write_text("name: run\n")
    code, found, _ = check("logging.run_dir=run")
    assert code == 0 and "holds a run: go on with it by --resume" in found["run dir"][1]


def test_a_tracker_has_to_be_installed(check, monkeypatch, tmp_path):
    assert check("tracker=tensorboard,wandb")[1]["tracker"] == ("ok", "tensorboard,wandb")
    assert "tracker" not in check()[1]
    there = versions.find_spec
    monkeypatch.setattr(
        versions, "find_spec", lambda name: None if name == "wandb" else there(name)
    )
    code, found, _ = check("tracker=tensorboard,wandb")
    assert code == 2 and found["tracker"][0] == "error"
    assert "wandb is not installed: pip install 'wandb==" in found["tracker"][1]
    (tmp_path / "own.py").write_text(
        "from lora_moe_rl.telemetry.trackers.base import Tracker\n"
        "class Own(Tracker):\n"
        "    packages, modules = ('their-cloud',), ('their.cloud',)\n"
    )
    code, found, _ = check(f"tracker={tmp_path}/own.py:Own")
    assert code == 2 and "their.cloud is not installed" in found["tracker"][1]
    (tmp_path / "theirs").mkdir()  # a folder of a package's name holds no package
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own.py").write_text(
        (tmp_path / "own.py").read_text().replace("their.cloud", "theirs").replace("Own", "Mine")
    )
    (tmp_path / "own.py").rename(tmp_path / "mine.py")
    code, found, _ = check(f"tracker={tmp_path}/mine.py:Mine")
    assert code == 2 and "theirs is not installed" in found["tracker"][1]


def test_a_dry_run_looks_at_the_adapter_and_the_run_directory_too(check, model, tmp_path, capsys):
    check()  # writes rows and rewards
    right = [f"model={model}", "data.path=rows.jsonl", "reward.function=rewards.py:right"]
    right += ["algorithm.prompts_per_step=4"]  # as many as there are rows
    dry = ["train", *right, "logging.run_dir=run", "--dry-run"]
    assert cli.main(dry) == 0 and not capsys.readouterr().err
    assert cli.main([*dry, "--resume"]) == RunDirError.exit_code
    assert "there is no run in" in capsys.readouterr().err
    assert cli.main([*dry, "--resume-from", "nope"]) == RunDirError.exit_code
    assert "--resume-from nope is no checkpoint" in capsys.readouterr().err
    assert cli.main([*dry, "--quiet"]) == 2
    assert "--quiet has no effect on a dry run" in capsys.readouterr().err
    assert cli.main(dry) == 0
    config = capsys.readouterr().out
    assert cli.main([*dry, "adapter.init_from=sft"]) == AdapterError.exit_code
    assert "sft is no run" in capsys.readouterr().err
    (tmp_path / "run").write_text("")
    assert cli.main(dry) == 2 and "run is a file" in capsys.readouterr().err
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(config)
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    assert cli.main(dry) == 0 and "run dir: " in capsys.readouterr().err
    assert cli.main([*dry, "--resume"]) == 0 and not capsys.readouterr().err
    assert cli.main([*dry, "--resume", "adapter.rank=4"]) == RunDirError.exit_code
    assert "adapter.rank" in capsys.readouterr().err


def test_a_judge_on_the_engines_is_not_called_before_there_are_any(check):
    judge = ("reward.function=lora_moe_rl.rewards:Judge", "reward.args.url=engines")
    code, found, _ = check(*judge, "reward.args.model=base")
    assert code == 0
    assert (
        found["reward"][1] == "lora_moe_rl.rewards:Judge is there; not called, it asks the engines"
    )


def test_a_base_that_is_to_be_held_once_and_cannot_be_is_an_error_or_not(check):
    cut = ("trainer.device=cpu", "rollout.tp=2")
    code, found, _ = check("model.held_once=on", *cut)
    assert code == 2 and found["layout"][0] == "error"
    assert "w13_weight" in found["layout"][1] and "into 2" in found["layout"][1]
    code, found, _ = check("model.held_once=auto", *cut)
    assert code == 0 and found["layout"][0] == "ok"


def test_a_base_that_is_held_once_is_counted_once(check):
    def gib(*settings):
        text = check("trainer.device=cpu", "rollout.engines=300", *settings)[1]["machine"][1]
        return float(text.partition("about ")[2].partition(" GiB")[0])

    experts, attention, vocabulary = 8 * 3 * 96 * 192, 3 * 96 * 128, 2 * 256 * 96
    base = (4 * (experts + attention) + vocabulary) * 4 / 2**30
    assert gib() - gib("model.held_once=on") == pytest.approx(300 * base, abs=0.11)


def test_forks_that_will_have_failed_are_a_warning_where_there_may_be_any(check):
    agent = ["environment=external", "environment.command=true"]
    code, found, _ = check(*agent, "algorithm=ppo")
    state, told = found["prompts"]
    assert code == 0 and state == "warning"
    assert "will have failed (reward.max_failed): algorithm=ppo, as it is set, has no one" in told
    assert check(*agent, "algorithm=grpo")[1]["prompts"][0] == "ok"
    assert check("algorithm=ppo")[1]["prompts"][0] == "ok"


def test_a_run_directory_that_a_run_refuses_is_an_error(check, tmp_path):
    code, found, _ = check("logging.run_dir=rows.jsonl")
    assert code == 2 and "rows.jsonl is a file; choose a directory" in found["run dir"][1]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    code, found, _ = check("logging.run_dir=full")
    assert code == 2 and "full is not empty and holds no run" in found["run dir"][1]
    found = check("logging.run_dir=rows.jsonl/run")[1]
    assert "rows.jsonl is no directory; choose another with logging" in found["run dir"][1]
    (tmp_path / "bare").mkdir()
    assert check("logging.run_dir=bare")[1]["run dir"] == ("ok", f"{tmp_path}/bare")


@pytest.mark.parametrize(
    ("target", "state", "said"),
    [
        ("copies", "ok", "copies"),
        ("memory://copies", "ok", "memory://copies"),
        ("foo://copies", "error", "push_to=foo://copies cannot be reached: .*foo"),
        ("rows.jsonl/copies", "error", "rows.jsonl is no directory"),
    ],
)
def test_a_place_for_copies_is_looked_at(check, target, state, said):
    code, found, _ = check(f"checkpoint.push_to={target}")
    assert found["copies"][0] == state and re.search(said, found["copies"][1])
    assert code == (2 if state == "error" else 0)


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["logging.run_dir=run"], RunDirError, "holds a run already"),
        (["logging.run_dir=new", "--resume"], RunDirError, "there is no run in"),
        (["adapter.init_from=nowhere"], AdapterError, "nowhere is no run"),
        (["logging.run_dir=new"], DataError, "fetched"),
    ],
)
def test_directories_are_looked_at_before_a_model_is_fetched(
    tmp_path, monkeypatch, words, error, said
):
    def fetched(config, fetch):
        raise DataError("fetched")

    monkeypatch.setattr(start, "Preflight", fetched)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("name: run\n")
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    resume = "--resume" in words
    config = override(RunConfig(), [word for word in words if word != "--resume"])
    with pytest.raises(error, match=said):
        start.run(config, resume)
    if not resume:
        with pytest.raises(error, match=said):
            start.evaluate(config, None)


def test_tokens_that_the_model_lacks_are_a_warning_and_a_row_with_one_an_error(
    check, model, tmp_path
):
    other = tmp_path / "more_tokens"
    shutil.copytree(model, other)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer.save_pretrained(other)
    state, told = check(f"model={other}")[1]["prompts"]
    assert state == "warning" and "no embedding of (1, as '<think>' of the id 256; the" in told
    state, told = check(f"model={other}", "data.system_prompt=<think>", "data.chat_template=true")[
        1
    ]["prompts"]
    assert state == "error" and "the prompt has the token '<think>' of the id 256" in told
