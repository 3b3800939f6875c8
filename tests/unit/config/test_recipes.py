"""Every recipe parses, resolves, is planned without a network, and fits what it says it is for."""

import re
from pathlib import Path

import pytest

from lora_moe_rl.config import RunConfig, recipes
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.plugins import ENVIRONMENTS
from lora_moe_rl.data.maker import PromptMaker
from lora_moe_rl.data.rows import read_rows
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import load_file, load_function
from lora_moe_rl.planner.changes import search_of
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.hardware import GIB, Hardware
from lora_moe_rl.planner.plan import Assumed, make
from lora_moe_rl.planner.request import read
from lora_moe_rl.planner.tables import choice
from lora_moe_rl.rewards.mathematics import parse_answer
from lora_moe_rl.telemetry import metric_table

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
LOCAL = ROOT / "recipes/data/math_small.jsonl"
SHARED_GPU = [
    "trainer.world_size=1",
    "trainer.ep=1",
    "trainer.gpus_per_rank=0.5",
    "trainer.recompute=full",
    "rollout.engines=1",
    "rollout.gpus_per_engine=0.5",
    "rollout.gpu_memory_utilization=0.45",
]


def planned(config, hardware):
    facts = find(config.model.path)
    served = facts.checkpoint if facts.checkpoint in ("fp8", "int4") else "bf16"
    assumed = Assumed(hardware, facts.in_trainer("bf16"), served, Lengths(512, 512))
    return make(facts, config, assumed)


def rewards_of(config):
    """Every reward function of a run; none where a teacher takes its place."""
    every = [one.function for several in config.rewards().values() for one in several]
    functions = [one for one in every if one is not None]
    assert functions or config.algorithm.name == "opd"
    return functions


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits(path):
    config = recipes.resolve(recipes.load_config(str(path)))
    if not config.offline and not ENVIRONMENTS.find(config.environment.name).rewards_itself:
        for one in rewards_of(config):
            load_function(one)
    module = load_file(path)
    hardware = getattr(module, "hardware", Hardware(3))
    result = planned(config, hardware)
    assert result.problems == []
    if config.trainer.device != "cuda":
        return  # a tiny one, for a CPU
    mine, theirs, shared = result.gpus
    assert (mine if shared else mine + theirs) == hardware.gpus
    said = " ".join(module.__doc__.split())
    assert f"python recipes/{path.name}" in said and "Watch" in said.replace("watch", "Watch")
    assert (
        f"holds {result.heaviest.total / GIB:.0f} GiB of {hardware.spec.memory:g}"
        in said.replace("holds up to", "holds")
    )
    if result.engine is not None:
        room = f"room for {result.engine.sequences} sequences of {config.model.max_length:,}"
        assert room in said


def test_the_gallery_names_recipes_that_are_there_and_metrics_that_are_logged():
    page = (ROOT / "docs/gallery.md").read_text()
    table = page.partition("## The commands")[0]
    named = set(re.findall(r"\(\.\./recipes/(\w+\.py)\)", table))
    assert len(named) == 11 and named <= {path.name for path in RECIPES}
    commands = set(re.findall(r"python recipes/(\w+\.py)", page))
    assert named <= commands <= {path.name for path in RECIPES}
    metrics = set(re.findall(r"`([a-z]+/\w+(?:/\w+)?)`", table))
    assert len(metrics) > 10 and all(map(metric_table.find, metrics))


def test_what_is_right_code_passes_and_what_is_not_or_ends_early_does_not():
    path = ROOT / "recipes/code_30b.py"
    passes = load_function(f"{path}:passes")
    block = "It is\n```python\n{}\n```\n".format
    texts = [block("def f(n):\n    return 2 * n"), block("def f(n):\n    return n")]
    texts += [block("import sys\nsys.exit(0)"), "def f(n): return 2 * n", block("def f(")]
    logged = {}
    assert passes(texts, ["assert f(3) == 6"] * len(texts), logged.__setitem__) == [1, 0, 0, 0, 0]
    right, wrong, early, unmarked, broken = logged["errors"]
    assert right is None and "AssertionError" in wrong and "SyntaxError" in broken
    assert early == "[no output]" and unmarked.startswith("There is no block")


def test_rows_that_show_the_form_are_read_by_their_recipes():
    for name in ("code_30b", "judge_30b", "dpo_30b"):
        config = recipes.load_config(str(ROOT / f"recipes/{name}.py"))
        assert len(read_rows(config.data)) == 8


def test_moonlight_fits_one_gpu_and_eight():
    config = recipes.load_config(str(ROOT / "recipes/moonlight_16b_a3b.py"))
    assert planned(override(config, SHARED_GPU), Hardware(1, "h200")).problems == []
    eight = override(config, ["trainer.world_size=4", "trainer.ep=4", "rollout.engines=4"])
    assert planned(eight, Hardware(8)).problems == []


