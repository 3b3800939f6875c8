"""The table of all metrics: what each means, and that nothing else is logged.

docs/metrics.md is made from it: `python -m lora_moe_rl.telemetry.metric_table > docs/metrics.md`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from lora_moe_rl.config import CheckpointConfig, RunConfig
from lora_moe_rl.config.plugins import PARTS
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry.metric_rows import ROWS

# What the run fills in; all others are any text.
_DIGITS = ("age", "k", "layer")
# Remarks on a name of TRL that say of which trainer it is, or how it comes about.
_PLAIN = ("", "SFTTrainer", "DPOTrainer", "log_metric")
_BEST: dict[str, Literal["largest", "smallest"]] = {"up": "largest", "down": "smallest"}
OWN = ("loss/<own>", "eval/<set>/<own>")


@dataclass(frozen=True)
class Metric:
    """A row: see `metric_rows.py`. `better`: up, down or ''."""

    name: str
    unit: str
    better: Literal["up", "down", ""]
    meaning: str
    verl: str = ""
    trl: str = ""

    def matches(self, name: str) -> bool:
        return self._pattern().fullmatch(name) is not None

    @cache  # noqa: B019 (rows live as long as the process)
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(_pattern_of(self.name))


def _hole(what: str) -> str:
    return r"\d+" if what in _DIGITS else ".+"


@cache
def table() -> dict[str, Metric]:
    """Every row by its name, in the order of the page."""
    return {row[0]: Metric(*row) for row in ROWS}  # type: ignore[arg-type]


def find(name: str) -> Metric | None:
    """The row of a metric that was logged: one of that very name, or else the first whose pattern
    fits. None when there is none."""
    exact = table().get(name)
    return exact or next((one for one in table().values() if one.matches(name)), None)


def best_of(name: str) -> Literal["largest", "smallest"] | None:
    """Which value of a metric is the best; None where the table does not say."""
    found = find(name)
    return None if found is None or not found.better else _BEST[found.better]


def largest_is_best(settings: CheckpointConfig) -> bool:
    """Whether the largest value of checkpoint.best_metric is the best. Raises ConfigError for a
    metric that no run logs, and where neither checkpoint.best_is nor the table says it."""
    name = settings.best_metric or ""
    if find(name) is None:
        near = difflib.get_close_matches(name, table(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"checkpoint.best_metric={name} is no metric that a run logs{hint}")
    best = settings.best_is or best_of(name)
    if best is None:
        raise ConfigError(
            f"checkpoint.best_metric={name}: docs/metrics.md does not say which value is better; "
            "set checkpoint.best_is=largest or smallest"
        )
    return best == "largest"


class Checked:
    """Says no to metrics that stand nowhere. `loss/*` and `eval/SET/*` of one's own may be logged
    where the run's algorithm, or a part of it, is one's own."""

    def __init__(self, config: RunConfig):
        names = [getattr(config.algorithm, part, "") for part in ("name", *PARTS)]
        self._own = any(":" in name for name in names)
        self._known: set[str] = set()

    def check(self, names: Iterable[str]) -> None:
        """Raises ValueError for a name that is not in the table, before anything is written."""
        for name in names:
            if name not in self._known:
                self._look_up(name)
                self._known.add(name)

    def _look_up(self, name: str) -> None:
        found = find(name)
        if found is None or (found.name in OWN and not self._own):
            raise ValueError(
                f"the metric {name!r} has no row in telemetry/metric_rows.py, and what has none "
                "is not logged; write one (what an algorithm of one's own logs is named loss/…)"
            )


def named(name: str, logged: Iterable[str]) -> str:
    """The metric that a user means by `name`: one that is logged, or what verl or TRL call by that
    name. Raises ConfigError with what may have been meant: also where several of ours come near, or
    none is quite what theirs is."""
    logged = list(logged)
    if name in logged:
        return name
    same, near = list[str](), list[str]()
    for one in table().values():
        for alias, remark in aliases(one):
            (near if remark else same).extend(_filled(one, alias, name, logged))
    if len(same) == 1:
        return same[0]
    near = same + near or difflib.get_close_matches(name, logged, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
    raise ConfigError(f"no run has logged the metric {name!r}{hint} (docs/metrics.md has them all)")


def aliases(metric: Metric) -> Iterator[tuple[str, str]]:
    """The names that verl and TRL have for it, each with what is remarked of it: that it is not
    quite the same. That it is of one of TRL's trainers is none."""
    for cell in re.split(r", (?![^(]*\))", f"{metric.verl}, {metric.trl}"):
        name, _, remark = cell.partition(" (")
        remark = remark.removesuffix(")")
        if name:
            yield name, "" if remark in _PLAIN else remark


