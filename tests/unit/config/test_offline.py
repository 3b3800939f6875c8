"""A config whose algorithm learns from the rows' own answers: what is refused, and saved."""

from __future__ import annotations

import pickle

import pytest
import yaml

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.offline import SAMPLING
from lora_moe_rl.config.overrides import override, with_settings
from lora_moe_rl.errors import ConfigError


def sft(*settings: str) -> RunConfig:
    return override(RunConfig(), ["algorithm=sft", *settings])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("replay.mode=r3", "replay.mode=r3 replays routes, and algorithm=sft has none"),
        ("replay.mode=r2", "replay.mode=r2 replays routes, and algorithm=sft has none"),
        ("replay.audit=3", "replay.audit=3 has no effect with algorithm=sft"),
        ("rollout.engines=2", "rollout.engines=2 has no effect with algorithm=sft"),
        ("rollout.temperature=0.7", "rollout.temperature=0.7 has no effect with algorithm=sft"),
        ("rollout.max_response_tokens=99", "rollout.max_response_tokens=99 has no effect"),
        ("refit.slots=3", "refit.slots=3 has no effect with algorithm=sft"),
        ("schedule.lag=1", "schedule.lag=1 has no effect with algorithm=sft"),
        ("mismatch.stop_above=1", "mismatch.stop_above=1.0 has no effect with algorithm=sft"),
        ("reward.function=m:f", "reward.function=m:f has no effect with algorithm=sft"),
        ("algorithm.draw_again=2", "algorithm.draw_again=2 has no effect with algorithm=sft"),
        ("algorithm.mask_truncated=true", "algorithm.mask_truncated=true has no effect"),
        ("data.sets.a.reward=m:f", "data.sets.a.reward=m:f has no effect with algorithm=sft"),
        ("algorithm.clip_low=0.1", "algorithm.clip_low=0.1 is no setting of algorithm.name=sft"),
    ],
)
def test_what_has_no_effect_is_refused_and_names_both_sides(setting, message):
    with pytest.raises(ConfigError, match=message):
        sft(setting)


HELD = "eval.sets.held.path=held.jsonl"


def test_held_out_rows_are_judged_by_their_own_answers():
    config = sft(HELD, "eval.every=2", "eval.sets.held.group_by=kind", "eval.sets.held.limit=9")
    assert config.eval.is_due(2, 5) and not config.eval.is_due(3, 5)
    best = ("checkpoint.best_metric=eval/held/nll", "checkpoint.best_is=smallest")
    assert sft(HELD, "eval.every=2", *best, "checkpoint.keep_best=1").checkpoint.best_of_evaluations


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([HELD, "eval.sets.held.samples=4"], "eval.sets.held.samples=4 has no effect with algo"),
        ([HELD, "eval.sets.held.temperature=0"], "eval.sets.held.temperature=0.0 has no effect"),
        ([HELD, "eval.sets.held.reward=m:f"], "judged by their own answers"),
        ([HELD, "eval.prompts_at_once=4"], "lora-moe-rl eval RECIPE adapter.init_from=RUN"),
        (["algorithm=dpo", HELD, "eval.sets.held.answer_key=a"], "answer_key=a has no effect with"),
        (["eval.every=3"], "eval.every=3 has no effect without eval.sets"),
    ],
)
def test_what_says_how_to_sample_them_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        sft(*settings)


def test_an_algorithm_that_tells_nothing_of_them_is_named(tmp_path):
    (tmp_path / "own.py").write_text(
        "from lora_moe_rl.algorithms.base import Algorithm\n\n\n"
        "class Own(Algorithm):\n    learns_from = 'answers'\n"
    )
    own = f"algorithm={tmp_path}/own.py:Own"
    with pytest.raises(ConfigError, match="eval.sets has no effect.*Own writes no `held_out`"):
        override(RunConfig(), [own, "algorithm.group_size=1", HELD])


def test_the_columns_of_pairs_have_fixed_names():
    with pytest.raises(ConfigError, match="data.answer_key=a has no effect with algorithm=dpo"):
        override(RunConfig(), ["algorithm=dpo", "data.answer_key=a"])
    assert sft("data.answer_key=a").data.answer_key == "a"


