"""The command line as a user meets it."""

import errno
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from lora_moe_rl import cli, recipe
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import DISK
from lora_moe_rl.files.importing import load_function
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run import supervisor
from lora_moe_rl.run.signals import Stopped

ROOT = Path(__file__).parents[2]

RECIPE = """
from lora_moe_rl import recipe
from lora_moe_rl.config import RunConfig

config = RunConfig(
    name="sums",
    model="qwen3_moe",
    adapter={"rank": 4},
    data={"generator": f"{__file__}:rows"},
    reward={"function": f"{__file__}:reward"},
)

def rows():
    yield {"prompt": "1+2=", "answer": "3"}

def reward(completions, **columns):
    return [1.0 for _ in completions]

if __name__ == "__main__":
    recipe.main(config, __file__)
"""


@pytest.fixture
def recipe_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe_sums.py").write_text(RECIPE)
    return tmp_path / "recipe_sums.py"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **environment}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)


def shown(capsys) -> dict:
    return yaml.safe_load(capsys.readouterr().out)


def test_dry_run_prints_the_resolved_config(recipe_file, tmp_path, capsys):
    arguments = ["train", recipe_file.name, "trainer.steps=3", "--adapter.expert_rank", "2"]
    assert cli.main([*arguments, "--dry-run"]) == 0
    config = shown(capsys)
    assert config["adapter"]["rank"] == 4 and config["adapter"]["expert_rank"] == 2
    assert config["trainer"]["steps"] == 3
    assert config["logging"]["run_dir"] == f"{tmp_path}/runs/sums-qwen3_moe"
    assert config["reward"]["function"] == f"{recipe_file}:reward"
    assert not (tmp_path / "runs").exists()


def test_a_recipe_run_as_a_script_does_the_same(recipe_file, capsys):
    arguments = ["adapter.rank=2", "--trainer.steps", "3", "--dry-run"]
    cli.main(["train", str(recipe_file), *arguments])
    script = run(sys.executable, recipe_file, *arguments)
    assert script.returncode == 0, script.stderr
    assert script.stdout == capsys.readouterr().out
    assert yaml.safe_load(script.stdout)["adapter"]["rank"] == 2


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.py")), ids=lambda p: p.name)
def test_every_recipe_of_the_repository_resolves(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if path.stem == "reasoning_tasks" and find_spec("reasoning_gym") is None:
        pytest.skip("pip install reasoning-gym")
    assert cli.main(["train", str(path), "--dry-run"]) == 0
    config = shown(capsys)
    reward = config.get("reward", {}).get("function")  # none without rollouts
    for spec in (reward, config["data"]["generator"]):
        assert spec is None or callable(load_function(spec))


def test_the_errors_of_a_script_are_those_of_the_command(recipe_file):
    script = run(sys.executable, recipe_file, "adapter.rnk=2")
    assert script.returncode == 2
    assert script.stderr == "error: unknown config key 'adapter.rnk'; did you mean adapter.rank?\n"


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("RunConfig(naame='a')", "unknown config key 'naame'; did you mean name?"),
        ("RunConfig(algorithm='grpoo')", "algorithm.name='grpoo' is none of "),
        ("RunConfig(trainer={'steps': 0})", "trainer.steps=0 must be at least 1"),
        ("AdapterConfig(rnk=2)", "unknown config key 'adapter.rnk'; did you mean adapter.rank?"),
    ],
)
def test_a_config_that_a_recipe_makes_wrong_is_one_line_of_a_script_too(tmp_path, made, told):
    """As of the command; whatever else is raised, and with --traceback that too, has a trace."""
    file = tmp_path / "mine.py"
    heading = "import lora_moe_rl.recipe\nfrom lora_moe_rl.config import *\n"
    file.write_text(f"{heading}config = {made}\n")
    script = run(sys.executable, file)
    assert script.returncode == 2 and script.stdout == ""
    assert script.stderr.startswith(f"error: {file}, line 3: {told}")
    assert script.stderr.count("\n") == 1
    assert script.stderr == run(sys.executable, "-m", "lora_moe_rl", "train", file).stderr
    whole = run(sys.executable, file, "--traceback")
    assert whole.returncode == 1 and whole.stderr.startswith("Traceback")


def test_what_a_recipe_raises_by_itself_has_pythons_traceback(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import lora_moe_rl.recipe\nimport pydantic\nclass Own(pydantic.BaseModel):\n    a: int\n"
        "Own(a='x')\n"
    )
    script = run(sys.executable, tmp_path / "mine.py")
    assert script.returncode == 1 and "Own(a='x')" in script.stderr
    assert script.stderr.startswith("Traceback")


