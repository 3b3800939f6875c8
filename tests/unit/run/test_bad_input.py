"""What a user can get wrong is one message and exit code 2, before Ray or any engine starts."""

import json
import logging
import shutil
import subprocess
import sys

import numpy as np
import pytest
import ray
import yaml
from checkpoints import write_checkpoint
from safetensors.numpy import save_file

from lora_moe_rl import cli
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.files import storage, trainer_state
from lora_moe_rl.models.fingerprint import base_record
from tests.helpers import remote_tokenizer


@pytest.fixture
def folder(model, tmp_path, monkeypatch):
    """A directory with files that are wrong in one way each, to run in."""

    def started(*args, **kwargs):
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", started)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no_config").mkdir()
    for name in ("no_shard", "llama"):
        shutil.copytree(model, tmp_path / name)
    (tmp_path / "no_shard/model.safetensors").unlink()
    for name in ("own_tokenizer", "no_tokenizer"):
        ignored = shutil.ignore_patterns("tokenizer*")
        shutil.copytree(model, tmp_path / name, ignore=ignored)
    remote_tokenizer.write(tmp_path / "own_tokenizer")
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "no_shard/model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "llama/config.json").write_text(json.dumps(config))

    for name, prompts in {
        "good": ["1+2="],
        "empty": [],
        "no_prompt": ["1+2=", None],
        "long": ["1+2=", "1+" * 300],
    }.items():
        rows = [{"answer": "3"} | ({"prompt": p} if p else {}) for p in prompts]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "broken.py").write_text("import no_such_package\n\ndef reward(**_): ...\n")
    (tmp_path / "rows.py").write_text("def rows(level): yield {}\n")
    (tmp_path / "raises.py").write_text("def reward(completions, **_): return completions[9]\n")
    (tmp_path / "texts.py").write_text("def reward(completions, **_): return completions\n")
    (tmp_path / "one.py").write_text("def reward(completions, **_): return 1.0\n")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/config.yaml").write_text(to_yaml(RunConfig(model=str(model))))
    (tmp_path / "used/metrics.jsonl").write_text('{"step": 1}\n')
    return tmp_path


HEAVY = ("torch", "ray", "vllm", "megatron", "transformers")


@pytest.mark.parametrize(
    "arguments",
    ["reward.function=raises.py:reward", "model=./no_shard", "data.path=absent.jsonl"],
)
def test_a_bad_reward_or_a_missing_file_costs_no_heavy_import(model, folder, arguments):
    code = (
        "import sys; from lora_moe_rl import cli; code = cli.main(sys.argv[1:]);"
        f"print(code, [name for name in {HEAVY} if name in sys.modules])"
    )
    right = [f"model={model}", "data.path=good.jsonl", "reward.function=raises.py:reward"]
    command = [sys.executable, "-c", code, "train", *right, arguments]
    child = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert child.stdout == "2 []\n", child.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("model=./no_shard", "lacks 1 of 1 weight shards"),
        ("model=./no_tokenizer", "has no tokenizer"),
        ("data.path=absent.jsonl", "there is no such file"),
        ("data.path=long.jsonl", "the prompt has 600 tokens"),
        ("reward.function=one.py:reward", "returned 1.0 for 3 samples"),
    ],
)
def test_the_dry_run_looks_at_the_same(model, folder, capsys, arguments, part):
    assert train(model, arguments, "--dry-run") == 2
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["name"] == "run" and part in shown.err
    assert train(model, "--dry-run") == 0
    assert not (folder / "run").exists()


