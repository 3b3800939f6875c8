"""The table of metrics: everything that is logged stands in it, and nothing else does."""

import ast
import re
from pathlib import Path

import pytest

from lora_moe_rl.algorithms.parts import kl
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.plugins import ALGORITHMS, PARTS
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry import metric_table, names
from lora_moe_rl.telemetry.metric_table import Checked, find, named, table

ROOT = Path(__file__).parents[3]
ROOMS = {name.partition("/")[0] for name in table()}


def test_the_page_is_made_from_the_table():
    assert (ROOT / "docs/metrics.md").read_text() == metric_table.page()


def test_rows_are_whole_and_there_once():
    assert len(table()) == len(metric_table.ROWS)
    for metric in table().values():
        assert metric.better in ("up", "down", "") and metric.meaning
        assert not re.search(r"[|\n]", "".join((metric.name, metric.unit, metric.meaning)))


@pytest.mark.parametrize(
    ("logged", "row"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/math/mean", "reward/<name>/mean"),
        ("reward/format/tags", "reward/<metric>"),
        ("replay/disagreement/layer_07", "replay/disagreement/layer_<layer>"),
        ("mismatch/kl_age_3", "mismatch/kl_age_<age>"),
        ("mismatch/without_replay/kl", "mismatch/without_replay/<what>"),
        ("eval/aime/pass@16", "eval/<set>/pass@<k>"),
        ("eval/aime/year=2024/avg", "eval/<set>/avg"),
        ("eval/aime/pass@16_ci95", "eval/<set>/pass@<k>_ci95"),
        ("environment/tool_calls", "environment/<what>"),
        ("mismatch/kl_age_old", None),
        ("mismatch/kl2", None),
        ("replay/disagreement/layer_", None),
        ("time/rolout", None),
    ],
)
def test_a_logged_name_finds_its_row(logged, row):
    found = find(logged)
    assert (found.name if found else None) == row


def literals() -> dict[str, str]:
    """Texts of the sources that look like a metric, each with a file that has it; pieces of
    formatted texts are left out."""
    looks = re.compile(rf"(?:{'|'.join(sorted(ROOMS))})/[a-z][\w/@]*")
    found = {}
    folders = ("run", "trainer", "telemetry", "algorithms", "evaluation")
    for file in [f for one in folders for f in sorted((ROOT / "lora_moe_rl" / one).rglob("*.py"))]:
        if file.name in ("metric_rows.py", "metric_table.py"):
            continue
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        pieces = {
            id(part) for one in nodes if isinstance(one, ast.JoinedStr) for part in one.values
        }
        for node in nodes:
            value = getattr(node, "value", None)
            if not isinstance(node, ast.Constant) or id(node) in pieces:
                continue
            if isinstance(value, str) and looks.fullmatch(value):
                found[value] = str(file)
    return found


def test_every_metric_that_the_sources_name_has_a_row_of_its_own():
    """A name that only a pattern for users' own metrics would take is a slip of the pen."""
    users = {"reward/<metric>", "loss/<own>", "environment/<what>"}
    found = literals()
    assert len(found) > 60
    without = {
        name: file
        for name, file in found.items()
        if name not in INNER and (not (row := find(name)) or row.name in users)
    }
    assert not without


# A sum of the trainer's meter, and a prefix: nothing that is logged as it stands.
INNER = {"critic/tokens", "mismatch/without_replay"}


def test_what_names_py_makes_has_a_row():
    made = [
        names.of_set("math", "groups"),
        names.of_function("format", "failed"),
        names.of_environment("turns"),
        names.kl_of_age(2),
        *(names.time(stage) for stage in names.STAGES),
    ]
    assert [name for name in made if find(name) is None] == []
    constants = [v for k, v in vars(names).items() if k.isupper() and "/" in str(v)]
    assert len(constants) > 30 and [name for name in constants if name not in table()] == []


def test_what_algorithms_and_their_parts_declare_has_a_row():
    declared = set()
    for kind in (ALGORITHMS, PARTS["loss"], PARTS["correction"]):
        for name in kind.names():
            declared |= set(kind.find(name).metrics)
    assert {"ratio", "nll", "gate", "weight"} <= declared
    assert [name for name in declared if f"loss/{name}" not in table()] == []
    assert [n for n in (*kl.MISMATCH, *kl.OF_SAMPLES) if f"mismatch/{n}" not in table()] == []


def test_a_metric_without_a_row_is_refused_by_name():
    checked = Checked(RunConfig())
    checked.check(["reward/mean", "loss/ratio", "reward/brevity"])
    for name in ("loss/ration", "speed"):
        with pytest.raises(ValueError, match=f"the metric '{name}' has no row"):
            checked.check(["reward/mean", name])


def test_an_algorithm_of_ones_own_may_log_its_own_loss_metrics_and_no_others(tmp_path):
    (tmp_path / "my.py").write_text(
        "from lora_moe_rl.algorithms.losses.ppo_clip import PPOClip\n"
        "class Mine(PPOClip):\n    pass\n"
    )
    checked = Checked(RunConfig(algorithm={"loss": f"{tmp_path}/my.py:Mine"}))
    checked.check(["loss/surprise"])
    with pytest.raises(ValueError, match="'speed' has no row"):
        checked.check(["speed"])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("critic/score/mean", "reward/mean"),
        ("reward", "reward/mean"),
        ("completions/mean_length", "rollout/response_length"),
        ("perf/time_per_step", "time/step"),
        ("rollout_corr/k3_kl", "mismatch/kl"),
        ("time/train", "time/train"),
    ],
)
def test_names_of_verl_and_trl_lead_to_ours(theirs, ours):
    assert named(theirs, [*table()]) == ours


LOGGED = ("eval/ho/avg", "eval/ho/pass@4", "eval/a/avg", "loss/nll", "loss/clipped_low")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("val-core/ho/reward/mean@1", "eval/ho/avg"),
        ("val-core/ho/acc/best@4/mean", "eval/ho/pass@4"),
        ("loss", "loss/nll"),
    ],
)
def test_names_of_sets_and_trainers_are_filled_in(theirs, ours):
    assert named(theirs, LOGGED) == ours


@pytest.mark.parametrize(
    ("theirs", "near"),
    [
        ("eval_reward", "eval/ho/avg or eval/a/avg"),  # which of them
        ("actor/pg_clipfrac", "loss/clipped_low"),  # a part of it alone
        ("val-core/ho/acc/best@8/mean", ""),
    ],
)
def test_a_name_that_is_not_quite_one_of_ours_is_an_error_that_names_it(theirs, near):
    with pytest.raises(ConfigError, match=f"no run has logged the metric.*{near}"):
        named(theirs, LOGGED)


def test_a_name_that_no_run_has_logged_is_an_error_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean reward/mean"):
        named("rewards/mean", ["reward/mean", "time/step"])
    with pytest.raises(ConfigError, match="no run has logged the metric 'reward_std'"):
        named("reward_std", ["time/step"])