def test_what_the_dry_run_prints_runs_again(recipe_file, tmp_path, capsys):
    cli.main(["train", str(recipe_file), "replay.mode=r2", "--dry-run"])
    text = capsys.readouterr().out
    (tmp_path / "saved.yaml").write_text(text)
    assert cli.main(["train", "saved.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out == text


def test_relative_files_become_absolute(recipe_file, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "my_model").mkdir()
    cli.main(
        ["train", "reward.function=recipe_sums.py:reward", "data.path=rows.jsonl"]
        + ["model=./my_model", "--dry-run"]
    )
    config = shown(capsys)
    assert config["reward"]["function"] == f"{recipe_file}:reward"
    assert config["data"]["path"] == f"{tmp_path}/rows.jsonl"
    assert config["model"]["path"] == f"{tmp_path}/my_model"


@pytest.mark.parametrize("model", ["qwen3_moe", "Qwen/Qwen3-30B-A3B"])
def test_names_of_models_stay_names(recipe_file, capsys, model):
    cli.main(["train", f"model={model}", "--dry-run"])
    assert shown(capsys)["model"]["path"] == model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe_sums.py", "adapter.rnk=2"], "did you mean adapter.rank?"),
        (["recipe_sums.py", "other.py"], "two recipes were given, recipe_sums.py and other.py"),
        (["recipe_sums.py", "trainer.lr"], "trainer.lr has no value: write trainer.lr=VALUE"),
        (["missing.py"], "no such file"),
        (["recipe_sums"], "neither a recipe (.py) nor a config file"),
        (["empty.py"], "defines no `config`: it needs `config = RunConfig(...)`"),
        (["wrong.py"], "wrong.py, line 5: unknown config key 'adapter.rnk'; did you mean"),
        (["reward.function=gone.py:f"], "there is no file"),
        (["--resum"], "unknown config key 'resum'"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    recipe_file, tmp_path, capsys, arguments, message
):
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "wrong.py").write_text(RECIPE.replace('"rank": 4', '"rnk": 4'))
    assert cli.main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in " ".join(error.split())
    assert "Traceback" not in error


def test_traceback_on_demand(recipe_file):
    command = [sys.executable, "-m", "lora_moe_rl", "train", "adapter.rank=0"]
    assert "Traceback" not in run(*command).stderr
    assert "Traceback" in run(*command, "--traceback").stderr
    assert "Traceback" in run(*command, LORA_MOE_RL_TRACEBACK="1").stderr


def test_train_help_shows_keys_and_the_values_of_the_recipe(recipe_file, capsys):
    assert cli.main(["train", "--help"]) == 0
    assert "  adapter.rank=16   (int)\n      Rank of every adapter" in capsys.readouterr().out
    script = run(sys.executable, recipe_file, "--help")
    assert "  adapter.rank=4   (int)" in script.stdout


@pytest.mark.parametrize("arguments", [["frobnicate"], [], ["make-tiny", "gpt2"]])
def test_unknown_commands(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: lora-moe-rl" in capsys.readouterr().err


HEAVY = ("torch", "ray", "vllm", "transformers", "datasets", "megatron", "matplotlib", "wandb")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["doctor"]])
def test_answers_at_once_since_it_imports_nothing_heavy(tmp_path, arguments):
    code = (
        "import sys\n"
        "from lora_moe_rl.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert child.returncode == 0, child.stderr


def test_a_run_that_was_asked_to_stop_ends_without_the_word_error(capsys):
    def stopped():
        raise Stopped

    assert cli.exit_code_of(stopped, []) == cli.INTERRUPTED
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def runs(monkeypatch):
    """What a run is started with."""
    from lora_moe_rl.run import start

    found = []
    monkeypatch.setattr(start, "run", lambda config, *how: found.append(how))
    return found


@pytest.mark.parametrize("way_in", ["train", "recipe"])
def test_one_command_begins_a_run_and_goes_on_with_it(tmp_path, runs, way_in):
    def begin(*more: str) -> int | str | None:
        words = [f"logging.run_dir={tmp_path}", "--resume=auto", *more]
        if way_in == "train":
            return cli.main(["train", *words])
        with pytest.raises(SystemExit) as caught:
            recipe.main(RunConfig(), "mine.py", words)
        return caught.value.code

    assert begin() == 0
    (tmp_path / "config.yaml").touch()
    (tmp_path / "metrics.jsonl").touch()  # it failed before its first step
    assert begin("--resume-from", "OTHER/checkpoints/step-000002") == 0
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert begin("--resume-from", "OTHER/checkpoints/step-000002") == begin() == 0
    fork = Path("OTHER/checkpoints/step-000002")
    assert runs == [(False, None), (False, fork), (True, None), (True, None)]


def test_it_waits_for_a_disk_that_is_away(tmp_path, runs, monkeypatch, capsys):
    def refuses(run_dir):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(RunDir, "has_steps", property(refuses))
    assert cli.main(["train", f"logging.run_dir={tmp_path}", "--resume=auto"]) == DISK
    assert not runs and "Stale file handle" in capsys.readouterr().err


def test_what_is_supervised_goes_on_where_there_is_something_by_then(monkeypatch):
    calls = []
    monkeypatch.setattr(supervisor, "supervise", lambda *what: calls.append(what) or 0)
    assert cli.main(["train", "--supervise", "--resume=auto", "trainer.steps=3"]) == 0
    ((_, first, later),) = calls
    assert first[4:] == ["--resume=auto", "trainer.steps=3"]
    assert later[4:] == ["--resume", "trainer.steps=3"]


def test_a_run_is_either_quiet_or_says_its_records(capsys):
    assert cli.main(["train", "--quiet", "--json"]) == 2
    assert "--quiet and --json are both given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("launch recipes/tiny_arithmetic.py --on ssh --gpus-per-node -1", "-1 is less than 0"),
        ("chaos recipes/tiny_arithmetic.py --seed -1", "--seed: -1 is less than 0"),
        ("bench head --tokens 8,0", "--tokens: 0 is less than 1"),
        ("bench export --gb nan", "--gb: nan is not a finite number above 0"),
        ("verify refit --model m --samples 0", "--samples: 0 is less than 1"),
        ("export run --to merged --out o --stop-lost nan", "--stop-lost: nan is not a finite"),
    ],
)
def test_numbers_that_nothing_can_have_are_refused_by_the_parser(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    assert said in capsys.readouterr().err