def train(model, *arguments) -> int:
    """Later arguments lie over these, which are right."""
    right = [f"model={model}", "data.path=good.jsonl", "logging.run_dir=run"]
    right += ["reward.function=lora_moe_rl.rewards:exact_match", "algorithm.prompts_per_step=1"]
    return cli.main(["train", *right, *arguments])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("adapter.rnk=8", ["unknown config key 'adapter.rnk'; did you mean adapter.rank?"]),
        ("adapter.rank=1024", ["adapter.rank=1024 is not a rank vLLM can serve", "from 1 to 512"]),
        ("adapter.expert_rank=600", ["adapter.expert_rank=600 is not a rank vLLM can serve"]),
        ("adapter.targets=kv_a_proj", ["Qwen3MoeForCausalLM has no module", "it has q_proj, "]),
        ("trainer.world_size=3 trainer.ep=3", ["trainer.ep=3 does not divide", "8 experts"]),
        ("trainer.world_size=3 trainer.tp=2", ["trainer.world_size=3 does not match the layout"]),
        ("trainer.world_size=5 trainer.pp=5", ["trainer.pp=5", "5 pieces", "4 layers"]),
        ("trainer.lr_pattern={'*':0}", ["is 0 for every adapter: nothing would be trained"]),
        (
            "rollout.stop_token_ids=1,99999999",
            ["rollout.stop_token_ids has 99999999, which would end no response", "ids are 0 to"],
        ),
        (
            "trainer.steps=3 trainer.warmup_steps=3 trainer.lr_schedule=cosine",
            ["lr_schedule=cosine has no effect: trainer.warmup_steps=3 of the run's 3 optimizer"],
        ),
        ("model.max_length=1024", ["model.max_length=1024", "512 positions"]),
        ("model=./no_config", ["no_config has no config.json"]),
        ("model=./no_shard", ["lacks 1 of 1 weight shards (model-00001-of-00002.safetensors"]),
        (
            "model=./llama",
            ["LlamaForCausalLM", "is not supported", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalL"],
        ),
        ("model=./no_tokenizer", ["no_tokenizer has no tokenizer (none of tokenizer.json"]),
        ("model=./own_tokenizer", ["ByteRanksTokenizer", "set model.trust_remote_code=true"]),
        ("model.revision=v2", ["model.revision=v2 has no effect with model.path="]),
        ("data.path=null", ["there is no data: set data.path or data.generator"]),
        (
            "data.path=null data.sets.a=good.jsonl reward.function=null",
            ["data.sets.a has no reward: set data.sets.a.reward, or reward.function: name"],
        ),
        ("data.path=null data.sets.a.limit=3", ["there is no data: set data.sets.a.path or data"]),
        (
            "data.path=null data.generator=rows.py:rows data.args.levle=3",
            ["data.args.levle: data.generator=", "did you mean level? it takes level"],
        ),
        (
            "data.path=null data.generator=lora_moe_rl.data.generators:reasoning_gym",
            ["needs an argument 'task': set data.args.task=VALUE"],
        ),
        ("data.path=null data.sets.a=empty.jsonl", ["data.sets.a.path=", "empty.jsonl has no row"]),
        (
            "data.path=null data.sets.a=good.jsonl data.sets.a.reward=raises.py:reward "
            "reward.function=null",
            ["data.sets.a.reward=", "raises.py:reward fails on made-up"],
        ),
        ("data.path=absent.jsonl", ["absent.jsonl: there is no such file"]),
        ("data.path=empty.jsonl", ["empty.jsonl has no rows"]),
        ("data.path=no_prompt.jsonl", ["no_prompt.jsonl, line 2: no prompt"]),
        (
            "data.path=long.jsonl",
            ["line 2: the prompt has 600 tokens; at most 504 fit"],
        ),
        ("eval.sets.a=absent.jsonl", ["eval.sets.a.path=", "absent.jsonl: there is no such file"]),
        ("eval.sets.a=empty.jsonl", ["eval.sets.a.path=", "empty.jsonl has no rows"]),
        (
            "eval.sets.a.limit=3",
            ["there is no data: set eval.sets.a.path or eval.sets.a.generator"],
        ),
        ("eval.sets.a=long.jsonl", ["line 2: the prompt has 600 tokens", "eval.sets.a.too_long"]),
        (
            "data.path=null data.sets.b=good.jsonl reward.function=null eval.sets.a=good.jsonl "
            "data.sets.b.reward=lora_moe_rl.rewards:exact_match",
            ["eval.sets.a has no reward: set eval.sets.a.reward, or reward.function: name"],
        ),
        (
            "eval.sets.a=good.jsonl eval.sets.a.reward=raises.py:reward",
            ["eval.sets.a.reward=", "raises.py:reward fails on made-up"],
        ),
        (
            "eval.sets.a=good.jsonl eval.sets.a.group_by=level",
            ["eval.sets.a.group_by=level: row 0 has no such column; it has answer"],
        ),
        ("reward.function=null", ["reward.function is not set: name a function as"]),
        ("reward.function=nowhere.rewards:f", ["there is no module 'nowhere'"]),
        ("reward.function=broken.py:reward", ["broken.py", "No module named 'no_such_package'"]),
        ("reward.function=raises.py:reward", ["raises.py:reward fails on made-up", "IndexError("]),
        ("reward.function=texts.py:reward", ["returned '3', not a finite number"]),
        (
            "reward.function=one.py:reward",
            ["returned 1.0 for 3 samples, not one reward for each", "return a list of 3"],
        ),
        ("model=nobody/nothing reward.function=raises.py:reward", ["fails on made-up"]),
        (
            "reward.function=broken.py",
            ["reward.function: 'broken.py' is not of the form module:function"],
        ),
        ("logging.run_dir=used", ["used holds a run already; go on with it by --resume"]),
        ("--resume-from step-000001", ["step-000001 is no checkpoint", "by its directory"]),
        ("--resume-from used --resume", ["--resume and --resume-from are both given"]),
        ("--resume-from", ["--resume-from needs a checkpoint"]),
        ("--resume", ["there is no run in", "leave out --resume"]),
        ("logging.run_dir=used --resume adapter.rank=8", ["adapter.rank was 16 and is now 8"]),
    ],
)
def test_refused_before_anything_starts(model, folder, capsys, arguments, parts):
    assert train(model, *arguments.split()) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("error: ") and "Traceback" not in error
    for part in parts:
        assert part in error
    assert not list(folder.glob("run/metrics.jsonl"))


