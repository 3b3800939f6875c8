"""What a preflight makes of the rows: the environment, the prompts of a run, and those of its eval
sets, as the model will get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_moe_rl import ports
from lora_moe_rl.config import EvalSetConfig, RunConfig
from lora_moe_rl.config.eval_rules import prompt_room
from lora_moe_rl.config.plugins import ENVIRONMENTS
from lora_moe_rl.data.columns import Row
from lora_moe_rl.data.held_out import held_out_prompts
from lora_moe_rl.data.maker import Wanted
from lora_moe_rl.data.mixture import open_prompts
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.evaluation.scoring import check_values
from lora_moe_rl.models.tokenizer import (
    foreign_ids,
    load_tokenizer,
    model_vocab_size,
    stop_ids,
)
from lora_moe_rl.run.offline import RowAnswers


@dataclass
class PromptsStep:
    """`rows`: of each data set that is a file, by its name. `rewards`: what the environment asks,
    None where there is none, though one may be needed: `lora-moe-rl check` comes this far."""

    config: RunConfig
    model_dir: Path
    rows: Mapping[str, list[Row]]
    rewards: Any
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        config, model = self.config, self.config.model
        self.tokenizer = load_tokenizer(
            self.model_dir, model.trust_remote_code, model.chat_template
        )
        kind = RowAnswers if config.offline else ENVIRONMENTS.find(config.environment.name)
        self.environment: Environment = kind(config, self.rewards, self.tokenizer)

    def look(self) -> str:
        """Makes `source` and `held_out`. Returns what was found as a sentence. Raises DataError for
        rows that make no prompt, ConfigError for settings that have no effect on them."""
        config = self.config
        most = config.model.max_length if config.offline else config.max_prompt_tokens
        ends = stop_ids(self.model_dir) if config.offline else set()
        wanted = Wanted(config.learns_from, frozenset(ends))
        parts = (config.data, self.environment.prompt_tokenizer, config.seed, most)
        self.source: ports.Prompts = open_prompts(*parts, self.rows, wanted)
        told: list[str] = []
        self.held_out: dict[str, list[Prompt]] = {
            name: self._held_out(name, source, wanted, told)
            for name, source in config.eval.sources().items()
        }
        if self.environment.forks and self.environment.no_forks is not None:
            self.warnings.append(
                "a trajectory whose agent changes what was said before, or asks the same again, "
                f"will have failed (reward.max_failed): {self.environment.no_forks}"
            )
        if config.model.chat_template is not None:
            examples = self.source.examples(len(config.sources()))
            examples += [prompts[0] for prompts in self.held_out.values()]
            self._check_template_used(examples)
        if self.source.dropped:
            self.warnings.append(self._left_out(self.source.dropped, most))
        self.warnings += [
            f"{few}; lower algorithm.prompts_per_step, or give more rows"
            for few in self.source.repeated(config.algorithm.prompts_per_step)
        ]
        self.warnings += _added_alone(self.tokenizer)
        lengths = self.source.lengths()
        found = f"{min(lengths)} to {max(lengths)} tokens{self._what} of {most} that fit"
        about = [self.environment.about] if self.environment.about else []
        return "; ".join([found + _outside(self.source.filtered), *about, *told])

    def _held_out(
        self, name: str, source: EvalSetConfig, wanted: Wanted, told: list[str]
    ) -> list[Prompt]:
        """The prompts of an eval set. Raises DataError for rows that cannot be asked or grouped."""
        most, maker = prompt_room(self.config, source), self.environment.prompt_tokenizer
        rows, seed = self.rows.get(name), self.config.eval.seed
        found, dropped, outside = held_out_prompts(name, source, maker, seed, most, rows, wanted)
        check_values(source, {prompt.number: prompt.columns for prompt in found})
        if dropped:
            self.warnings.append(f"{name}: {self._left_out(dropped, most)}")
        told.append(f"{name}: {len(found)} prompts{_outside(outside)}")
        return found

    @property
    def _what(self) -> str:
        return " with their answers" if self.config.offline else ""

    def _left_out(self, many: int, most: int) -> str:
        what = f"{many:,} prompts{self._what} of more than {most} tokens"
        return f"{what} are left out (too_long=drop)"

    def _check_template_used(self, examples: Sequence[Prompt]) -> None:
        """Of prompts that are strings only those of data.chat_template are rendered by one. A judge
        on the run's own engines reads its questions by it, and an agent's chats are rendered."""
        if ENVIRONMENTS.find(self.config.environment.name).has_chats:
            return
        functions = self.config.rewards() | self.config.eval_rewards()
        if any(one.asks_engines for several in functions.values() for one in several):
            return
        sources = self.config.sources()
        found = [(prompt.text, sources[prompt.data_set]) for prompt in examples]
        if all(isinstance(text, str) and not source.chat_template for text, source in found):
            raise ConfigError(
                "model.chat_template has no effect: the prompts are strings; set "
                f"{found[0][1].key('chat_template')}=true, or leave model.chat_template out"
            )


def _added_alone(tokenizer: Any) -> list[str]:
    """A sentence where the tokenizer has tokens that the model lacks."""
    added = foreign_ids(tokenizer, tokenizer.get_vocab().values())
    if not added:
        return []
    return [
        f"the tokenizer has tokens that the model has no embedding of ({len(added)}, as "
        f"{tokenizer.decode(added[:1])!r} of the id {added[0]}; the model has "
        f"{model_vocab_size(tokenizer)}): a text that holds one cannot be asked"
    ]


def _outside(many: int) -> str:
    return f", {many:,} rows are left out by the filter" if many else ""