def _filled(metric: Metric, alias: str, name: str, logged: Sequence[str]) -> list[str]:
    """The metrics of a row that were logged and may be what `name` is, if that is the alias with
    something in the place of each `<x>`."""
    fits = re.fullmatch(_pattern_of(alias), name)
    if fits is None:
        return []
    ours = re.compile(_pattern_of(metric.name, fits.groupdict()))
    return [one for one in logged if ours.fullmatch(one)]


def _pattern_of(name: str, known: Mapping[str, str] | None = None) -> str:
    """Of names as `name` is, with what is `known` in the place of its `<x>`."""
    parts = re.split(r"<(\w+)>", name)
    texts, holes = map(re.escape, parts[::2]), iter(parts[1::2])
    found = ""
    for text in texts:
        hole = next(holes, None)
        value = (known or {}).get(hole or "")
        found += text
        if hole is not None:
            found += f"(?P<{hole}>{_hole(hole)})" if value is None else re.escape(value)
    return found


HEAD = """\
# Metrics

Every metric that a run logs, in `metrics.jsonl` and by every [tracker](trackers.md). What is not in
this table cannot be logged: the run refuses it. The page is made from the table
(`python -m lora_moe_rl.telemetry.metric_table > docs/metrics.md`).

`better` says which way is better, where one is. `<x>` is filled in by the run. verl and TRL: what
comes nearest there (verl 0.9, TRL 1.16); what exactly is averaged may differ. `lora-moe-rl compare`
takes those names too, where one of ours is meant; for one with a remark it names ours.
"""
SECTIONS = {
    "reward": "Rewards",
    "teacher": "A teacher",
    "loss": "Loss and policy",
    "critic": "A critic",
    "mismatch": "Engine against trainer",
    "replay": "Routes",
    "adapter": "Versions on their way to the engines",
    "rollout": "Rollouts",
    "data": "Learning from answers",
    "eval": "Evaluation",
    "idle": "Time",
    "perf": "Performance",
    "memory": "Memory",
    "histogram": "Distributions",
}
PERFORMANCE = """\
Operations are those of `lora_moe_rl/run/performance.py`. With P parameters of the base and A of the
adapters that multiply a token (of routed experts those of its top k; norms and the input embedding
not), and a sample of n tokens, where c is 4 · layers · heads · head size (MLA: 2 · layers · heads ·
(size of a key + size of a value)):

    forward    n (2 P + 2 A) + c n² / 2
    backward   n (2 P + 4 A) + c n²         the base has the gradient of its inputs, and no gradient
                                            of its weights; the adapters have both

A step is `algorithm.epochs` times both, and a forward for each of old logprobs, reference (A = 0)
and values, as far as the algorithm asks for them. Training all of the base would be 6 P a token in
the place of 4 P: a figure that counts 6 shows half as much again as was computed. What is computed
twice (`trainer.recompute`, `schedule.continued=split`) is not counted twice; a prompt that is
computed once for several samples (`trainer.share_prompts`) counts once, but for its c n² / 2."""
SAYS = {
    "reward": "Over the step's samples: [rewards](rewards.md), "
    "[data sets](data.md#several-data-sets).",
    "teacher": "With [a teacher](algorithms.md#a-teacher).",
    "loss": "Of `loss/*` means over the tokens in the loss, whatever `algorithm.aggregation`; "
    "every [loss and correction](algorithms.md) has its own.",
    "mismatch": "Before the update, over all sampled tokens. Which value is bad: "
    "[mismatch is high](troubleshooting.md#mismatch-is-high).",
    "replay": "[Replay](replay.md).",
    "adapter": "[Refit](refit.md).",
    "rollout": "Ages and restarts: [sampling ahead](running.md#sampling-ahead-of-training).",
    "perf": PERFORMANCE,
    "memory": "By rank and by what it is for: `lora-moe-rl plan RUN/config.yaml` "
    "([planning](planning.md#what-it-says)).",
    "histogram": "For trackers that show them; they are not in `metrics.jsonl`.",
}


def page() -> str:
    """docs/metrics.md."""
    return "\n".join([HEAD.rstrip(), *_sections(), ""])


def _sections() -> Iterator[str]:
    for metric in table().values():
        room = metric.name.partition("/")[0]
        if room in SECTIONS and metric == _first(room):
            yield f"\n## {SECTIONS[room]}\n"
            if room in SAYS:
                yield f"{SAYS[room]}\n"
            yield "| metric | unit | better | meaning | verl | TRL |\n|---|---|---|---|---|---|"
        cells = (f"`{cell}`" if cell else "" for cell in (metric.verl, metric.trl))
        yield (
            f"| `{metric.name}` | {metric.unit} | {metric.better} | {metric.meaning} | "
            f"{' | '.join(cells)} |"
        )


def _first(room: str) -> Metric:
    return next(one for one in table().values() if one.name.startswith(f"{room}/"))


if __name__ == "__main__":
    print(page(), end="")