def test_a_run_without_any_valid_checkpoint_does_not_start(model, folder, capsys):
    checkpoints = folder / "used/checkpoints"
    for step in (1, 2):
        with write_checkpoint(checkpoints, step, 2, {}) as directory:
            (directory / "trainer_00000.safetensors").write_bytes(bytes(100))
        (checkpoints / f"step-{step:06d}/trainer_00000.safetensors").write_bytes(bytes(99))
    assert train(model, "logging.run_dir=used", "--resume") == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "no checkpoint in" in error and "has 99 bytes instead of 100" in error
    assert "step-000001" in error and "step-000002" in error
    assert (folder / "used/metrics.jsonl").read_text() == '{"step": 1}\n'


# Where the source of good.jsonl stands after its one row.
DATA = {"epoch": 0, "position": 1, "drawn": 1, "rows": 1, "seed": 0}


def save(checkpoints, step, model, critic=False, updates=1, **adapter):
    metadata = {"step": step, "base": base_record(str(model), model)}
    settings = RunConfig(adapter=adapter).adapter.model_dump(mode="json")
    metadata |= {"adapter": settings, "data": DATA, "done": []}
    metadata |= {"trainer": {"version": step, "optimizer_steps": step * updates}}
    state = {"adapter|layers.0.q_proj.A|0,0": np.zeros((4, 8), np.float32)}
    with write_checkpoint(checkpoints, step, 9, metadata) as directory:
        save_file(state, directory / "trainer_00000.safetensors")
        if critic:
            save_file(state, directory / trainer_state.file_name(0, trainer_state.CRITIC))
    return checkpoints / f"step-{step:06d}"