@pytest.mark.seconds
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_where_the_planner_prefers_another_layout_it_says_why(path):
    """By the command's own words. A proposal that is slower than the recipe's layout would be a
    search that overlooked it."""
    request = read([str(path)])
    own = make(request.facts, request.config, request.assumed)
    assert own.problems == []
    if request.config.offline:
        with pytest.raises(ConfigError, match=f"algorithm={request.config.algorithm.name} has no"):
            read([str(path), "--search"])
        return
    proposals = search_of(request).best(1)
    said = choice(own, proposals)
    if not proposals:  # it looks for no layouts in which trainer and engines hold experts once
        assert own.held and said.startswith("the search proposes nothing")
        return
    if proposals[0].config == own.config:
        assert said == "the layout given here is the fastest that was found"
        return
    best = proposals[0]
    assert best.seconds.step <= own.seconds.step - own.seconds.refit, said
    assert f"({best.seconds.step:,.0f} s a step for {own.seconds.step:,.0f}: rollout" in said
    assert f"holds {best.heaviest.total / GIB:,.2f} GiB on a trainer rank" in said
    for key in ("tp", "pp", "ep", "recompute"):
        differs = getattr(best.config.trainer, key) != getattr(own.config.trainer, key)
        assert (f"trainer.{key}" in said) == differs


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_settings_in_a_recipes_docstring_are_accepted(path):
    config = recipes.load_config(str(path))
    text = load_file(path).__doc__.replace("\\\n", " ")
    commands = re.findall(rf"python recipes/{path.name}(.*)", text)
    assert commands
    for command in commands:
        override(config, re.findall(r"[\w.]+=\S+", command))


def test_what_a_data_set_names_is_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "rows.py", "rewards.py"):
        (tmp_path / name).touch()
    settings = ["a.path=a.jsonl", "a.reward=rewards.py:f", "b.generator=rows.py:g", "c.path=org/d"]
    config = recipes.resolve(override(RunConfig(), [f"data.sets.{one}" for one in settings]))
    sets = config.data.sets
    assert sets["a"].path == f"{tmp_path}/a.jsonl" and sets["c"].path == "org/d"
    assert sets["a"].reward == f"{tmp_path}/rewards.py:f"
    assert sets["b"].generator == f"{tmp_path}/rows.py:g"
    with pytest.raises(ConfigError, match="there is no file .*gone.py"):
        recipes.resolve(override(RunConfig(), ["data.sets.a.reward=gone.py:f"]))


def test_a_run_directory_below_home_is_there(tmp_path, monkeypatch):
    """A shell leaves `key=~/x` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    config = recipes.resolve(override(RunConfig(), ["logging.run_dir=~/runs/a"]))
    assert config.run_dir == tmp_path / "runs/a"


def test_a_system_prompt_is_read_from_a_file_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "system.txt").write_bytes("Gib \u00fc aus.\nNur das.\r\n\n".encode())
    settings = ["data.system_prompt_file=system.txt", "data.path=a.jsonl"]
    config = recipes.resolve(override(RunConfig(), settings))
    assert config.data.system_prompt == "Gib \u00fc aus.\nNur das."
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "system.txt").write_text("something else")
    assert recipes.resolve(recipes.load_config(str(tmp_path / "config.yaml"))) == config
    of_set = ["data.sets.a.system_prompt_file=system.txt", "data.sets.b.path=b.jsonl"]
    sets = recipes.resolve(override(RunConfig(), of_set)).data.sets
    assert [one.system_prompt for one in sets.values()] == ["something else", None]


def test_a_chat_template_is_read_from_a_file_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}\n")
    config = recipes.resolve(override(RunConfig(), ["model.chat_template_file=mine.jinja"]))
    assert config.model.chat_template == "{{ messages[0].content }}"
    assert config.model.chat_template_file is None
    (tmp_path / "mine.jinja").unlink()
    assert recipes.resolve(config) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "data.sets.a.system_prompt_file=system.txt cannot be read (/"),
        (b" \n", "data.sets.a.system_prompt_file=system.txt is empty"),
        (b"\xff", "data.sets.a.system_prompt_file=system.txt is not UTF-8: byte 0"),
    ],
)
def test_a_system_prompt_that_cannot_be_read_is_refused(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "system.txt").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        config = override(RunConfig(), ["data.sets.a.system_prompt_file=system.txt"])
        recipes.resolve(config)
    assert message in str(caught.value)


def test_the_local_rows_have_answers_that_can_be_read():
    config = override(
        recipes.load_config(str(ROOT / "recipes/qwen3_30b_a3b.py")),
        [f"data.path={LOCAL}", "data.subset=null", "data.answer_key=answer"],
    )
    rows = read_rows(config.data)
    assert len(rows) == 30
    maker = PromptMaker(config.data.model_copy(update={"chat_template": False}), _Words(), 100)
    for made in maker.make_all(rows):
        assert parse_answer(made.columns["answer"]), made.columns


class _Words:
    """As many ids as words."""

    bos_token_id = eos_token_id = bos_token = eos_token = None

    def encode(self, text, **_):
        return list(range(len(text.split())))


def test_each_turn_of_the_tools_recipe_is_judged_by_what_was_said_before():
    reward = load_file(ROOT / "recipes/tiny_tools.py").reward
    said = [["81", "88", "95"], ["80", "87", "95"], ["81", "", "7"], ["81"], ["8 1"]]
    talks = [
        [
            {"role": role, "content": text}
            for turn in one
            for role, text in [("assistant", turn), ("user", "the tool")]
        ]
        for one in said
    ]
    thirds = [3 * value for value in reward(talks, ["81"] * len(said))]
    assert thirds == pytest.approx([3, 1, 1, 1, 0])
