"""The base that a run's processes share: what each expects to find, and how it is filled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.base.layout import ExpertCut, Stack, stacks
from lora_moe_rl.base.store import Contents, Element, Store, open_store
from lora_moe_rl.config import RolloutConfig, RunConfig
from lora_moe_rl.files.untrusted import inside, read_json
from lora_moe_rl.kernels.dequant import Form
from lora_moe_rl.models import quantised
from lora_moe_rl.models.fingerprint import fingerprint
from lora_moe_rl.models.quantised_weights import read_linear
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.rollout.facts import Dtype
from lora_moe_rl.upstream.versions import VLLM_BUILDS, installed

PACKAGES = ("torch", "megatron-core")
ELEMENTS: dict[str, Element] = {"int4": "int32", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class Held:
    """One side's view of the base held in `folder`: that of `model_dir`, in `dtype`, as engines
    of `rollout` cut it; `lora`: whether these serve adapters."""

    folder: str
    model_dir: str
    dtype: Dtype
    tp: int
    ep: bool
    lora: bool

    @classmethod
    def of_run(cls, folder: str, model_dir: Path, dtype: Dtype, config: RunConfig) -> Held:
        rollout = config.rollout
        lora = config.refit.mode == "adapter"
        return cls(folder, str(model_dir), dtype, rollout.tp, rollout.ep, lora)

    @property
    def cut(self) -> ExpertCut:
        """The engine's."""
        return ExpertCut.of_engine(RolloutConfig(tp=self.tp, ep=self.ep))

    @property
    def _config(self) -> dict[str, Any]:
        return read_json(inside(Path(self.model_dir), "config.json"))

    @property
    def form(self) -> Form | None:
        """Of a quantised base."""
        return quantised.form(self._config)

    def stacks(self) -> list[Stack]:
        return stacks(ModelShape.from_hf_config(self._config), self.cut.pieces, self.form)

    def contents(self) -> Contents:
        """Raises FileError or ModelError for a directory that is no model's."""
        element = ELEMENTS[self.form] if self.form else self.dtype
        return Contents(self._key(), element, {one.name: one.shape for one in self.stacks()})

    def _key(self) -> dict[str, str]:
        found = {name: str(installed(name)) for name in PACKAGES}
        builds = [f"{name} {installed(name)}" for name in VLLM_BUILDS if installed(name)]
        return found | {
            "vllm": ", ".join(builds),
            "model": fingerprint(Path(self.model_dir)),
            "LoRA": str(self.lora).lower(),
            "rollout.tp": str(self.tp),
            "rollout.ep": str(self.ep).lower(),
        }

    def open(self) -> Store:
        """Writes the store if nobody has. Raises HeldBaseError."""
        base, found, form = Base(self.model_dir), {x.name: x for x in self.stacks()}, self.form
        try:
            return open_store(
                self.folder, self.contents(), lambda name, out: fill(base, found[name], out, form)
            )
        finally:
            base.weights.close()


def fill(base: Base, stack: Stack, out: torch.Tensor, form: Form | None = None) -> None:
    """Writes a stack `[pieces, experts, rows, columns]` from the checkpoint, one expert at a
    time."""
    pieces = out.shape[0]
    for expert in range(out.shape[1]):
        to_rows = out[:, expert].unflatten(1, (len(stack.modules), -1))
        for i, module in enumerate(stack.modules):
            weight = _stored(base, stack.layer, module, expert, form)
            if stack.cut_rows:
                parts = weight.unflatten(0, (pieces, -1))
            else:
                parts = weight.unflatten(1, (pieces, -1)).movedim(1, 0)
            to_rows[:, i].copy_(parts)


def _stored(base: Base, layer: int, module: str, expert: int, form: Form | None) -> torch.Tensor:
    """A linear `[out, in]` as it is held: numbers, or packed values."""
    if form is None:
        return base.weight(layer, module, expert)
    return read_linear(base.weights, base.name(layer, module, expert), form).data
