"""Puts adapters on a Megatron-core model, and reads and writes them in canonical form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch

from lora_moe_rl.adapters.families import Dims
from lora_moe_rl.adapters.gradients import Gradients, current_layout
from lora_moe_rl.adapters.layers import (
    LoRALinear,
    Served,
    Slice,
    Start,
    Switch,
    merge_delta,
    merge_qkv,
)
from lora_moe_rl.adapters.sharding import FUSED, window
from lora_moe_rl.adapters.shards import Shard
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.adapters.value_head import ValueHead
from lora_moe_rl.errors import AdapterError


class Adapters:
    """All adapters of this rank's part of the model."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        spec: AdapterSpec,
        seed: int | str,
        start: Start | None = None,
        kernel: str = "auto",
        head: ValueHead | None = None,
    ):
        """Freezes the model (one chunk, or several under virtual pipelining) and wraps the linears
        of the spec's sites; adapters that the model has already stay as they are, and stand below.
        `start`: where A and B begin, if not as Kaiming and zero. `kernel`: of routed experts (auto,
        triton, torch). `head`: is trained with the adapters, and on and off with them. Raises
        AdapterError when a site of one of this rank's layers has no linear to sit on."""
        self.spec, self.seed, self.start, self.kernel = spec, seed, start, kernel
        self.switch = Switch()
        self.layout = current_layout()
        self.layers: list[LoRALinear | ValueHead] = []
        wanted = set()
        for chunk in chunks:
            for parameter in _frozen(chunk):
                parameter.requires_grad_(False)
            if chunk.config.tensor_model_parallel_size > 1 and not chunk.config.sequence_parallel:
                raise AdapterError("adapters under tensor parallelism need sequence_parallel=True")
            for layer in chunk.decoder.layers:
                number = layer.layer_number - 1
                wanted |= {site.name for site in spec if site.layer == number}
                self._wrap_layer(layer, number)
        placed = {site.name for lora in self.layers for site in lora.sites}
        if missing := sorted(wanted - placed):
            raise AdapterError(f"the model has no linear for {', '.join(missing)}")
        if head is not None:
            head.switch = self.switch
            self.layers.append(head)
        self.gradients = Gradients(self.layers, self.layout)

    def _wrap_layer(self, layer: torch.nn.Module, number: int) -> None:
        there = self.spec.shape.modules(number)
        for path, modules in FUSED.items():
            modules = [m for m in modules if m in there]
            places = [self.spec.by_name.get(f"layers.{number}.{m}") for m in modules]
            if not any(place is not None for place in places):
                continue
            parent_path, _, name = path.rpartition(".")
            try:
                parent = layer.get_submodule(parent_path)
                base = parent.get_submodule(name)
            except AttributeError:
                continue
            lora = LoRALinear(
                base,
                places,
                self._widths(path, [there[module] for module in modules]),
                self.layout,
                self.switch,
                self.seed,
                self.start,
                self._merge(path, modules),
                self.kernel,
            )
            setattr(parent, name, lora)
            self.layers.append(lora)

    def _widths(self, path: str, dims: Sequence[Dims]) -> list[int]:
        """This rank's output columns of each module fused in the linear at `path`."""
        whole = path.endswith(("linear_fc2", "linear_proj", "out_proj", "_down_proj"))
        axis = "etp" if path.startswith("mlp.experts") else "tp"
        ways = 1 if whole else self.layout.place(axis)[1]
        return [outputs // ways for _, outputs, _ in dims]

    def _merge(self, path: str, modules: Sequence[str]):
        shape, tp = self.spec.shape, self.layout.tp[1]
        if "in_proj_qkvz" in modules:
            return merge_delta(shape.dims, tp)
        if path.endswith("linear_qkv"):
            gated = shape.family.attention == "gated_gqa"
            fused = [rows // tp for module in modules for rows in shape.blocks(module)]
            groups, head = shape.dims["kv_heads"] // tp, shape.dims["head_dim"]
            return merge_qkv(groups, head if gated else 0, fused)
        return None

    def slices(self) -> Iterator[Slice]:
        for lora in self.layers:
            yield from lora.slices()

    def served(self) -> Iterator[Served]:
        """This rank's parts of the canonical tensors, as they are served and exported."""
        for lora in self.layers:
            yield from lora.served()

    @contextmanager
    def off(self):
        """Inside, the model is its frozen base: the reference policy."""
        self.switch.on = False
        try:
            yield
        finally:
            self.switch.on = True

    @contextmanager
    def holding(self, values: Sequence[torch.Tensor]):
        """Inside, what is trained has other values, which are neither copied nor kept: one tensor
        of its shape, dtype and device for each of `parameters`."""
        parameters = self.parameters()
        own = [parameter.data for parameter in parameters]
        try:
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data = value
            yield
        finally:
            for parameter, value in zip(parameters, own, strict=True):
                parameter.data = value

    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [p for lora in self.layers for t in ("A", "B") for p in lora.parameters_of(t)]

    def parameters_of(self, matrix: Literal["A", "B"]) -> list[torch.nn.Parameter]:
        """What is trained of one of the two matrices."""
        return [p for lora in self.layers for p in lora.parameters_of(matrix)]

    def export(self, of=None) -> list[Shard]:
        """This rank's shards, float32 copies on the host. `of` maps a trained parameter to a tensor
        of its shape, as its gradient or an optimizer state; those have no shards of what is not
        trained."""
        shards = []
        for s in self.slices():
            if not s.exported or (of is not None and not s.trained):
                continue
            tensor = s.tensor if of is None else of(s.tensor)
            data = tensor.detach()[s.index].to("cpu", copy=True).numpy()
            shards.append(Shard(s.name, s.start, data))
        return shards

    @torch.no_grad()
    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Writes this rank's parts of whole canonical tensors. Raises AdapterError for a missing
        tensor or one of another shape."""
        for s in self.slices():
            target = s.tensor.detach()[s.index]
            if s.name not in tensors:
                raise AdapterError(f"tensor {s.name} is missing")
            part = np.ascontiguousarray(tensors[s.name][window(s.start, tuple(target.shape))])
            if part.shape != target.shape:
                raise AdapterError(
                    f"tensor {s.name}: shape {tensors[s.name].shape} does not hold "
                    f"{tuple(target.shape)} at {s.start}"
                )
            target.copy_(torch.from_numpy(part))


def _frozen(chunk: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters of the base."""
    adapters = [module for module in chunk.modules() if isinstance(module, LoRALinear)]
    trained = {id(p) for lora in adapters for p in (lora.A, *lora.B)}
    return (p for p in chunk.parameters() if id(p) not in trained)
