"""`lora-moe-rl init`: the recipe that it writes is one that fits; what cannot be is said first."""

import json
import sys
from pathlib import Path

import pytest

from lora_moe_rl import cli
from lora_moe_rl.config import recipes
from lora_moe_rl.planner import plan as plans
from lora_moe_rl.planner.request import read
from lora_moe_rl.run import reward_trial

pytestmark = pytest.mark.seconds

FLAGS = {"model": "qwen3-30b-a3b", "data": "rows.jsonl", "reward": "exact_match", "gpus": "8"}
OWN = """
def rows():
    while True:
        yield {"question": "2+3=", "solution": "5"}

def right(completions, answer, **_):
    return [float(text == good) for text, good in zip(completions, answer, strict=True)]

def broken(completions, **_):
    raise ValueError("never")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # On a machine with much to do a reward's process may take longer to start than a user waits.
    monkeypatch.setattr(reward_trial, "PATIENCE_S", 300.0)
    rows = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def init(*words: str, **flags: str | None) -> int:
    given = FLAGS | flags
    options = [word for k, v in given.items() if v is not None for word in (f"--{k}", v)]
    return cli.main(["init", *words, *options])


def problems(path: str) -> list[str]:
    """What the planner, asked about a recipe, finds in the way of its run."""
    request = read([path])
    return plans.make(request.facts, request.config, request.assumed).problems


def test_the_recipe_is_loaded_by_its_name_and_fits(capsys):
    assert init("first.py", "adapter.rank=8", "trainer.steps=300", gpu="h200") == 0
    config = recipes.resolve(recipes.load_config("first.py"))
    assert (config.name, config.model.path) == ("first", "Qwen/Qwen3-30B-A3B")
    assert (config.data.path, config.data.chat_template) == (
        str(Path("rows.jsonl").absolute()),
        True,
    )
    assert config.reward.function == "lora_moe_rl.rewards:exact_match"
    assert (config.adapter.rank, config.trainer.steps) == (8, 300)
    request = read(["first.py"])
    assert (request.assumed.hardware.gpus, request.assumed.hardware.gpu) == (8, "h200")
    assert problems("first.py") == []
    said = capsys.readouterr().out
    assert "20 rows" in said and "gave 1 for the answer '1'" in said
    assert said.rstrip().endswith("python first.py")


def test_rows_and_reward_of_ones_own_are_called_before_anything_is_planned(capsys):
    assert init(data="own.py:rows", reward="own.py:right") == 0
    config = recipes.load_config("mine.py")
    assert (config.data.generator, config.reward.function) == ("own.py:rows", "own.py:right")
    assert "gave 1 for the answer '5'" in capsys.readouterr().out


def test_what_no_flag_says_is_asked_until_it_can_be(monkeypatch, capsys):
    answers = iter(
        ["kimi-k3", "qwen3-30b-a3b", "", "rows.jsonl", "exact", "exact_match", "0", "8", "h101", ""]
    )
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert init("data.chat_template=false", model=None, data=None, reward=None, gpus=None) == 0
    assert next(answers, None) is None
    assert recipes.load_config("mine.py").data.chat_template is False
    assert problems("mine.py") == []
    said = capsys.readouterr().out
    for complaint in (
        "did you mean Kimi-K2",
        "needs data",
        "is no reward",
        "number of GPUs",
        "h101",
    ):
        assert complaint in said


@pytest.mark.parametrize(
    ("words", "flags", "said"),
    [
        ((), {"gpus": None, "reward": None}, "init needs --reward, --gpus; on a terminal it asks"),
        ((), {"model": "qwen3-30b-a4b-base"}, "did you mean"),
        ((), {"data": "nowhere.jsonl"}, "there is no such file"),
        ((), {"reward": "exact"}, "is no reward"),
        ((), {"reward": "own.py:wrong"}, "wrong"),
        ((), {"reward": "own.py:broken"}, "fails on made-up completions"),
        (("reward.function=own.py:right",), {}, "takes --reward, and not reward.function"),
        (("name=other",), {}, "names the run by the recipe's file: leave out name="),
        ((), {"data": "."}, "data.path=. is not a .jsonl"),
        (("model=qwen3_moe",), {}, "takes --model, and not model.path"),
        (("adapter.rnak=8",), {}, "adapter.rank"),
        (("a.py", "b.py"), {}, "one recipe"),
        (("rows.jsonl",), {}, "there is such a file"),
        (("mine.txt",), {}, "not the name of a recipe"),
        (("trainer.world_size=4",), {"gpus": "2"}, "does not fit"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_what_cannot_be_is_said_and_nothing_is_written(words, flags, said, folder, capsys):
    before = sorted(folder.iterdir())
    assert init(*words, **flags) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert [path for path in sorted(folder.iterdir()) if path.suffix != ""] == before


def test_where_nothing_fits_changes_are_named_and_nothing_is_written(folder, capsys):
    assert init(model="kimi-k2", gpus="8") == 1
    assert "--gpu" in capsys.readouterr().out
    assert not (folder / "mine.py").exists()
