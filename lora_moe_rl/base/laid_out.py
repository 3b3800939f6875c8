"""Routed experts of an engine on a GPU, in no memory but that which others map.

vLLM would take memory for all of them when it makes the model, in pools that give nothing back
before all is loaded: so they are made without (`unallocated`).

INT4 and MXFP4 experts vLLM lays out anew for its Marlin kernels once they are loaded, and what it
makes is what is held. One layer after the other takes memory for itself, is read from the
checkpoint, processed by vLLM, and moved to where it is held; the memory is then the next layer's
(`LaidOut`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from lora_moe_rl.adapters.sharding import Box
from lora_moe_rl.base.held import Held
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.models.quantised_names import TENSORS
from lora_moe_rl.refit.merged_base import Base


@contextmanager
def unallocated(methods: Iterable[type]) -> Iterator[None]:
    """Weights that these methods of vLLM create inside have one element in memory each, whatever
    their shape, until `allocate` or until they are pointed at others."""
    stock = {method: method.create_weights for method in methods}
    try:
        for method, create in stock.items():
            method.create_weights = _without_memory(create)
        yield
    finally:
        for method, create in stock.items():
            method.create_weights = create


def _without_memory(create: Callable) -> Callable:
    def create_weights(method, layer: torch.nn.Module, *args, **kwargs) -> None:
        with torch.device("meta"):
            create(method, layer, *args, **kwargs)
        for name, made in list(layer.named_parameters(recurse=False)):
            if made.is_meta:
                one = torch.empty(1, dtype=made.dtype).expand(made.shape)
                parameter = torch.nn.Parameter(one, requires_grad=False)
                parameter.__dict__.update(made.__dict__)  # how vLLM loads it
                layer.register_parameter(name, parameter)

    return create_weights


def allocate(layer: torch.nn.Module) -> None:
    """Gives the weights memory that have none."""
    for parameter in layer.parameters(recurse=False):
        if parameter.untyped_storage().nbytes() < parameter.nbytes:
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)


class LaidOut:
    """Writes what vLLM makes of routed experts, a tensor at a time, and points vLLM at it."""

    def __init__(
        self,
        model: torch.nn.Module,
        held: Held,
        base: Base,
        layers: Mapping[str, RoutedExperts],
        mine: Box,
    ):
        """`base`: the checkpoint, open until all is written. `layers`: by the name of each tensor
        that is held. `mine`: which pieces and experts of each this worker has."""
        assert held.form is not None
        self.model, self.base, self.layers = model, base, layers
        self.parts = TENSORS[held.form][:2]  # of a linear in the checkpoint: data and scales
        self.stacks = {one.name: one for one in held.stacks()}
        self.experts = range(mine.start[1], mine.start[1] + mine.shape[1])
        self._processed: set[int] = set()

    def __call__(self, name: str, out: torch.Tensor) -> None:
        """`out` `[1, experts, rows, columns]`. Raises HeldBaseError for another shape."""
        layer, last = self.layers[name], name.rpartition(".")[2]
        if id(layer) not in self._processed:
            self._process(layer, self.stacks[name].layer)
            self._processed.add(id(layer))
        parameter = getattr(layer, last)
        made = parameter.data
        if made.shape != out.shape[1:] or made.element_size() != out.element_size():
            raise HeldBaseError(
                f"{name}: vLLM lays it out as {tuple(made.shape)} {made.dtype}, and held is "
                f"{tuple(out.shape[1:])} {out.dtype}; set model.held_once=off"
            )
        place = out[0].view(made.dtype)
        place.copy_(made)
        parameter.data = place

    def _process(self, layer: RoutedExperts, number: int) -> None:
        allocate(layer)
        self.model.load_weights(self._read(number))
        method = layer.quant_method
        method.process_weights_after_loading(layer)
        method.process_weights_after_loading = _nothing  # when vLLM has loaded the rest

    def _read(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        """This worker's experts of a layer of the checkpoint."""
        for module in ("experts.gate", "experts.up", "experts.down"):
            for expert in self.experts:
                path = self.base.name(layer, module, expert)
                for name in (f"{path}.{part}" for part in self.parts):
                    yield name, self.base.weights.read(name)

    def check(self) -> None:
        """Raises HeldBaseError unless vLLM multiplies by what is held, and keeps nothing else."""
        for name, layer in self.layers.items():
            experts = layer.quant_method.moe_kernel.fused_experts
            kept = {"w13_weight_scale": experts.w1_scale, "w2_weight_scale": experts.w2_scale}
            kept |= {"w13_weight": layer.w13_weight, "w2_weight": layer.w2_weight}
            last = name.rpartition(".")[2]
            used = kept[last.removesuffix("_packed")]
            if used.data_ptr() != getattr(layer, last).data_ptr():
                raise HeldBaseError(
                    f"{name}: vLLM multiplies by another copy of it than is held; set "
                    "model.held_once=off"
                )


def _nothing(layer: torch.nn.Module) -> None:
    """It is processed."""
