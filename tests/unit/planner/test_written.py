"""`plan --write`: a recipe that is the run that was planned."""

import ast
import json
import re
from pathlib import Path

import pytest

from lora_moe_rl import cli
from lora_moe_rl.config import RunConfig, recipes
from lora_moe_rl.config.applicable import check_applicable
from lora_moe_rl.models.fit import check_layout, check_replay
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.written import REWARD, ROWS
from lora_moe_rl.run import lengths

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
QWEN = ["--model", "qwen3-30b-a3b", "--gpus", "8"]


def planned(words, capsys) -> dict:
    assert cli.main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "words",
    [
        QWEN,
        ["--model", "moonshotai/Moonlight-16B-A3B-Instruct", "--gpus", "4", "algorithm=gspo"],
        [
            "--model",
            "qwen3-8b",
            "--gpus",
            "2",
            "algorithm=cispo",
            'adapter.rank_pattern={"q_proj": 8}',
        ],
        [str(RECIPES / "qwen3_30b_a3b.py"), "--rank", "8", "--gpu", "h200"],
        [str(RECIPES / "tiny_arithmetic.py"), "--gpus", "3"],
    ],
    ids=lambda words: Path(words[1] if words[0] == "--model" else words[0]).stem,
)
def test_a_written_recipe_is_the_run_that_was_planned(words, tmp_path, capsys):
    path = tmp_path / "mine.py"
    first = planned([*words, "--write", str(path)], capsys)
    config = recipes.resolve(recipes.load_config(str(path)))
    check_applicable(config)
    shape = find(config.model.path).shape
    check_layout(shape, config)
    check_replay(shape, config)
    assert config.name == "mine"
    again = planned([str(path)], capsys)
    for key in ("adapter", "gpus", "trainer", "engine", "seconds"):
        assert again[key] == first[key], key


def test_a_plan_of_a_model_alone_gets_data_a_reward_and_its_own_hub_name(tmp_path, capsys):
    path = tmp_path / "moon.py"
    name = "moonshotai/Moonlight-16B-A3B-Instruct"
    planned(["--model", name, "--gpus", "4", "--write", str(path)], capsys)
    config = recipes.load_config(str(path))
    assert (config.model.path, config.model.trust_remote_code) == (name, True)
    assert (config.data.path, config.reward.function) == (ROWS, REWARD)
    assert config.trainer.device == "cuda"
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda path: path.stem)
def test_the_planner_knows_whose_tokenizer_is_code(path):
    model = recipes.load_config(str(path)).model
    assert find(model.path).remote_tokenizer == model.trust_remote_code


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mine.txt"], "not the name of a recipe"),
        (["my run.py"], "not the name of a recipe"),
        (["there.py"], "there is such a file"),
        (["mine.py", "--base", "int4", "--gpu-memory", "50"], "holds no --base, --served"),
        (["mine.py", "trainer.world_size=4", "--gpus", "2"], "does not fit"),
    ],
)
def test_what_cannot_be_written_is_not(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("mine = True")
    assert cli.main(["plan", *QWEN, "--write", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}  # Python's, of a recipe
    assert left == {"there.py"}


SNIPPETS = [
    (page, match[1])
    for page in ("README.md", *(f"docs/{one.name}" for one in sorted((ROOT / "docs").glob("*.md"))))
    for match in re.finditer(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    if "lora_moe_rl.recipe.main(config" in match[1]
]


@pytest.mark.parametrize(("page", "text"), SNIPPETS, ids=[page for page, _ in SNIPPETS])
def test_the_recipes_of_the_docs_fit_on_a_node(page, text, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(text)
    assert cli.main(["plan", str(tmp_path / "mine.py"), "--gpus", "8"]) == 0, page
    assert "fits" in capsys.readouterr().out
    config = recipes.load_config(str(tmp_path / "mine.py"))
    assert not lengths.check(config, find("qwen3-30b-a3b").shape)


def test_such_recipes_are_there():
    assert {page for page, _ in SNIPPETS} >= {"README.md", "docs/running.md", "docs/warm_start.md"}


def test_the_lengths_of_the_tiny_models_are_warned_of_with_others():
    shape = find("qwen3-30b-a3b").shape
    assert "rollout.max_response_tokens=8, the default" in lengths.check(RunConfig(), shape)
    assert not lengths.check(RunConfig(rollout={"max_response_tokens": 16}), shape)
    assert not lengths.check(RunConfig(), find("tiny_qwen3_moe").shape)