def test_a_run_that_has_done_its_steps_ends_at_once(model, folder, capsys):
    save(folder / "used/checkpoints", 3, model)
    resumed = ["logging.run_dir=used", "--resume", "reward.function=raises.py:reward"]
    assert train(model, *resumed, "trainer.steps=3") == 0
    said = capsys.readouterr()
    assert "nothing is left to do: the checkpoint is at step 3, and trainer.steps=3" in said.out
    assert train(model, *resumed, "trainer.steps=4") == 2
    assert "fails on made-up completions" in capsys.readouterr().err


def test_a_run_that_has_done_its_steps_but_not_its_last_evaluation_goes_on(model, folder, capsys):
    save(folder / "used/checkpoints", 3, model)
    resumed = ["logging.run_dir=used", "--resume", "reward.function=raises.py:reward"]
    resumed += ["trainer.steps=3", "eval.sets.a=good.jsonl"]
    assert train(model, *resumed) == 2  # it gets as far as the reward
    assert "fails on made-up completions" in capsys.readouterr().err
    assert train(model, *resumed, "trainer.steps=2") == 0  # what is done beyond has none to come
    with open(folder / "used/metrics.jsonl", "a") as file:
        file.write('{"step": 3, "eval/step": 3}\n')
    assert train(model, *resumed) == 0
    assert "nothing is left to do" in capsys.readouterr().out


def test_a_newer_checkpoint_that_is_damaged_is_not_the_end(model, folder, capsys):
    save(folder / "used/checkpoints", 2, model)
    (save(folder / "used/checkpoints", 3, model) / "trainer_00000.safetensors").write_bytes(b"")
    resumed = ["logging.run_dir=used", "--resume", "reward.function=raises.py:reward"]
    assert train(model, *resumed, "trainer.steps=3") == 2


def test_a_run_that_may_not_go_on_is_left_as_it_was(model, folder, capsys):
    """With settings that it cannot have; and without them it goes on."""
    save(folder / "used/checkpoints", 2, model)
    before = (folder / "used/config.yaml").read_bytes()
    assert train(model, "logging.run_dir=used", "--resume", "seed=3") == 2
    assert "seed was 0 when the checkpoint was written and is now 3" in capsys.readouterr().err
    assert (folder / "used/config.yaml").read_bytes() == before


def test_a_run_goes_on_from_an_older_checkpoint_in_a_directory_of_its_own(
    model, folder, capsys, monkeypatch
):
    older, newer = (save(folder / "used/checkpoints", step, model) for step in (2, 5))
    monkeypatch.setattr(logging.root, "handlers", [])  # the run sets its own
    before = {path: path.read_bytes() for path in folder.glob("used/**/*") if path.is_file()}
    with pytest.raises(AssertionError, match="Ray was started"):
        train(model, f"--resume-from={older}")
    assert "going on from" in capsys.readouterr().out
    assert [path.name for path in (folder / "run/checkpoints").iterdir()] == ["step-000002"]
    after = {path: path.read_bytes() for path in folder.glob("used/**/*") if path.is_file()}
    assert after == before
    assert train(model, "--resume-from", str(newer)) == 2  # run/ holds a run now
    assert train(model, "--resume-from", str(newer), "logging.run_dir=used") == 2
    assert train(model, "--resume-from", str(newer), "trainer.steps=5") == 0


