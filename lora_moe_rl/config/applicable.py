"""Which options apply to which mode. One that does not is refused, not ignored.

An option counts as set when the user gave it a value other than the default (`section.is_set`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import NamedTuple

from lora_moe_rl.config import ModelConfig, RewardFunction, RunConfig, SourceConfig
from lora_moe_rl.config.eval_rules import check_evaluation
from lora_moe_rl.config.keys import value_of, value_text
from lora_moe_rl.config.offline import check_offline
from lora_moe_rl.config.plugins import ALGORITHMS, PARTS
from lora_moe_rl.config.reward import BASE, ENGINES
from lora_moe_rl.config.section import is_set
from lora_moe_rl.data.rows import is_hub
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.tiny.make import NAMES


def _is_hub_model(config: RunConfig) -> bool:
    path = config.model.path
    return path not in NAMES and not path.startswith(("/", ".", "~"))


class _Rule(NamedTuple):
    """`option` has an effect only when `applies`; `decider` is the setting that decides."""

    option: str
    applies: Callable[[RunConfig], bool]
    decider: str
    when: str


_RULES = [
    *(
        _Rule(key, lambda c: c.replay.mode == "r3", "replay.mode", "with replay.mode=r3")
        for key in (
            "replay.missing",
            "replay.audit",
            "replay.audit_samples",
            "replay.compare_every",
            "logging.routes",
        )
    ),
    _Rule(
        "logging.routes",
        lambda c: c.logging.tokens,
        "logging.tokens",
        "with logging.tokens=true, whose samples they are of",
    ),
    _Rule(
        "replay.audit_samples",
        lambda c: c.replay.audit > 0,
        "replay.audit",
        "with replay.audit > 0",
    ),
    _Rule(
        "trainer.min_lr",
        lambda c: c.trainer.lr_schedule != "constant",
        "trainer.lr_schedule",
        "to a schedule that falls",
    ),
    *(
        _Rule(option, lambda c: c.schedule.lag > 0, "schedule.lag", "with schedule.lag > 0")
        for option in ("mismatch.stop_above_old", "schedule.stale", "schedule.in_flight")
    ),
    _Rule(
        "schedule.continued",
        lambda c: c.schedule.in_flight == "continue",
        "schedule.in_flight",
        "with schedule.in_flight=continue",
    ),
    _Rule(
        "schedule.continued",
        lambda c: c.replay.mode == "r3",
        "replay.mode",
        "with replay.mode=r3, which has the routes of each version",
    ),
    *(
        _Rule(
            f"checkpoint.{key}",
            lambda c: c.checkpoint.keep_best > 0 or c.checkpoint.stop_after > 0,
            "checkpoint.keep_best",
            "with checkpoint.keep_best or checkpoint.stop_after above 0",
        )
        for key in ("best_metric", "best_is")
    ),
    *(
        _Rule(
            f"checkpoint.{key}",
            lambda c: c.checkpoint.push_to is not None,
            "checkpoint.push_to",
            "with checkpoint.push_to",
        )
        for key in ("push_retries", "push_timeout_s")
    ),
    _Rule(
        "model.held_dir",
        lambda c: c.model.held_once != "off",
        "model.held_once",
        "with model.held_once=auto or on",
    ),
    _Rule("model.revision", _is_hub_model, "model.path", "to a hub model"),
    *(
        _Rule(
            option,
            lambda c: c.refit.mode == "adapter",
            "refit.mode",
            "with refit.mode=adapter",
        )
        for option in ("refit.slots", "rollout.fully_sharded")
    ),
    *(
        _Rule(
            option,
            lambda c: c.refit.mode == "merged",
            "refit.mode",
            "with refit.mode=merged",
        )
        for option in ("refit.rounding", "refit.warn_lost", "refit.stop_lost")
    ),
    _Rule(
        "refit.directory",
        lambda c: c.refit.transport == "directory",
        "refit.transport",
        "with refit.transport=directory",
    ),
    _Rule(
        "placement.gives_back",
        lambda c: c.placement.colocated,
        "placement.mode",
        "with placement.mode=colocated",
    ),
    *(
        _Rule(
            option,
            lambda c: not c.placement.colocated,
            "placement.mode",
            "with placement.mode=split: colocated engines take the GPUs of the trainer's ranks",
        )
        for option in ("rollout.gpus_per_engine", "trainer.gpus_per_rank")
    ),
    _Rule(
        "rollout.ep",
        lambda c: c.rollout.ranks > 1,
        "rollout.tp",
        "with rollout.tp or rollout.dp above 1",
    ),
    _Rule(
        "rollout.fully_sharded",
        lambda c: c.rollout.tp > 1,
        "rollout.tp",
        "with rollout.tp above 1",
    ),
    _Rule(
        "trainer.max_copy_gib",
        lambda c: c.trainer.max_restarts > 0,
        "trainer.max_restarts",
        "with trainer.max_restarts above 0",
    ),
    _Rule(
        "trainer.gpus_per_rank", lambda c: c.trainer.device != "cpu", "trainer.device", "on cuda"
    ),
]


def check_applicable(config: RunConfig) -> None:
    """Raises ConfigError naming an option that has no effect, and the setting that makes it so."""
    if config.offline:
        check_offline(config)
    if config.data.sets:
        _check_sets(config)
    for source in config.sources().values():
        _check_source(source)
    check_evaluation(config)
    _check_template(config.model)
    _check_rewards(config)
    _check_lag(config)
    _check_colocated(config)
    _check_joining(config)
    _check_data_parallel(config)
    _check_profile(config)
    for rule in _RULES:
        path, _, name = rule.option.rpartition(".")
        if is_set(value_of(config, path), name) and not rule.applies(config):
            value = value_text(value_of(config, rule.option))
            decider = value_text(value_of(config, rule.decider))
            raise ConfigError(
                f"{rule.option}={value} has no effect with {rule.decider}={decider}: "
                f"it applies only {rule.when}"
            )


def _check_template(model: ModelConfig) -> None:
    if model.chat_template is not None and model.chat_template_file is not None:
        raise ConfigError(
            f"model.chat_template and model.chat_template_file={model.chat_template_file} are both "
            "set; set one of them to null"
        )


def _check_profile(config: RunConfig) -> None:
    steps, last = config.logging.profile, config.trainer.steps
    if steps and steps[-1] > last:
        raise ConfigError(
            f"logging.profile={value_text(steps)}: there is no step {steps[-1]} in a run of "
            f"trainer.steps={last}; name steps from 1 to {last}"
        )


def _check_lag(config: RunConfig) -> None:
    """What a run that samples ahead of its training needs."""
    lag, algorithm = config.schedule.lag, config.algorithm
    if not lag:
        return
    if not ALGORITHMS.find(algorithm.name).corrects(algorithm):
        raise ConfigError(
            f"schedule.lag={lag} trains on tokens of older versions, and algorithm="
            f"{algorithm.name} takes them for its own: set algorithm.correction (tis, icepop, mis, "
            "decoupled_seq_is, …, see docs/algorithms.md), or algorithm.anchor=rollout"
        )
    if config.refit.mode == "merged":
        raise ConfigError(
            f"schedule.lag={lag} needs versions beside each other, and refit.mode=merged has one "
            "at a time: use refit.mode=adapter, or lag=0"
        )
    if config.refit.slots < (slots := config.schedule.slots):
        raise ConfigError(
            f"schedule.lag={lag} with schedule.in_flight={config.schedule.in_flight} has samples "
            f"under way at up to {slots - 1} versions while the next is published: set "
            f"refit.slots={slots} or more (it is {config.refit.slots})"
        )


def _check_joining(config: RunConfig) -> None:
    """What engines cannot be that leave a run and join it."""
    if (least := config.rollout.least_engines) is None:
        return
    if config.refit.mode == "merged":
        raise ConfigError(
            f"rollout.least_engines={least} has engines join that are proven against the base they "
            "started with, and with refit.mode=merged they hold none any more: use "
            "refit.mode=adapter, or leave least_engines out"
        )
    if config.placement.colocated:
        raise ConfigError(
            f"rollout.least_engines={least} has engines join where there is room, and with "
            "placement.mode=colocated their place is the trainer's: use placement.mode=split, or "
            "leave least_engines out"
        )


def _check_data_parallel(config: RunConfig) -> None:
    """What a run whose engines spread experts over data-parallel ranks cannot have."""
    if (ranks := config.rollout.dp) == 1:
        return
    if config.refit.mode == "merged":
        raise ConfigError(
            f"rollout.dp={ranks} serves adapters in slots alone, and refit.mode=merged changes the "
            f"weights: use refit.mode=adapter, or rollout.tp={ranks} with rollout.dp=1"
        )
    if config.placement.colocated:
        raise ConfigError(
            f"rollout.dp={ranks} has ranks that wait for each other in every step, and with "
            "placement.mode=colocated engines give memory back between steps, which these do not "
            f"yet: use placement.mode=split, or rollout.tp={ranks} with rollout.dp=1"
        )


def _check_colocated(config: RunConfig) -> None:
    """What a run whose trainer and engines take turns cannot have."""
    if not config.placement.colocated:
        return
    if lag := config.schedule.lag:
        raise ConfigError(
            f"schedule.lag={lag} samples while the trainer updates, and with placement.mode="
            "colocated they take turns on the same devices: use schedule.lag=0, or placement.mode="
            "split"
        )
    if config.placement.gives_back == "weights" and config.model.held_once != "off":
        raise ConfigError(
            f"placement.gives_back=weights moves the engines' base to the host, and with "
            f"model.held_once={config.model.held_once} it is the trainer's base too, which is at "
            "work meanwhile: use placement.gives_back=cache, or model.held_once=off"
        )


def _check_sets(config: RunConfig) -> None:
    """What stands beside data.sets, and would be ignored."""
    data = config.data
    first = next(iter(data.sets))
    for name in SourceConfig.model_fields:
        if is_set(data, name):
            raise ConfigError(
                f"data.{name}={value_text(getattr(data, name))} has no effect with data.sets, each "
                f"of which has its own: set data.sets.{first}.{name}, and leave data.{name} out or "
                f"set it to {value_text(SourceConfig.model_fields[name].default)}"
            )
    sets = (*data.sets.values(), *config.eval.sets.values())
    if config.reward.function is not None and all(one.reward for one in sets):
        raise ConfigError(
            f"reward.function={config.reward.function} has no effect: every set of data.sets has "
            "a reward of its own; set it to null"
        )


def _check_rewards(config: RunConfig) -> None:
    """Reward functions: which there are, who uses them, and what an advantage wants of them."""
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


def _check_source(source: SourceConfig) -> None:
    """One data set."""
    path, generator = source.key("path"), source.key("generator")
    if source.path is not None and source.generator is not None:
        raise ConfigError(
            f"{path}={source.path} and {generator}={source.generator} are both set; prompts come "
            f"from one of them: set the other to null"
        )
    for column, (least, most) in source.filter.items():
        low, high = (-math.inf if least is None else least), (math.inf if most is None else most)
        if low > high or (least is None and most is None):
            fault = "lets no row through" if low > high else "has no bound"
            raise ConfigError(
                f"{source.key('filter')}={value_text(source.filter)}: {column} {fault}; write "
                "[least, most], with null for no bound"
            )
    if source.generator is not None and is_set(source, "order"):
        raise ConfigError(
            f"{source.key('order')}={source.order} has no effect with {generator}="
            f"{source.generator}, whose rows come as it gives them"
        )
    if source.args and source.generator is None:
        raise ConfigError(
            f"{source.key('args')}={value_text(source.args)} has no effect with {generator}=null: "
            "they are the arguments of a generator"
        )
    if source.system_prompt is not None and source.system_prompt_file is not None:
        raise ConfigError(
            f"{source.key('system_prompt')} and {source.key('system_prompt_file')}="
            f"{source.system_prompt_file} are both set; set one of them to null"
        )
    for name in ("split", "subset"):
        if is_set(source, name) and not (source.path is not None and is_hub(source.path)):
            raise ConfigError(
                f"{source.key(name)}={getattr(source, name)} has no effect with "
                f"{path}={value_text(source.path)}: it applies only to a hub data set"
            )
