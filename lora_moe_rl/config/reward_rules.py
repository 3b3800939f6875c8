"""Reward functions: which there are, who uses them, and what an advantage wants of them."""

from __future__ import annotations

import difflib

from lora_moe_rl.config import RewardFunction, RunConfig
from lora_moe_rl.config.keys import value_of, value_text
from lora_moe_rl.config.plugins import ENVIRONMENTS, PARTS
from lora_moe_rl.config.reward import BASE, ENGINES
from lora_moe_rl.config.section import is_set
from lora_moe_rl.errors import ConfigError


def check_rewards(config: RunConfig) -> None:
    """Raises ConfigError that names the key and the way out."""
    reward, several = config.reward, config.reward.functions
    if reward.function is not None and several:
        raise ConfigError(
            f"reward.function={reward.function} has no effect beside reward.functions "
            f"({', '.join(several)}); make it one of them, or set it to null"
        )
    if reward.args and reward.function is None:
        raise ConfigError(
            f"reward.args={value_text(reward.args)} has no effect with reward.function=null: they "
            "are its arguments; those of one of several stand in reward.functions.NAME.args"
        )
    for name, what in (
        ("workers", "they are the processes that call it"),
        ("timeout_s", "it bounds its calls"),
    ):
        if is_set(reward, name) and not _any_function(config):
            raise ConfigError(
                f"reward.{name}={getattr(reward, name):g} has no effect without a reward function: "
                f"{what}; leave it out"
            )
    if both := several.keys() & config.data.sets.keys():
        raise ConfigError(
            f"{' and '.join(sorted(both))} is a name in data.sets and in reward.functions, and "
            "metrics are named by both (reward/NAME/mean); give one of them another name"
        )
    for name, one in config.data.sets.items():
        _check_set_reward(config, f"data.sets.{name}.reward", one.reward)
    for name, one in config.eval.sets.items():
        _check_set_reward(config, f"eval.sets.{name}.reward", one.reward)
    rewards = [*config.rewards().values(), *config.eval_rewards().values()]
    used = {one.name for functions in rewards for one in functions}
    if unused := several.keys() - used:
        raise ConfigError(
            f"reward.functions.{sorted(unused)[0]} has no effect: every set of data.sets has a "
            "reward of its own, and none names it; take it away (null), or name it there"
        )
    for functions in rewards:
        _check_weights(functions)
        for one in functions:
            if one.asks_engines:
                _check_asks_engines(config, one)
    for functions in config.rewards().values():
        _check_separate(config, functions)
    _check_turns(config)


def _any_function(config: RunConfig) -> bool:
    rewards = [*config.rewards().values(), *config.eval_rewards().values()]
    return any(one.function for functions in rewards for one in functions)


def _check_asks_engines(config: RunConfig, one: RewardFunction) -> None:
    """A function that asks the frozen base on the run's own engines."""
    args = f"{one.key.removesuffix('function')}args"
    if config.refit.mode == "merged":
        raise ConfigError(
            f"{args}.url={ENGINES} asks the frozen base, and with refit.mode=merged the engines "
            "hold other weights; serve the judge elsewhere and give its url, or take "
            "refit.mode=adapter"
        )
    if one.args.get("model", BASE) != BASE:
        raise ConfigError(
            f"{args}.model={value_text(one.args['model'])}: with {args}.url={ENGINES} there is one "
            f"model, {BASE}"
        )
    if one.args.get("cache") is not None:
        raise ConfigError(
            f"{args}.cache={one.args['cache']} has no effect with {args}.url={ENGINES}: judgements "
            "are kept by the judge's address, which is another in each run"
        )


def _check_set_reward(config: RunConfig, key: str, reward: str | None) -> None:
    """The reward of one of several data sets, or of an eval set, which is under `key`."""
    if reward is None or ":" in reward:
        return
    several = config.reward.functions
    names = [name.strip() for name in reward.split(",")]
    for name in names:
        if name not in several:
            near = difflib.get_close_matches(name, several, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            known = ", ".join(several) or "of which there are none"
            raise ConfigError(
                f"{key}={reward}: {name!r} is not of the form "
                f"module:function or file.py:function, nor one of reward.functions, {known}{hint}"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}={reward} names a function twice")


def _check_weights(functions: list[RewardFunction]) -> None:
    """The functions that score the same prompts."""
    if not any(one.weight for one in functions):
        raise ConfigError(
            f"reward.functions {', '.join(one.name for one in functions)} have weight=0, and with "
            "no other beside them their prompts would have no reward; give one of them a weight"
        )


def _check_separate(config: RunConfig, functions: list[RewardFunction]) -> None:
    """What an advantage wants of the functions that score the same training prompts."""
    advantage = value_of(config, "algorithm.advantage")
    if advantage is None or not PARTS["advantage"].find(advantage).separates_rewards:
        return
    if sum(one.weight != 0 for one in functions) < 2:
        raise ConfigError(
            f"algorithm.advantage={advantage} normalizes each of several reward functions by "
            f"itself, and {functions[0].key} is alone with a weight; set more of them in "
            "reward.functions, or take advantage=grpo"
        )


def _check_turns(config: RunConfig) -> None:
    """An advantage that compares turns: that there may be several."""
    advantage, environment = value_of(config, "algorithm.advantage"), config.environment.name
    if advantage is None or not PARTS["advantage"].find(advantage).compares_turns:
        return
    if ENVIRONMENTS.find(environment).one_turn:
        raise ConfigError(
            f"algorithm.advantage={advantage} compares the turns of conversations, and with "
            f"environment={environment} every sample is one turn; take advantage=grpo, or an "
            "environment of several turns (tools, trl, external)"
        )
