"""The base that a run's processes share: what each expects to find, and how it is filled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.sharding import Box
from lora_moe_rl.base.contents import Contents, Element, Kept
from lora_moe_rl.base.dense import Dense, dense
from lora_moe_rl.base.ipc import Port
from lora_moe_rl.base.ipc_store import Mapped, Owned, map_store, share_store
from lora_moe_rl.base.layout import ExpertCut, Stack, stacks
from lora_moe_rl.base.parts import engine_part, whole
from lora_moe_rl.base.same import check_same, put, state_of_files
from lora_moe_rl.base.store import Fill, Store, open_store
from lora_moe_rl.config import RolloutConfig, RunConfig
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.files.untrusted import inside, read_json
from lora_moe_rl.kernels.dequant import Form
from lora_moe_rl.kernels.dequant.formats import MARLIN
from lora_moe_rl.models import quantised
from lora_moe_rl.models.fingerprint import fingerprint
from lora_moe_rl.models.quantised_names import TENSORS, form_of
from lora_moe_rl.models.quantised_weights import read_linear
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.rollout.facts import Dtype
from lora_moe_rl.upstream.versions import VLLM_BUILDS, installed

PACKAGES = ("torch", "megatron-core")
ELEMENTS: dict[str, Element] = {"int4": "int32", "fp8": "float8_e4m3fn", "mxfp4": "uint8"}
ELEMENTS |= {"int4_marlin": "int32", "mxfp4_marlin": "int32"}


@dataclass(frozen=True)
class Held:
    """One side's view of the base held in `folder`: that of `model_dir`, in `dtype`, as engines
    of `rollout` cut it; `lora`: whether these serve adapters; `gpu`: in the memory of GPUs, each
    of which has the part of the engine's rank on it."""

    folder: str
    model_dir: str
    dtype: Dtype
    tp: int
    ep: bool
    lora: bool
    gpu: bool = False

    @classmethod
    def of_run(
        cls, folder: str, model_dir: Path, dtype: Dtype, config: RunConfig, gpu: bool = False
    ) -> Held:
        rollout = config.rollout
        lora = config.refit.mode == "adapter"
        return cls(folder, str(model_dir), dtype, rollout.tp, rollout.ep, lora, gpu)

    @property
    def cut(self) -> ExpertCut:
        """The engine's."""
        return ExpertCut.of_engine(RolloutConfig(tp=self.tp, ep=self.ep))

    @property
    def _config(self) -> dict[str, Any]:
        return read_json(inside(Path(self.model_dir), "config.json"))

    @property
    def form(self) -> Form | None:
        """How the base is quantised; None when it is not."""
        return quantised.form(self._config)

    @property
    def layout(self) -> Form | None:
        """How routed experts are held of a quantised base: on GPUs INT4 and MXFP4 as vLLM lays them
        out there."""
        form = self.form
        return MARLIN.get(form, form) if form and self.gpu else form

    @property
    def _shape(self) -> ModelShape:
        return ModelShape.from_hf_config(self._config)

    def stacks(self) -> list[Stack]:
        return stacks(self._shape, self.cut.pieces, self.layout)

    def dense(self, base: Base) -> dict[str, Dense]:
        """The dense tensors that are held, by name: of a quantised base those that are numbers in
        the checkpoint."""
        found = {one.name: one for one in dense(self._shape, self.tp)}
        names = base.weights.file_of
        packed = {
            name
            for name, one in found.items()
            if any(form_of(base.name(one.layer, module), names) for module in one.modules)
        }
        return {name: one for name, one in found.items() if name not in packed}

    def contents(self, base: Base) -> Contents:
        """Raises FileError or ModelError for a directory that is no model's."""
        tensors = {one.name: Kept(self._element(one), one.shape) for one in self.stacks()}
        tensors |= {name: Kept(self.dtype, one.shape) for name, one in self.dense(base).items()}
        return Contents(self._key(), tensors)

    def _element(self, stack: Stack) -> Element:
        if self.layout is None or (stack.scales and self.form == "int4"):
            return self.dtype
        return "uint8" if stack.scales else ELEMENTS[self.layout]

    def _key(self) -> dict[str, str]:
        found = {name: str(installed(name)) for name in PACKAGES}
        builds = [f"{name} {installed(name)}" for name in VLLM_BUILDS if installed(name)]
        return found | {
            "vllm": ", ".join(builds),
            "model": fingerprint(Path(self.model_dir)),
            "dtype": self.dtype,
            "experts": self.layout or "as numbers",
            "device": "cuda" if self.gpu else "cpu",
            "LoRA": str(self.lora).lower(),
            "rollout.tp": str(self.tp),
            "rollout.ep": str(self.ep).lower(),
        }

    def not_read(self, base: Base) -> Iterator[str]:
        """The checkpoint's names of what engines need not read."""
        for one in self.dense(base).values():
            yield from weights_of(one, base)
        for stack in self.stacks():
            for module in stack.modules if stack.scales else ():
                for expert in range(stack.shape[1]):
                    path = base.name(stack.layer, module, expert)
                    yield f"{path}.{TENSORS[self.form or 'int4'][1]}"

    def open(self) -> Store:
        """Writes the store if nobody has. One that was written from files in another state than
        they are in now is compared with them, all of it. Raises HeldBaseError."""
        base = Base(self.model_dir)
        try:
            state, contents, fill = state_of_files(base), self.contents(base), self.filler(base)
            store = open_store(self.folder, contents, fill, state)
            if state_of_files(base) != state:
                raise HeldBaseError(f"{self.model_dir} was changed while its base was opened")
            if store.source != state:
                _compare(store, fill)
            return store
        finally:
            base.weights.close()

    def share(self, port: Port, rank: int, laid_out: Fill | None = None) -> Owned:
        """Called by rank `rank` of an engine, on its GPU: fills memory that stays its own with its
        part of the base; `laid_out` writes routed experts that vLLM lays out. Raises
        HeldBaseError."""
        base = Base(self.model_dir)
        try:
            everything = [*self.stacks(), *self.dense(base).values()]
            parts = {one.name: engine_part(one, self.tp, self.ep, rank) for one in everything}
            read, experts = self.filler(base, parts), {one.name for one in self.stacks()}

            def fill(name: str, out: torch.Tensor) -> None:
                (laid_out if laid_out and name in experts else read)(name, out)

            return share_store(self.folder, self.contents(base), parts, fill, port)
        finally:
            base.weights.close()

    def map(self, port: Port) -> Mapped:
        """Called on a trainer rank: maps what the engine's rank on its GPU has shared. Raises
        HeldBaseError."""
        base = Base(self.model_dir)
        base.weights.close()
        return map_store(self.folder, self.contents(base), port)

    def filler(self, base: Base, parts: Mapping[str, Box] | None = None) -> Fill:
        """What writes a tensor of the store, by its name; of it a part, None: all."""
        experts, others = {one.name: one for one in self.stacks()}, self.dense(base)

        def write(name: str, out: torch.Tensor) -> None:
            one = experts.get(name) or others[name]
            box = whole(one.shape) if parts is None else parts[name]
            if isinstance(one, Stack):
                fill(base, one, out, box, self.form)
            else:
                fill_dense(base, one, out, box, self.tp)

        return write


