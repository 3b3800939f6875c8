"""What is looked at before anything slow starts, what costs least first.

    model    files of weights, config and tokenizer
    layout   whether settings and adapter fit the model
    data     rows
    reward   called on made-up completions, in the processes that the run uses
    machine  GPUs, memory, disk
    prompts  rendered and tokenised, with lengths: the first step that imports transformers

`lora-moe-rl check` goes through all of them and prints what it finds; a run and --dry-run stop at
the first that fails. Importing this file imports no torch, Ray, vLLM, Megatron or transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.config import RewardFunction, RunConfig, SourceConfig
from lora_moe_rl.data.columns import Row
from lora_moe_rl.data.generators import open_generator
from lora_moe_rl.data.mixture import open_prompts
from lora_moe_rl.data.prompts import require_data
from lora_moe_rl.data.rows import is_hub, read_rows
from lora_moe_rl.errors import ConfigError, DataError, LoraMoeRlError
from lora_moe_rl.models.directory import check_model_dir, find_local, resolve_model
from lora_moe_rl.models.fit import check_layout, check_replay
from lora_moe_rl.models.tokenizer import check_tokenizer, load_tokenizer
from lora_moe_rl.rewards.by_set import RewardsBySet
from lora_moe_rl.rewards.runner import RewardRunner
from lora_moe_rl.rollout.device import check_engine
from lora_moe_rl.run import machine, reward_trial

log = logging.getLogger(__name__)


class Absent(Exception):
    """What a step needs is not on this machine, and is not to be fetched now."""


@dataclass(frozen=True)
class Finding:
    step: str
    state: Literal["ok", "warning", "error", "skipped"]
    text: str


# What a step cannot do without, beside the config.
NEEDS = {"layout": "model", "machine": "layout", "prompts": "model"}


class Preflight:
    """Makes what a run is made of, step by step. A context manager: it ends the reward's processes.

    `fetch`: whether a model and data of the hub are fetched, and a tiny model made; without it what
    is not on this machine is not looked at. `model_dir`, `spec`, `source` and `rewards` are there
    after `require` with `fetch`, `source` and `tokenizer` after a step `prompts` that was ok.
    """

    def __init__(self, config: RunConfig, fetch: bool):
        self.config, self.fetch = config, fetch
        # Of each data set, by its name: '' when it is the only one.
        self.sources = config.data.sources()
        self.first: dict[str, Row] = {}
        self.rows: dict[str, list[Row]] = {}
        self.warnings: list[str] = []  # of the step that runs
        self.missing: set[str] = set()  # steps that did not do what they do

    def __enter__(self) -> Preflight:
        return self

    def __exit__(self, *exc) -> None:
        if hasattr(self, "rewards"):
            self.rewards.close()

    def require(
        self, say: Callable[[str], None], begin: Callable[[str], None] = lambda what: None
    ) -> None:
        """Goes through all steps; raises the error of the first that fails. `say` gets warnings,
        `begin` what is done now."""
        for name in self._order():
            begin(f"looking at the {name}")
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
        return [*first, "machine", "prompts"]

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
        self.model_dir = found
        return f"{found}: {self.shape.architecture}, {self.shape.num_layers} layers"

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
            try:
                first = next(open_generator(data, self.config.seed), None)
            except LoraMoeRlError:
                raise
            except Exception as error:  # the user's own code
                raise DataError(f"{named} raised {type(error).__name__}: {error}") from error
            if first is None:
                raise DataError(f"{named} gave no rows")
            self.first[name] = f"{data.generator}, row 0", first
            return f"{data.generator} gives rows"
        if is_hub(data.path) and not self.fetch:
            raise Absent(f"{data.path} is a data set of the hub; a run fetches it")
        self.rows[name] = read_rows(data)
        self.first[name] = self.rows[name][0]
        return f"{data.path}: {len(self.rows[name]):,} rows"

    def _reward(self) -> str:
        config = self.config
        functions = config.rewards()
        for name, several in functions.items():
            for one in several:
                _require_function(name, one)
        max_steps = config.trainer.steps * config.algorithm.optimizer_steps
        self.rewards = RewardsBySet(functions, config.reward.timeout_s, max_steps)
        found = []
        for name, source in self.sources.items():
            for runner in self.rewards.of(name):
                found.append(_of_set(name, self._tried(name, source, runner)))
        return "; ".join(found)

    def _tried(self, name: str, source: SourceConfig, runner: RewardRunner) -> str:
        """What a function gives for a data set's first row, if that is here."""
        if name not in self.first:
            return f"{runner.function} is there; not called, that needs the data"
        trial = reward_trial.call(runner, self.first[name], source, self.config.reward.max_failed)
        self.warnings += [_of_set(name, warning) for warning in trial.warnings]
        return trial.text

    def _layout(self) -> str:
        config, shape = self.config, self.shape
        check_layout(shape, config)
        check_replay(shape, config)
        servable = config.refit.mode == "adapter"
        spec = AdapterSpec.build(shape, config.adapter, servable=servable)
        check_engine(config, spec)
        spec.lr_factors(config.trainer.lr_pattern)
        self.spec = spec
        return f"{len(spec.sites)} sites, {spec.num_parameters:,} trained parameters"

    def _machine(self) -> str:
        found = machine.look(self.config, self.model_dir, self.spec)
        self.warnings += found.warnings
        return found.text

    def _prompts(self) -> str:
        config = self.config
        if self.first.keys() != self.sources.keys():
            raise Absent("needs the data")
        tokenizer = load_tokenizer(self.model_dir, config.model.trust_remote_code)
        most = config.max_prompt_tokens
        self.source = open_prompts(config.data, tokenizer, config.seed, most, self.rows)
        self.tokenizer = tokenizer
        lengths = self.source.lengths()
        if self.source.dropped:
            self.warnings.append(
                f"{self.source.dropped:,} prompts of more than {most} tokens are left out "
                "(too_long=drop)"
            )
        outside = self.source.filtered
        told = f", {outside:,} rows are left out by the filter" if outside else ""
        return f"{min(lengths)} to {max(lengths)} tokens of {most} that fit{told}"


def _require_function(data_set: str, one: RewardFunction) -> None:
    """Raises ConfigError when a reward has no function."""
    if one.function is None:
        whose = f"data.sets.{data_set} has no reward: set data.sets.{data_set}.reward, or {one.key}"
        what = whose if data_set and not one.name else f"{one.key} is not set"
        raise ConfigError(
            f"{what}: name a function as module:function or file.py:function, or "
            "lora_moe_rl.rewards:exact_match to compare with the answer column"
        )


def _of_set(name: str, text: str) -> str:
    """`text` after the name of its data set, where there are several."""
    return f"{name}: {text}" if name else text
