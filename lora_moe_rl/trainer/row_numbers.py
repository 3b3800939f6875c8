"""Megatron-Bridge's opinion of how a weight is laid out, without the weight.

Of what engines hold too a rank reads nothing. So that a mistake in how it takes its part cannot
pass unseen, Bridge maps the numbers of rows (of linears that are cut by columns: of columns) as it
would the weight itself, and they are compared with those of the rows that the rank has taken.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lora_moe_rl.adapters.sharding import Box, window
from lora_moe_rl.base.dense import Dense
from lora_moe_rl.base.held import lay_out, weights_of
from lora_moe_rl.base.parts import whole
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.refit.merged_base import Base

# An attribute of Hugging Face's config, by which Bridge finds a `RowNumbers`.
NUMBERED = "lora_moe_rl_numbered"


@dataclass
class Taken:
    """`stand_in`: as the linear, with numbers for its weight, which Bridge fills. `numbers`: what
    it has to fill it with."""

    name: str
    stand_in: torch.nn.Module
    numbers: torch.Tensor


class RowNumbers:
    """The row numbers of all that one rank has taken."""

    def __init__(self, base: Base, engine_tp: int):
        self.base, self.engine_tp = base, engine_tp
        self.taken: dict[torch.nn.Module, Taken] = {}
        self.of_weights: dict[str, torch.Tensor] = {}  # by the checkpoint's name
        self.of_held: dict[str, torch.Tensor] = {}
        self.next = 1

    def __deepcopy__(self, memo: Any) -> RowNumbers:
        """Configs that have it are copied by Megatron."""
        return self

    def held(self, one: Dense) -> torch.Tensor:
        """float64, of the rows of a tensor as it is held `[rows]`, or of its columns `[1, columns]`
        where these are cut: which of the checkpoint's, of which no two have the same number; 0 is
        padding."""
        if one.name in self.of_held:
            return self.of_held[one.name]
        parts = {}
        for name in weights_of(one, self.base):
            rows, columns = self.base.weights.entry(name).shape
            count = columns if one.kind == "row" else rows
            numbers = torch.arange(self.next, self.next + count, dtype=torch.float64)
            parts[name] = numbers[None] if one.kind == "row" else numbers
            self.next += count
        self.of_weights |= parts
        shape = (1, one.shape[1]) if one.kind == "row" else (one.shape[0],)
        out = torch.empty(shape, dtype=torch.float64)
        lay_out(one, out, whole(one.shape), parts.items(), self.engine_tp)
        self.of_held[one.name] = out
        return out

    def part(self, one: Dense, box: Box) -> torch.Tensor:
        """The numbers of a part of the tensor, out of what is `held`."""
        rows, columns = window(box.start, box.shape)
        return self.held(one)[:, columns] if one.kind == "row" else self.held(one)[rows]

    def take(
        self, name: str, linear: torch.nn.Module, as_built: torch.nn.Module, numbers: torch.Tensor
    ) -> None:
        """`linear` of the model, which Megatron has built as `as_built`, has taken what these are
        the numbers of."""
        weight = as_built.weight
        like = torch.zeros(numbers.shape, dtype=numbers.dtype, device=weight.device)
        stand_in = copy.copy(as_built)
        stand_in._parameters = {"weight": torch.nn.Parameter(like, requires_grad=False)}
        self.taken[linear] = Taken(name, stand_in, numbers)

    def instead(self, tasks: list[Any]) -> list[Any]:
        """Bridge's conversion tasks, without those that would load what was taken."""
        return [self._instead(task) for task in tasks]

    def _instead(self, task: Any) -> Any:
        found = self.taken.get(getattr(task, "megatron_module", None))
        if found is None or not task.param_name.endswith(".weight"):
            return task
        stand_in = found.stand_in
        return replace(task, megatron_module=stand_in, param_weight=stand_in.weight)

    def weight(self, name: str | Mapping[str, str]) -> Any:
        """What Bridge maps in place of the checkpoint's tensor, or tensors, of this name; None for
        one that it loads."""
        if isinstance(name, str):
            return self.of_weights.get(name)
        found = {key: self.of_weights[one] for key, one in name.items() if one in self.of_weights}
        return found or None

    def check(self) -> None:
        """Raises HeldBaseError for what Bridge lays out otherwise than was taken."""
        for one in self.taken.values():
            mapped, taken = one.stand_in.weight.cpu(), one.numbers
            if not torch.equal(mapped, taken):
                (place, *_) = (mapped != taken).flatten().nonzero()[:, 0].tolist()
                raise HeldBaseError(
                    f"{one.name}: at its place {place} on this rank Megatron-Bridge would put "
                    f"{self._told(mapped, place)}, and what is held has {self._told(taken, place)} "
                    "there; set model.held_once=off"
                )

    def _told(self, numbers: torch.Tensor, place: int) -> str:
        number = int(numbers.flatten()[place])
        for name, all_of_it in self.of_weights.items():
            if 0 <= (line := number - int(all_of_it.flatten()[0])) < all_of_it.numel():
                return f"{'row' if all_of_it.ndim == 1 else 'column'} {line} of {name}"
        return "padding"