def test_a_run_goes_on_where_its_config_lies(model, folder, capsys, monkeypatch):
    """A copy of a run directory, beside the one that its config names."""
    monkeypatch.setattr(logging.root, "handlers", [])  # the run sets its own
    save(folder / "used/checkpoints", 2, model)
    saved = RunConfig(model=str(model), logging={"run_dir": str(folder / "used")})
    (folder / "used/config.yaml").write_text(to_yaml(saved))
    shutil.copytree(folder / "used", folder / "copy")
    before = {path: path.read_bytes() for path in folder.glob("used/**/*") if path.is_file()}
    given = (
        "data.path=good.jsonl",
        "algorithm.prompts_per_step=1",
        "reward.function=lora_moe_rl.rewards:exact_match",
    )
    with pytest.raises(AssertionError, match="Ray was started"):
        cli.main(["train", "copy/config.yaml", "--resume", *given])
    assert f"going on from {folder / 'copy/checkpoints'}" in capsys.readouterr().out
    after = {path: path.read_bytes() for path in folder.glob("used/**/*") if path.is_file()}
    assert after == before
    named = [f"logging.run_dir={folder / 'used'}", *given]
    with pytest.raises(AssertionError, match="Ray was started"):
        cli.main(["train", "copy/config.yaml", "--resume", *named])
    assert f"going on from {folder / 'used/checkpoints'}" in capsys.readouterr().out


def test_a_fork_with_another_alpha_needs_resize_as_a_resumed_run_does(model, folder, capsys):
    origin = save(folder / "used/checkpoints", 2, model, alpha=64)
    assert train(model, f"--resume-from={origin}", "adapter.alpha=32") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has other scales (alpha / rank) than this run: layers.0.q_proj 4 -> 2" in said
    assert "adapter.resize=true" in said and "adapter.alpha=64" in said


def test_a_schedule_at_its_end_is_told_when_a_run_goes_on(model, folder, capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # the run sets its own
    save(folder / "used/checkpoints", 2, model, updates=8)
    with pytest.raises(AssertionError, match="Ray was started"):
        train(
            model,
            *("logging.run_dir=used", "--resume", "trainer.steps=6"),
            *("trainer.lr_schedule=linear", "trainer.warmup_steps=0"),
        )
    said = capsys.readouterr()
    assert "is at its end, 16 of 6 optimizer steps" in " ".join((said.out + said.err).split())


def test_a_fork_leaves_the_copies_of_its_origin_alone(model, folder, capsys, monkeypatch):
    origin = save(folder / "used/checkpoints", 2, model)
    monkeypatch.setattr(logging.root, "handlers", [])  # the run sets its own
    config = folder / "used/config.yaml"
    storage.begin(folder / "used", str(folder / "copies"), config, None)
    before = (folder / "copies/config.yaml").read_bytes()
    fork, place = f"--resume-from={origin}", "checkpoint.push_to="
    assert train(model, fork, f"{place}copies") == 2
    assert f"another run's, that in {folder / 'used'} " in capsys.readouterr().err
    with pytest.raises(AssertionError, match="Ray was started"):
        train(model, fork, f"{place}elsewhere")
    settings = (folder / "run/config.yaml").read_bytes()
    assert train(model, "--resume", f"{place}copies") == 2
    assert (folder / "run/config.yaml").read_bytes() == settings
    assert "another run's" in capsys.readouterr().err
    assert (folder / "copies/config.yaml").read_bytes() == before


@pytest.mark.parametrize("critic", [True, False])
def test_a_critic_that_a_resumed_run_does_not_take_along_is_told_of(
    model, folder, capsys, monkeypatch, critic
):
    monkeypatch.setattr(logging.root, "handlers", [])  # the run sets its own
    save(folder / "used/checkpoints", 1, model, critic)
    with pytest.raises(AssertionError, match="Ray was started"):
        train(model, "logging.run_dir=used", "--resume")
    said = capsys.readouterr()
    told = " ".join((said.out + said.err).split())
    assert ("step-000001 holds a critic, and algorithm=grpo trains none" in told) == critic


def test_with_everything_right_ray_is_started(model, folder, monkeypatch):
    """So that the runs above are refused for their one fault."""
    monkeypatch.setattr(logging.root, "handlers", [])  # the run sets its own
    with pytest.raises(AssertionError, match="Ray was started"):
        train(model)
    shutil.rmtree(folder / "run")
    with pytest.raises(AssertionError, match="Ray was started"):
        train(model, "eval.sets.a=good.jsonl", "eval.every=1")