def _compare(store: Store, fill: Fill) -> None:
    """Raises HeldBaseError for other values than `fill` gives."""
    for name, kept in store.contents.tensors.items():
        read = torch.empty(kept.shape, dtype=getattr(torch, kept.dtype))
        fill(name, read)
        check_same(name, store[name], read)


def weights_of(one: Dense, base: Base) -> list[str]:
    """The checkpoint's names of what is held as one tensor."""
    return [f"{base.name(one.layer, module)}.weight" for module in one.modules] or [one.name]


def fill_dense(base: Base, one: Dense, out: torch.Tensor, box: Box, tp: int) -> None:
    """Writes a part of a tensor `[rows, columns]` from the checkpoint, and compares it."""
    read = ((name, base.weights.read(name)) for name in weights_of(one, base))
    lay_out(one, out, box, read, tp)


def lay_out(
    one: Dense, out: torch.Tensor, box: Box, parts: Iterable[tuple[str, torch.Tensor]], tp: int
) -> None:
    """Writes a part of the checkpoint's tensors of these names as engines of `tp` ranks hold them:
    rows of one rank after the other. Compares what it has written."""
    rows, columns = (slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
    ways = tp if one.fused_rows else 1
    first = 0  # of a rank's rows, those of this tensor
    for name, read in parts:
        each = len(read) // ways
        cut = read[:, columns] if one.kind == "row" else read
        for way in range(ways):
            place = way * (one.shape[0] // ways) + first
            low, high = max(place, rows.start), min(place + each, rows.stop)
            if low < high:
                here = way * each - place
                put(name, out[low - rows.start : high - rows.start], cut[low + here : high + here])
        first += each
    if ways == 1:
        out[max(0, first - rows.start) :].zero_()  # of a vocabulary that is padded


def fill(base: Base, stack: Stack, out: torch.Tensor, box: Box, form: Form | None = None) -> None:
    """Writes a part of a stack `[pieces, experts, rows, columns]` from the checkpoint, one expert
    at a time, and compares it."""
    pieces, experts, *_ = (range(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
    for i, expert in enumerate(experts):
        to_rows = out[:, i].unflatten(1, (len(stack.modules), -1))
        for j, module in enumerate(stack.modules):
            weight = _stored(base, stack, module, expert, form)
            if stack.cut_rows:
                parts = weight.unflatten(0, (stack.shape[0], -1))
            else:
                parts = weight.unflatten(1, (stack.shape[0], -1)).movedim(1, 0)
            mine = parts[pieces.start : pieces.stop]
            put(base.name(stack.layer, module, expert), to_rows[:, j], mine)


def _stored(base: Base, stack: Stack, module: str, expert: int, form: Form | None) -> torch.Tensor:
    """What is held of a linear `[out, in]`: numbers, packed values or scales."""
    if form is None:
        return base.weight(stack.layer, module, expert)
    path = base.name(stack.layer, module, expert)
    if stack.scales:
        return base.weights.read(f"{path}.{TENSORS[form][1]}")
    return read_linear(base.weights, path, form).data.flatten(1)
