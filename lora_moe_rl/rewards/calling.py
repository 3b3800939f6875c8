"""A user's reward function as a worker calls it: which keywords it gets, what it may return."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import struct
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lora_moe_rl.calls.child import raised, short
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import load_function
from lora_moe_rl.files.texts import encodable
from lora_moe_rl.rewards import verl_style
from lora_moe_rl.telemetry import names as metrics

if TYPE_CHECKING:
    from lora_moe_rl.data.scores import Played  # which imports numpy

Outcome = list[float | str | None]  # a reward, None: not applicable, or why there is none

SAMPLES = (
    "prompts", "completions", "completion_ids", "environments", "trainer_state", "log_extra",
    "log_metric", "log_turn_rewards",
)  # fmt: skip
# What a run itself puts under reward/: a function may not log another number by such a name.
_OWN = (
    *(metrics.REWARD, metrics.REWARD_STD, metrics.REWARDS_NONE, metrics.REWARDS_FAILED),
    *(metrics.SOLVED_ALL, metrics.SOLVED_NONE, metrics.BASELINE, metrics.BY_TURN),
    *(metrics.BEFORE_LAST_TURN, metrics.TURNS_ALONE, metrics.TURNS_ALIKE),
)
TAKEN = {"groups", *(name.removeprefix("reward/") for name in _OWN)}


@dataclass(frozen=True)
class TrainerState:
    """What TRL's `trainer_state` says here. global_step: optimizer steps that the adapter had seen
    which sampled the completions. max_steps: those of the whole run."""

    global_step: int
    max_steps: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has global_step and max_steps here, and no {name}")


@dataclass
class Logged:
    """What one call logs: TRL's `log_extra` and `log_metric` are methods of it, and
    `log_turn_rewards`, which TRL has not."""

    num_samples: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    turns: list[list[float] | None] = field(default_factory=list)

    def extra(self, column: str, values: list[Any]) -> None:
        """A column of samples.jsonl, a value a sample. What JSON does not know is written as its
        repr, half of a surrogate pair as ?. Raises ValueError for another number of values."""
        values = list(values)
        if len(values) != self.num_samples:
            raise ValueError(
                f"log_extra({column!r}) got {len(values)} values for {self.num_samples} samples"
            )
        written = encodable(json.dumps(values, default=repr, ensure_ascii=False))
        self.columns[encodable(str(column))] = json.loads(written)

    def metric(self, name: str, value: float) -> None:
        """A number of metrics.jsonl; those of a step are averaged. Raises ValueError for a name
        that the run itself uses."""
        if str(name).rpartition("/")[2] in TAKEN:
            raise ValueError(f"log_metric({name!r}): the run has a metric of that name already")
        self.metrics.setdefault(encodable(str(name)), []).append(float(value))

    def turn_rewards(self, values: list[Any]) -> None:
        """Sets, for each sample, a list of what each of its turns has earned, which together are
        its reward, or None. Raises ValueError for another number of samples, and for what is no
        finite number."""
        values = list(values)
        if len(values) != self.num_samples:
            raise ValueError(
                f"log_turn_rewards got {len(values)} values for {self.num_samples} samples"
            )
        self.turns = [None if one is None else _of_turns(one, i) for i, one in enumerate(values)]


def _of_turns(turns: Any, index: int) -> list[float]:
    numbers = []
    for turn in turns:
        number = _check_value(turn)
        if not isinstance(number, float):
            raise ValueError(f"log_turn_rewards: a turn of sample {index} {number or 'has None'}")
        numbers.append(number)
    return numbers


@dataclass(frozen=True)
class Reward:
    """A reward function. keywords: the names of its parameters, None if it takes any. fixed: those
    that its arguments set, which no column of the data changes. needed: parameters that a column of
    the data has to give. by_sample: whether samples of a prompt are scored each by itself."""

    function: Callable
    keywords: frozenset[str] | None
    fixed: frozenset[str]
    needed: frozenset[str]
    is_async: bool
    by_sample: bool

    @classmethod
    def load(cls, spec: str, args: dict[str, Any]) -> Reward:
        """Raises ConfigError when there is no such function, or when it does not take `args`."""
        found = load_function(spec)
        _check_args(spec, found, args)
        if isinstance(found, type):
            function, fixed = _made(spec, found, args), frozenset()
        else:
            function, fixed = partial(found, **args), frozenset(args)
        if not callable(function):
            raise ConfigError(f"{spec!r} makes a {type(function).__name__}, which has no __call__")
        is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        by_sample = getattr(found, "by_sample", False)
        if verl_style.is_verl_style(function):
            by_sample = not verl_style.is_of_batches(function)
            by_prompt = verl_style.by_prompt_async if is_async else verl_style.by_prompt
            function = by_prompt(function)
        keywords = accepted_keywords(function)
        return cls(function, keywords, fixed, _needed(function), is_async, by_sample)

    def call(self, arguments: dict[str, Any], logged: Logged) -> Any:
        """What the function returns for one prompt; a coroutine if it is async."""
        values = expand(arguments, self.keywords, logged)
        if lacking := sorted(self.needed - values.keys()):
            columns = ", ".join(arguments["columns"]) or "none"
            answer = "; data.answer_key=COLUMN makes one the answer" if "answer" in lacking else ""
            raise TypeError(
                f"it takes {', '.join(lacking)}, and the row has no such column: it has {columns}"
                f"{answer}"
            )
        return self.function(**{k: v for k, v in values.items() if k not in self.fixed})


def _made(spec: str, kind: type, args: dict[str, Any]) -> Callable:
    try:
        return kind(**args)
    except ConfigError:
        raise
    except Exception as error:  # the user's own code
        raise ConfigError(f"{spec} could not be made with its args: {short(error)}") from error


def _check_args(spec: str, function: Callable, args: dict[str, Any]) -> None:
    """Arguments must be parameters by name: **kwargs, which takes columns, would hide a slip. Those
    of a verl-style function take no columns but what verl's `reward_kwargs` are."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if takes_any and not isinstance(function, type) and verl_style.is_verl_style(function):
        return
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    own = [name for name in named if name not in SAMPLES]
    for name in args:
        if name not in own:
            close = difflib.get_close_matches(name, own, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            takes = f"it takes {', '.join(own)}" if own else "it takes none"
            if takes_any:
                takes += ", and **: columns of the rows, not args"
            raise ConfigError(
                f"{spec} has no argument {name!r} (reward.args.{name}, or args.{name} of the "
                f"section that names it); {hint}{takes}"
            )
    if not isinstance(function, type):
        return
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.name in named
        if needed and parameter.name not in args:
            raise ConfigError(
                f"{spec} needs an argument {parameter.name!r}: set reward.args.{parameter.name}="
                f"VALUE, or args.{parameter.name} of the section that names it, as "
                f"reward.functions.NAME.args.{parameter.name}"
            )


def _needed(function: Callable) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {p.name for p in parameters if p.default is p.empty and p.kind in kinds}
    return frozenset(named.difference(SAMPLES))


def accepted_keywords(function: Callable) -> frozenset[str] | None:
    """The names of the function's parameters, or None if it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )


def expand(
    arguments: dict[str, Any], keywords: frozenset[str] | None, logged: Logged
) -> dict[str, Any]:
    """The keywords of one call: `columns` hold a value a prompt, the function gets one a sample."""
    num_samples = len(arguments["completions"])
    values: dict[str, Any] = {k: [v] * num_samples for k, v in arguments["columns"].items()}
    values["prompts"] = [arguments["prompt"]] * num_samples
    if played := arguments.get("played"):
        values["prompts"] = [one.prompt for one in played]
        values["environments"] = [made_again(one) for one in played]
    values["completions"] = arguments["completions"]
    values["completion_ids"] = arguments["completion_ids"]
    values["trainer_state"] = TrainerState(**arguments["trainer_state"])
    values["log_extra"], values["log_metric"] = logged.extra, logged.metric
    values["log_turn_rewards"] = logged.turn_rewards
    return {key: value for key, value in values.items() if keywords is None or key in keywords}


def made_again(played: Played) -> Any:
    """TRL's environment as it was at the end of a conversation: an object of its class that was not
    initialised, with the attributes that could be sent."""
    factory = load_function(played.factory)
    instance = object.__new__(factory) if isinstance(factory, type) else SimpleNamespace()
    instance.__dict__.update(played.state)
    return instance


def check(returned: Any, num_samples: int) -> Outcome:
    """Makes plain what a function returned: every value a float that is finite in float32 (in which
    rewards are kept), None, or what is wrong. An exception in the place of a value is the reason
    why that sample has none. Raises what a generator raises."""
    came = _no_list(returned)
    values = [] if came else list(returned)
    if not came and len(values) != num_samples:
        came = f"{len(values)} value{'s'[: len(values) != 1]}"
    if came:
        return [
            f"returned {short(returned)} for {num_samples} samples, not one reward for each: that "
            f"is {came}; return a list of {num_samples}, each a finite number or None"
        ] * num_samples
    return [_check_value(value) for value in values]


def _no_list(returned: Any) -> str:
    """What was returned in the place of a list of rewards; '' for what can be one."""
    if isinstance(returned, str | bytes | bytearray):
        return "text"
    if isinstance(returned, Mapping):
        return "a map, whose keys are not rewards"
    if isinstance(returned, Set):
        return "a set, whose order is not that of the samples"
    try:
        iter(returned)
    except TypeError:
        return "one value for all of them (of a group as a whole it is [value] * len(completions))"
    return ""


def _check_value(value: Any) -> float | str | None:
    if value is None:
        return None
    if isinstance(value, BaseException):
        return raised(value)
    several = getattr(value, "ndim", 0)  # an array of one number is no number
    try:
        number = math.nan if several or isinstance(value, str | bytes) else float(value)
        struct.pack("<f", number)  # OverflowError beyond the range of float32
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    hint = ""
    if several or isinstance(value, Mapping | list | tuple):
        hint = "; a sample has one reward, and what else there is to say of it is for log_extra"
    return f"returned {short(value)}, not a finite number in float32{hint}"
