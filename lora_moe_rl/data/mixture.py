"""Several data sets as one, in their ratios.

    ratios 3 : 1        math code math math | math code math math | ...

Which set the next prompt is drawn from follows from how many each has given: the one for which
(given + 1/2) / ratio is smallest, which is how Webster's method deals out seats. So the counts are
within a prompt or so of their ratios at any time, in each step too, and no generator's state has to
be saved. The seed orders the rows within a set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lora_moe_rl.config import DataConfig
from lora_moe_rl.data.columns import Row
from lora_moe_rl.data.maker import Wanted
from lora_moe_rl.data.prompts import PromptSource
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.errors import DataError
from lora_moe_rl.ports import Prompts


def open_prompts(
    config: DataConfig,
    tokenizer: Any,
    seed: int,
    max_tokens: int,
    rows: Mapping[str, list[Row]],
    wanted: Wanted | None = None,
) -> Prompts:
    """The prompts of a run. `rows`: of the sets that were read before, by their names ('': of the
    only one). Raises what PromptSource raises."""
    sources = {
        name: PromptSource(source, tokenizer, seed, max_tokens, rows.get(name), wanted)
        for name, source in config.sources().items()
    }
    if not config.sets:
        return sources[""]
    return Mixture(sources, {name: one.ratio for name, one in config.sets.items()})


class Mixture:
    """The prompts of several data sets, by name, in their ratios."""

    def __init__(self, sources: dict[str, PromptSource], ratios: dict[str, float]):
        self._sources, self._ratios = sources, ratios

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts."""
        return [self._next() for _ in range(n)]

    @property
    def dropped(self) -> int:
        """Rows left out so far because their prompts are too long."""
        return sum(source.dropped for source in self._sources.values())

    @property
    def filtered(self) -> int:
        """Rows that the sets' filters left out so far."""
        return sum(source.filtered for source in self._sources.values())

    def lengths(self) -> list[int]:
        """Tokens of the prompts of each set in turn, with their answers if they have any."""
        return [length for source in self._sources.values() for length in source.lengths()]

    def examples(self, n: int) -> list[Prompt]:
        """The next prompt of each set, however many: rare sets are to be looked at too."""
        return [replace(source.peek(1)[0], data_set=name) for name, source in self._sources.items()]

    def repeated(self, per_step: int) -> list[str]:
        """A sentence for each set that has fewer prompts than its share of a step."""
        whole = sum(self._ratios.values())
        return [
            told
            for name, source in self._sources.items()
            for told in source.repeated(int(per_step * self._ratios[name] / whole))
        ]

    def state_dict(self) -> dict[str, Any]:
        """Where each set stands, and the ratios."""
        return {
            "sets": {
                name: {"ratio": self._ratios[name], **source.state_dict()}
                for name, source in self._sources.items()
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another mixture stood. Raises DataError when sets, ratios or what is in the
        sets are not the same."""
        before = {name: one["ratio"] for name, one in state.get("sets", {}).items()}
        if before != self._ratios:
            raise DataError(
                f"data.sets was {_named(before) or 'empty'} when the checkpoint was written and is "
                f"now {_named(self._ratios)}: restore it, or start a new run with "
                "logging.run_dir=DIR"
            )
        for name, source in self._sources.items():
            source.load_state_dict(state["sets"][name])

    def _next(self) -> Prompt:
        number = sum(source.drawn for source in self._sources.values())
        name = min(self._sources, key=self._turn)
        (prompt,) = self._sources[name].next(1)
        return replace(prompt, number=number, data_set=name)

    def _turn(self, name: str) -> tuple[float, str]:
        """The set of the smallest is drawn from; of equal ones that of the first name."""
        return (self._sources[name].drawn + 0.5) / self._ratios[name], name


def _named(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name} (ratio {ratio})" for name, ratio in sorted(ratios.items()))
