"""The kinds of fault, and what docs/faults.md promises of each: one table.

A fault has happened when the injector has seen that it has (`inject.py`); the run has noticed it
when it says so, in words of its own (`says`) or in a metric (`counts`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.keys import value_of
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry import names

# What becomes of a run.
HEALED = "healed"  # its own process goes on
RESUMED = "resumed"  # `--supervise` has started it again
STOPPED = "stopped by name"  # with an error that says what it is; it goes on with --resume

AGAIN = r"it is started again, from the checkpoint"
RANKS = r"all trainer ranks are ended and started anew"


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    does: what is done. promised: the outcomes that are as they should be. says: what a run says of
    it, a regular expression for its output with single spaces; for one that stops, its error.
    counts: the metric that counts it instead. inside: done by `hooks.py` in a trainer rank.
    traceless: samples and adapter of the run are those of one without it. deadline: keys of
    time-outs that pass before it is noticed.
    """

    does: str
    promised: frozenset[str]
    says: str = ""
    counts: str = ""
    inside: bool = False
    traceless: bool = True
    deadline: tuple[str, ...] = ()


KINDS: Mapping[str, Kind] = {
    "engine.kill": Kind(
        "SIGKILL to an engine's actor",
        frozenset({HEALED}),
        r"engine-\d+ died \(",
    ),
    "engine.hang": Kind(
        "SIGSTOP to vLLM's processes of an engine",
        frozenset({HEALED}),
        r"engine-\d+ is silent \(",
        deadline=("rollout.silent_s", "rollout.silent_s", "refit.timeout_s"),
    ),
    "rank.kill": Kind("SIGKILL to a trainer rank", frozenset({HEALED}), RANKS),
    "rank.hang": Kind(
        "SIGSTOP to a trainer rank", frozenset({HEALED}), RANKS, deadline=("trainer.timeout_s",)
    ),
    "controller.kill": Kind("SIGKILL to the run's own process", frozenset({RESUMED}), AGAIN),
    "disk.full": Kind(
        "a limit on the size of a trainer rank's files, below that of its checkpoint",
        frozenset({HEALED}),
        r"cannot write a checkpoint",
    ),
    "reward.hang": Kind(
        "SIGSTOP to a process that scores samples",
        frozenset({HEALED}),
        counts=names.REWARDS_FAILED,
        traceless=False,
        deadline=("reward.timeout_s",),
    ),
    "nan.grad": Kind(
        "a NaN in the gradient of one trainer rank",
        frozenset({HEALED}),
        counts=names.SKIPPED,
        inside=True,
        traceless=False,
    ),
    "shm.corrupt": Kind(
        "a bit of a rank's part of a version, after its checksum was taken",
        frozenset({STOPPED}),
        r"adapter version \d+: the checksum of \S+ from",
        inside=True,
    ),
    "route.flip": Kind(
        "a bit of each sample's routes, on their way to a rank",
        frozenset({STOPPED}),
        r"routes of layers .* are corrupt",
        inside=True,
    ),
    "adapter.flip": Kind(
        "the top bit of the exponent of one weight, before its checksum is taken",
        frozenset({STOPPED}),
        r"engine and trainer differ by|logprobs hold NaN|the engine serves .* instead of",
        inside=True,
    ),
}


def chosen(text: str) -> list[str]:
    """The kinds that `--faults` names, `all` for every one. Raises ConfigError for others."""
    if text == "all":
        return list(KINDS)
    named = [name.strip() for name in text.split(",")]
    for name in named:
        if name not in KINDS:
            raise ConfigError(f"--faults: {name!r} is no kind of fault; there are {list(KINDS)}")
        if named.count(name) > 1:
            raise ConfigError(f"--faults names {name} twice; --rate says how many faults there are")
    return named


def check(kinds: Sequence[str], config: RunConfig) -> None:
    """Raises ConfigError for kinds of fault that a run of `config` cannot have."""
    for name in kinds:
        if reason := _unfit(name, config):
            raise ConfigError(f"--faults {name}: {reason}")


def _unfit(name: str, config: RunConfig) -> str | None:
    served = {"engine.kill", "engine.hang", "shm.corrupt", "route.flip", "adapter.flip"}
    if name in served and config.offline:
        return f"a run with algorithm.name={config.algorithm.name} has no engine and sends nothing"
    if name in {"controller.kill", "disk.full"} and not config.checkpoint.every:
        return "checkpoint.every=0 writes no checkpoint before the end; set it to some steps"
    if name == "reward.hang" and not (config.reward.function or config.reward.functions):
        return "nothing is scored in processes of the run's own; set reward.function"
    if name == "route.flip" and config.replay.mode != "r3":
        return f"with replay.mode={config.replay.mode} no rank reads the engines' routes; use r3"
    if name == "shm.corrupt" and config.refit.transport not in ("auto", "shm"):
        return f"refit.transport={config.refit.transport} does not send in shared memory"
    return None


def patience(name: str, config: RunConfig) -> float:
    """Seconds in which a fault has to be noticed and a step to follow: the time-outs after which it
    is noticed, and those of the starts that it may take."""
    waits = [value_of(config, key) for key in KINDS[name].deadline]
    starts = min(config.rollout.start_timeout_s, 600) + min(config.trainer.start_timeout_s, 600)
    return sum(waits) + starts


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern of the table stands in a console's output, however its lines are broken."""
    return bool(pattern) and re.search(pattern, " ".join(text.split())) is not None