def test_routers_choose_freely_and_that_does_not_stay_when_the_algorithm_changes():
    config = sft()
    assert config.offline and config.replay.mode == "off" and config.num_engines == 0
    assert sft("replay.mode=off").replay.mode == "off"
    assert pickle.loads(pickle.dumps(config)).replay.mode == "off"
    for again in (override(config, ["trainer.steps=3"]), override(config, [])):
        assert again.replay.mode == "off"
    rl = override(config, ["algorithm=grpo"])
    assert rl.replay.mode == "r3" and not rl.offline and rl.num_engines == 1


def test_the_saved_config_runs_again_and_has_nothing_of_engines(tmp_path):
    config = sft("trainer.lr=0.003", "model.max_length=8")
    saved = yaml.safe_load(to_yaml(config))
    assert not set(SAMPLING) & saved.keys() and saved["algorithm"]["group_size"] == 1
    assert with_settings(RunConfig(), saved) == config
    rl = saved | {"algorithm": {"name": "grpo"}, "model": {"max_length": 64}}
    assert with_settings(RunConfig(), rl).replay.mode == "r3"
    assert set(SAMPLING) <= yaml.safe_load(to_yaml(RunConfig())).keys()


def test_an_answer_may_be_as_long_as_the_model_goes():
    assert sft("model.max_length=8").max_response_tokens == 7
    assert RunConfig().max_response_tokens == RunConfig().rollout.max_response_tokens
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        override(RunConfig(), ["model.max_length=8"])


ROLLOUTS = {
    "rollout": {"engines": 2, "temperature": 0.7},
    "reward": {"function": "m:f"},
    "refit": {"slots": 3},
    "algorithm": {"name": "grpo", "group_size": 8, "prompts_per_step": 32, "draw_again": 2},
    "model": {"max_length": 64},
    "data": {"sets": {"a": {"path": "a.jsonl", "reward": "m:f", "limit": 9}}},
    "eval": {"prompts_at_once": 7, "sets": {"held": {"path": "h.jsonl", "samples": 4, "limit": 3}}},
}


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_chosen_over_a_recipe_of_rollouts_it_has_nothing_of_them(name):
    recipe = with_settings(RunConfig(), ROLLOUTS)
    config = override(recipe, [f"algorithm={name}", "trainer.steps=3"])
    assert config.algorithm.prompts_per_step == 32 and config.model.max_length == 64
    assert config.data.sets["a"].limit == 9 and config.eval.sets["held"].limit == 3
    assert not set(SAMPLING) & yaml.safe_load(to_yaml(config)).keys()
    bare = with_settings(RunConfig(), {"rollout": {"engines": 2}})
    assert override(bare, [f"algorithm={name}"]).num_engines == 0


def test_what_the_command_line_sets_beside_it_is_an_error_wherever_it_stands():
    recipe = with_settings(RunConfig(), ROLLOUTS)
    for settings in (
        ["algorithm=sft", "rollout.engines=3"],
        ["rollout.engines=3", "algorithm=sft"],
    ):
        with pytest.raises(ConfigError, match="^rollout.engines=3 has no effect"):
            override(recipe, settings)
    with pytest.raises(ConfigError, match="eval.sets.held.samples=2 has no effect"):
        override(recipe, ["eval.sets.held.samples=2", "algorithm=sft"])


def test_all_that_has_no_effect_is_named_at_once():
    all_of_them = (
        "rollout.engines=2, refit.slots=3, model.held_once=auto have no effect .* them out"
    )
    with pytest.raises(ConfigError, match=all_of_them):
        sft("refit.slots=3", "rollout.engines=2", "model.held_once=auto")
    written = {
        "algorithm": {"name": "sft"},
        "rollout": {"engines": 2},
        "reward": {"max_failed": 0.3},
    }
    with pytest.raises(ConfigError, match="rollout.engines=2, reward.max_failed=0.3 have no"):
        override(with_settings(RunConfig(), written), ["trainer.steps=3"])


OWN = """
from lora_moe_rl.algorithms.sft import SFT

class Mine(SFT):
    pass
"""


def test_an_algorithm_of_ones_own_says_so_too(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    config = override(RunConfig(), [f"algorithm={tmp_path}/own.py:Mine"])
    assert config.learns_from == "answers" and config.replay.mode == "off"
