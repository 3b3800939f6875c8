"""What an evaluation needs of the rest of a config, and what would be ignored."""

from __future__ import annotations

from lora_moe_rl.config import RunConfig, SourceConfig
from lora_moe_rl.config.evaluation import EVAL, EvalConfig, EvalSetConfig
from lora_moe_rl.config.keys import value_text
from lora_moe_rl.config.plugins import ENVIRONMENTS
from lora_moe_rl.config.section import is_set
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry.metric_table import largest_is_best


def check_evaluation(config: RunConfig) -> None:
    """Raises ConfigError that names the key and the way out."""
    _check_best(config)
    if not config.eval.sets:
        _check_nothing_set(config.eval)
        return
    for source in config.eval.sources().values():
        _check_set(source)
        _check_length(config, source)
    lag, ahead, slots = config.schedule.lag, config.schedule.slots, config.refit.slots
    if lag and slots <= ahead:
        raise ConfigError(
            f"eval.sets with schedule.lag={lag}: a version that is evaluated keeps a slot of its "
            f"own beside the {ahead} of sampling ahead; set refit.slots={ahead + 1} or more (it is "
            f"{slots}), or schedule.lag=0, where training waits for evaluations"
        )


def _check_best(config: RunConfig) -> None:
    """Of a best metric: that it is told which value is the best. Of one that evaluations log: that
    there are some, and for stop_after several."""
    settings, sets = config.checkpoint, config.eval.sets
    if settings.keep_best or settings.stop_after:
        largest_is_best(settings)
    if not settings.best_of_evaluations:
        return
    name = settings.best_metric or ""
    if not any(name.startswith(f"{EVAL}{one}/") for one in sets):
        known = ", ".join(sets) or "none"
        raise ConfigError(
            f"checkpoint.best_metric={name} is of no set of eval.sets ({known}): name one of them, "
            f"as {EVAL}{next(iter(sets), 'NAME')}/avg, or take a metric of steps, as reward/mean"
        )
    if settings.stop_after and not config.eval.every:
        raise ConfigError(
            f"checkpoint.stop_after={settings.stop_after} looks at {name} at every evaluation, and "
            "eval.every=0 evaluates before the first step and at the end alone: set it above 0"
        )


def _check_nothing_set(given: EvalConfig) -> None:
    for name in EvalConfig.model_fields:
        value = getattr(given, name)
        if value != EvalConfig.model_fields[name].default:
            raise ConfigError(
                f"eval.{name}={value_text(value)} has no effect without eval.sets: name held-out "
                "data, as eval.sets.NAME.path=FILE"
            )


def _check_length(config: RunConfig, one: EvalSetConfig) -> None:
    """A longest response of the set's own: that it leaves room for prompts, and is kept to."""
    if one.max_response_tokens is None:
        return
    given = f"{one.key('max_response_tokens')}={one.max_response_tokens}"
    if one.max_response_tokens >= config.model.max_length:
        raise ConfigError(
            f"{given} leaves no room for a prompt within model.max_length="
            f"{config.model.max_length}, which bounds what engines take; raise model.max_length, "
            "or lower it"
        )
    environment = config.environment.name
    if not ENVIRONMENTS.find(environment).bounds_sets:
        raise ConfigError(
            f"{given} has no effect with environment={environment}, which gives all samples "
            "rollout.max_response_tokens; leave it out"
        )


def prompt_room(config: RunConfig, source: SourceConfig) -> int:
    """Most tokens that a prompt of a data set may have: what its responses leave; with its own
    answer, where nothing is sampled."""
    own = source.max_response_tokens if isinstance(source, EvalSetConfig) else None
    if config.offline:
        return config.model.max_length
    return config.max_prompt_tokens if own is None else config.model.max_length - own


def _check_set(one: EvalSetConfig) -> None:
    key = one.key
    if one.generator is not None and one.limit is None:
        raise ConfigError(
            f"{key('generator')}={one.generator} may never end: set {key('limit')} to the number "
            "of its rows that are asked"
        )
    for k in one.pass_at:
        if not 1 <= k <= one.samples:
            raise ConfigError(
                f"{key('pass_at')}={value_text(one.pass_at)}: pass@{k} needs a k from 1 to "
                f"{key('samples')}={one.samples}; take more samples, or leave {k} out"
            )
    if one.temperature == 0 and one.samples > 1:
        raise ConfigError(
            f"{key('temperature')}=0 takes the likeliest token each time, and "
            f"{key('samples')}={one.samples} would all be the same: set one of them to "
            "another value"
        )
    for name in ("top_p", "top_k"):
        if one.temperature == 0 and is_set(one, name):
            raise ConfigError(
                f"{key(name)}={value_text(getattr(one, name))} has no effect with "
                f"{key('temperature')}=0, which takes the likeliest token; leave one of them out"
            )
    if one.answer is not None and one.samples < 3:
        raise ConfigError(
            f"{key('answer')}={one.answer} is for maj@k, and {key('samples')}={one.samples} make "
            "no majority: take 3 samples or more, or set it to null"
        )
