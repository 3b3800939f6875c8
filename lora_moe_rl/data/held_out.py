"""The prompts of an eval set: every row once, the same ones each time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lora_moe_rl.config import EvalSetConfig
from lora_moe_rl.data.columns import Row
from lora_moe_rl.data.generators import open_generator
from lora_moe_rl.data.maker import PromptMaker, Wanted
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.errors import DataError


class HeldOut(NamedTuple):
    """`dropped` and `filtered`: rows that were left out (PromptMaker)."""

    prompts: list[Prompt]
    dropped: int
    filtered: int


def held_out_prompts(
    name: str,
    config: EvalSetConfig,
    tokenizer: Any,
    seed: int,
    max_prompt_tokens: int,
    rows: list[Row] | None,
    wanted: Wanted | None = None,
) -> HeldOut:
    """The prompts of set `name` (`eval/NAME`), in the order of its rows and by their numbers, from
    0. `rows`: those of its file, None for a generator. `wanted`: what of a row is learned from.
    Raises DataError when there are none, and for rows that make no prompt."""
    if rows is None:
        rows = list(_generated(config, seed_of_rows(seed, name)))
    maker = PromptMaker(config, tokenizer, max_prompt_tokens, wanted)
    made = [(n, one) for n, row in enumerate(rows) if (one := maker.make(row)) is not None]
    if not made:
        why = f": {maker.why_left_out()}" if rows else ""
        source = "path" if config.path is not None else "generator"
        raise DataError(
            f"{config.key(source)}={getattr(config, source)}: none of the {len(rows)} rows is "
            f"left to be asked{why}"
        )
    prompts = [
        Prompt(number, one.text, list(one.token_ids), dict(one.columns), name, one.answers, number)
        for number, one in made
    ]
    return HeldOut(prompts, maker.dropped, maker.filtered)


def _generated(config: EvalSetConfig, seed: int) -> Iterator[Row]:
    """The first `limit` rows of a generator."""
    for number, row in enumerate(open_generator(config, seed)):
        yield f"{config.generator}, row {number}", row


def seed_of_rows(seed: int, name: str) -> int:
    """What a generator of held-out rows is seeded with: other than any seed that a run gives its
    training data, but for a chance of one in 2^32."""
    return _draw(seed, _number(name))


def seed_of_prompt(seed: int, name: str, row: int) -> int:
    """The seed of a prompt's samples: of eval.seed, the set's name and the row alone."""
    return _draw(seed, _number(name), row)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def _draw(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
