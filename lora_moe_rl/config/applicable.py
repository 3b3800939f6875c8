"""Which options apply to which mode. One that does not is refused, not ignored.

An option counts as set when the user gave it a value other than the default (`section.is_set`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lora_moe_rl.config import ModelConfig, RunConfig
from lora_moe_rl.config.data_rules import check_data
from lora_moe_rl.config.eval_rules import check_evaluation
from lora_moe_rl.config.keys import value_of, value_text
from lora_moe_rl.config.offline import check_offline
from lora_moe_rl.config.plugins import ALGORITHMS
from lora_moe_rl.config.reference import against_start
from lora_moe_rl.config.reward_rules import check_rewards
from lora_moe_rl.config.section import is_set
from lora_moe_rl.config.trainer import check_context, check_gloo, has_transformer_engine
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
    check_data(config)
    check_evaluation(config)
    _check_template(config.model)
    check_rewards(config)
    _check_reference(config)
    _check_lag(config)
    _check_stop(config)
    _check_greedy(config)
    _check_colocated(config)
    _check_cuda_ipc(config)
    if config.trainer.device == "cpu":
        check_gloo(config.trainer)
    else:
        check_context(config.trainer, has_transformer_engine())
    _check_joining(config)
    _check_data_parallel(config)
    _check_profile(config)
    _check_overlong(config)
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


def _check_overlong(config: RunConfig) -> None:
    """Rewards sink over a buffer that has to lie within the longest response."""
    buffer, longest = value_of(config, "algorithm.overlong_buffer", 0), config.max_response_tokens
    if buffer > longest:
        raise ConfigError(
            f"algorithm.overlong_buffer={buffer} is more than rollout.max_response_tokens="
            f"{longest}, so that every response would lose by it, an empty one too: set it to "
            f"{longest} or less"
        )


def _check_reference(config: RunConfig) -> None:
    """A start to measure against: a fresh adapter does nothing."""
    if against_start(config) and config.adapter.init_from is None:
        raise ConfigError(
            "algorithm.reference=start measures the policy against the adapter that the run starts "
            "from, and without adapter.init_from it starts as the base: set adapter.init_from, or "
            "leave algorithm.reference at base, which is the same"
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
            "decoupled_seq_is, …, see docs/algorithms.md), or algorithm.anchor=rollout with a loss "
            "that has a ratio"
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


def _check_stop(config: RunConfig) -> None:
    """Where a text that ends a response would not be seen."""
    if config.rollout.stop and config.schedule.in_flight == "continue":
        raise ConfigError(
            f"rollout.stop={value_text(config.rollout.stop)} with schedule.in_flight=continue: a "
            "text that begins under one version and ends under the next would end nothing; use "
            "in_flight=finish, or rollout.stop_token_ids"
        )


def _check_greedy(config: RunConfig) -> None:
    """A greedy sample stays on the version that its prompt began with, to its end."""
    algorithm = ALGORITHMS.find(config.algorithm.name)
    made = algorithm(config.algorithm, config.max_response_tokens)
    if made.greedy_baseline and config.schedule.in_flight == "continue":
        raise ConfigError(
            f"algorithm={config.algorithm.name}, as it is set, compares samples with a greedy one "
            "of the version that sampled them, and schedule.in_flight=continue goes on with them "
            "under newer ones, while that version leaves its slot; use in_flight=finish"
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


def _check_cuda_ipc(config: RunConfig) -> None:
    if config.refit.transport == "cuda_ipc" and config.trainer.device == "cpu":
        raise ConfigError(
            "refit.transport=cuda_ipc keeps a version in the memory of the trainer's GPU, and "
            "trainer.device=cpu: use trainer.device=auto, or refit.transport=auto"
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
    if (nodes := config.rollout.nodes) > 1:
        raise ConfigError(
            f"rollout.nodes={nodes} spreads an engine over nodes, and with placement.mode="
            "colocated its ranks stand beside the trainer's, on one: use rollout.nodes=1, or "
            "placement.mode=split"
        )
    if config.placement.gives_back == "weights" and config.model.held_once != "off":
        raise ConfigError(
            f"placement.gives_back=weights moves the engines' base to the host, and with "
            f"model.held_once={config.model.held_once} it is the trainer's base too, which is at "
            "work meanwhile: use placement.gives_back=cache, or model.held_once=off"
        )
