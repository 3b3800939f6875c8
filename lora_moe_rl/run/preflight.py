"""What is looked at before anything slow starts, what costs least first.

    tracker  whether its package is installed, if one is chosen
    model    files of weights, config and tokenizer
    layout   whether settings and adapter fit the model
    data     rows
    reward   called on made-up completions, in the processes that the run uses, if there is one
    machine  GPUs, memory, disk
    prompts  rendered and tokenised, with lengths: the first step that imports transformers;
             before them what the environment needs, as tools, since prompts may tell of it
    teacher  asked once, if there is one: whether it takes such lengths and reads ids alike; one
             that is the policy itself: what it would read

`lora-moe-rl check` goes through all of them and prints what it finds; a run and --dry-run stop at
the first that fails. Importing this file imports no torch, Ray, vLLM, Megatron or transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.base import choose
from lora_moe_rl.config import RewardFunction, RunConfig, SourceConfig
from lora_moe_rl.config.evaluation import EVAL
from lora_moe_rl.config.plugins import ENVIRONMENTS, TRACKERS
from lora_moe_rl.config.teacher import TeacherSettings
from lora_moe_rl.data.columns import Row
from lora_moe_rl.data.generators import open_generator
from lora_moe_rl.data.prompts import require_data
from lora_moe_rl.data.rows import is_hub, read_rows
from lora_moe_rl.errors import ConfigError, DataError, LoraMoeRlError
from lora_moe_rl.files.storage import check_place
from lora_moe_rl.models import quantised
from lora_moe_rl.models.directory import check_model_dir, find_local, resolve_model
from lora_moe_rl.models.fit import (
    check_blocks,
    check_layout,
    check_replay,
    check_start,
    check_stops,
)
from lora_moe_rl.models.tokenizer import check_tokenizer, stop_ids
from lora_moe_rl.rewards.by_set import NoRewards, RewardsBySet
from lora_moe_rl.rewards.runner import RewardRunner
from lora_moe_rl.rollout.device import check_engine, check_quantised
from lora_moe_rl.run import best_metric, lengths, machine, reward_trial, unmoved, warm_up
from lora_moe_rl.run.prompts_step import PromptsStep

if TYPE_CHECKING:
    from lora_moe_rl.rewards.own_engines import OwnEngines

log = logging.getLogger(__name__)


class Absent(Exception):
    """What a step needs is not on this machine, and is not to be fetched now."""


@dataclass(frozen=True)
class Finding:
    step: str
    state: Literal["ok", "warning", "error", "skipped"]
    text: str


# What a step cannot do without, beside the config.
NEEDS = {"layout": "model", "machine": "layout", "prompts": "model", "teacher": "prompts"}


class Preflight:
    """Makes what a run is made of, step by step. A context manager: it ends the processes of
    rewards and of the environment.

    `fetch`: whether a model and data of the hub are fetched, and a tiny model made; without it what
    is not on this machine is not looked at. `model_dir`, `spec`, `source`, `rewards` and
    `environment` are there after `require` with `fetch`; `source`, `environment` and `tokenizer`
    after a step `prompts` that was ok.
    """

    def __init__(self, config: RunConfig, fetch: bool):
        self.config, self.fetch = config, fetch
        self.algorithm = algorithms.make(config)
        # Of each data set, by its name: '' of the only one, eval/NAME of one that is held out.
        self.sources = config.sources()
        self.first: dict[str, Row] = {}
        self.rows: dict[str, list[Row]] = {}
        self.warnings: list[str] = []  # of the step that runs
        self.missing: set[str] = set()  # steps that did not do what they do
        self.own_engines: OwnEngines | None = None  # if a reward asks them

    def __enter__(self) -> Preflight:
        return self

    def __exit__(self, *exc) -> None:
        for started in ("environment", "rewards"):
            if hasattr(self, started):
                getattr(self, started).close()
        if self.own_engines is not None:
            self.own_engines.close()

    def require(
        self,
        say: Callable[[str], None],
        begin: Callable[[str], None] = lambda step: None,
        steps: Sequence[str] | None = None,
    ) -> None:
        """Goes through all steps, or those named; raises the error of the first that fails. `say`
        gets warnings, `begin` the step that begins."""
        for name in steps or self._order():
            begin(name)
            finding = self._take(name)
            if finding.state in ("warning", "skipped"):
                say(f"{name}: {finding.text}")

    def findings(self) -> Iterator[Finding]:
        """Goes through all steps, whatever fails."""
        for name in self._order():
            try:
                yield self._take(name)
            except LoraMoeRlError as error:
                self.missing.add(name)
                yield Finding(name, "error", str(error))

    def _order(self) -> list[str]:
        """A model that has to be fetched comes after the data and the reward."""
        model, rows = ["model", "layout"], ["data", "reward"]
        try:
            absent = find_local(self.config.model.path, self.config.model.revision) is None
        except LoraMoeRlError:  # which the step raises again
            absent = False
        first = [*rows, *model] if absent and self.fetch else [*model, *rows]
        if self.config.tracker.name != "none":
            first.insert(0, "tracker")
        if self.config.checkpoint.push_to is not None:
            first.insert(0, "copies")
        last = ["machine", "prompts", "teacher"]
        return [*first, *(last if self.algorithm.teacher else last[:-1])]

    def _take(self, name: str) -> Finding:
        """A step `_NAME` returns what it found as a sentence, notes `warnings`, and raises a
        LoraMoeRlError for what cannot work, Absent for what is not here."""
        self.warnings = []
        try:
            if NEEDS.get(name) in self.missing:
                raise Absent(f"needs the {NEEDS[name]}")
            text = getattr(self, f"_{name}")()
        except Absent as absent:
            self.missing.add(name)
            return Finding(name, "skipped", str(absent))
        log.info("%s: %s", name, text)
        if self.warnings:
            return Finding(name, "warning", "; ".join(self.warnings))
        return Finding(name, "ok", text)

    def _tracker(self) -> str:
        for kind in TRACKERS.chosen(self.config.tracker.name):
            kind.check_installed()
        return self.config.tracker.name

    def _copies(self) -> str:
        check_place(target := str(self.config.checkpoint.push_to))
        return target

    def _model(self) -> str:
        model = self.config.model
        where = resolve_model if self.fetch else find_local
        found = where(model.path, model.revision)
        if found is None:
            raise Absent(f"{model.path} is not on this machine yet; a run fetches or makes it")
        found = found.absolute()
        hf_config = check_model_dir(found)
        check_tokenizer(found, model.trust_remote_code)
        self.shape = ModelShape.from_hf_config(hf_config)
        self.model_dir, self.form = found, quantised.form(hf_config)
        text = f"{found}: {self.shape.architecture}, {self.shape.num_layers} layers"
        if (inside := self.shape.family.inside) is None:
            return text
        unused = ", ".join(f"{prefix}*" for prefix in inside.left_out)
        return f"{text}; its language model alone, the weights {unused} are left out on purpose"

    def _data(self) -> str:
        """All sets that are here are looked at, whichever have to be fetched."""
        found, absent = [], []
        for name, source in self.sources.items():
            try:
                found.append(_of_set(name, self._rows_of(name, source)))
            except Absent as error:
                absent.append(str(error))
        if absent:
            raise Absent("; ".join(absent))
        return "; ".join(found)

    def _rows_of(self, name: str, data: SourceConfig) -> str:
        require_data(data)
        if data.path is None:
            named = f"{data.key('generator')}={data.generator}"
            first = next(open_generator(data, self.config.seed), None)
            if first is None:
                raise DataError(f"{named} gave no rows")
            self.first[name] = f"{data.generator}, row 0", first
            return f"{data.generator} gives rows"
        here = Path(data.path).expanduser().exists()
        if is_hub(data.path) and not here and not self.fetch:
            raise Absent(
                f"there is no file {data.path} here; it is taken for a data set of the hub, which "
                "a run fetches"
            )
        self.rows[name] = read_rows(data)
        self.first[name] = self.rows[name][0]
        return f"{data.path}: {len(self.rows[name]):,} rows"

    def _reward(self) -> str:
        config = self.config
        if config.offline:
            name = config.algorithm.name
            return f"none, and no engines: algorithm={name} learns from the rows' own answers"
        functions = config.rewards()
        if self._environment_rewards({**functions, **config.eval_rewards()}):
            self.rewards = NoRewards()
            return f"none but what environment={config.environment.name} gives"
        if self._has_no_reward(functions):
            if config.eval.sets:
                raise ConfigError(
                    f"eval.sets are scored by a reward, and with algorithm={config.algorithm.name} "
                    "none is set: set reward.function, or evaluate the adapter by itself: "
                    "lora-moe-rl eval RECIPE adapter.init_from=DIR"
                )
            self.rewards = NoRewards()
            return f"none, which algorithm={config.algorithm.name} does without"
        functions = functions | config.eval_rewards()
        for name, several in functions.items():
            for one in several:
                _require_function(name, one)
        functions = self._with_address(functions)
        max_steps = config.trainer.steps * config.algorithm.updates_per_step
        self.rewards = RewardsBySet(functions, config.reward, max_steps)
        found = []
        for name, source in self.sources.items():
            for runner in self.rewards.of(name):
                found.append(_of_set(name, self._tried(name, source, runner)))
        return "; ".join(found)

    def _environment_rewards(self, functions: Mapping[str, list[RewardFunction]]) -> bool:
        """Whether only the environment gives rewards; it looks itself whether it can."""
        itself = ENVIRONMENTS.find(self.config.environment.name).rewards_itself
        return itself and all(not one.function for some in functions.values() for one in some)

    def _has_no_reward(self, functions: Mapping[str, list[RewardFunction]]) -> bool:
        """Whether there is none, and none is needed: a teacher, if it is named, teaches alone."""
        teacher = self.algorithm.teacher
        if teacher is None:
            return False
        if isinstance(teacher, TeacherSettings):
            from lora_moe_rl.rewards.teacher import check_named

            check_named(teacher)
        none = all(one.function is None for several in functions.values() for one in several)
        return none and not self.algorithm.needs_reward

    def _with_address(
        self, functions: Mapping[str, list[RewardFunction]]
    ) -> dict[str, list[RewardFunction]]:
        """The functions with the address of the run's engines where one is to ask them."""
        if not any(one.asks_engines for several in functions.values() for one in several):
            return dict(functions)
        from lora_moe_rl.rewards.own_engines import OwnEngines

        self.own_engines = OwnEngines()
        url = {"url": self.own_engines.url}
        return {
            name: [replace(o, args=o.args | url) if o.asks_engines else o for o in several]
            for name, several in functions.items()
        }

    def _teacher(self) -> str:
        """Asks the teacher what it is, or what the policy would read as its own."""
        config = self.config
        from lora_moe_rl.run import taught

        if isinstance(self.algorithm.teacher, TeacherSettings):
            return taught.ask(self.algorithm, self.tokenizer, config.model.max_length)
        examples = self.source.examples(len(config.data.sources()))
        text, more = taught.try_reading(self.algorithm, config, self.environment, examples)
        self.warnings += more
        return text

    def _tried(self, name: str, source: SourceConfig, runner: RewardRunner) -> str:
        """What a function gives for a data set's first row, if that is here."""
        if self.own_engines is not None and runner.reward.args.get("url") == self.own_engines.url:
            return f"{runner.function} is there; not called, it asks the engines"
        if ENVIRONMENTS.find(self.config.environment.name).shows_itself:
            return f"{runner.function} is there; not called, it may look at environments"
        if name not in self.first:
            return f"{runner.function} is there; not called, that needs the data"
        trial = reward_trial.call(runner, self.first[name], source, self.config.reward.max_failed)
        few = reward_trial.without_answers(self.rows.get(name, ()), source)
        self.warnings += [_of_set(name, one) for one in (*trial.warnings, few) if one]
        return trial.text

    def _layout(self) -> str:
        config, shape = self.config, self.shape
        check_layout(shape, config, self.form)
        check_blocks(shape, config, self.form)
        check_replay(shape, config)
        check_stops(shape, config, stop_ids(self.model_dir))
        spec = AdapterSpec.build(shape, config.adapter, servable=config.serves_adapters)
        check_start(spec, config)
        check_engine(config, spec)
        check_quantised(config, self.form)
        self.private = choose.decide(config, shape, self.model_dir)
        spec.lr_factors(config.trainer.lr_pattern)
        told = (warm_up.check(config), lengths.check(config, shape), unmoved.check(config))
        self.warnings += filter(None, told)
        self.warnings += best_metric.check(config)
        against_base = "reference" in self.algorithm.passes and not self.algorithm.from_start
        if against_base and config.adapter.init_from is not None:
            self.warnings.append(
                f"algorithm={config.algorithm.name} measures the policy against the bare base, and "
                f"pulls it there, away from adapter.init_from={config.adapter.init_from}; to "
                "measure against that, set algorithm.reference=start"
            )
        self.spec = spec
        return f"{len(spec.sites)} sites, {spec.num_parameters:,} trained parameters"

    def _machine(self) -> str:
        found = machine.look(self.config, self.model_dir, self.spec, not self.private)
        self.warnings += found.warnings
        return found.text

    def _prompts(self) -> str:
        config = self.config
        if self.first.keys() != self.sources.keys():
            raise Absent("needs the data")
        step = PromptsStep(config, self.model_dir, self.rows, getattr(self, "rewards", None))
        self.environment, self.tokenizer = step.environment, step.tokenizer
        text = step.look()
        self.source, self.held_out = step.source, step.held_out
        self.warnings += step.warnings
        return text


def _require_function(data_set: str, one: RewardFunction) -> None:
    """Raises ConfigError when a reward has no function."""
    if one.function is None:
        place = f"eval.sets.{held}" if (held := data_set.removeprefix(EVAL)) != data_set else ""
        place = place or f"data.sets.{data_set}"
        whose = f"{place} has no reward: set {place}.reward, or {one.key}"
        what = whose if data_set and not one.name else f"{one.key} is not set"
        raise ConfigError(
            f"{what}: name a function as module:function or file.py:function, or "
            "lora_moe_rl.rewards:exact_match to compare with the answer column"
        )


def _of_set(name: str, text: str) -> str:
    """`text` after the name of its data set, where there are several."""
    return f"{name}: {text}" if name else text
