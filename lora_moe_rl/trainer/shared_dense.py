"""Linears, embedding and head that trainer and engines hold once: a rank makes no copy of them.

Megatron's model is built, and before Megatron-Bridge loads the rest its linears are pointed at the
store, which verifies its bytes. Bridge maps the numbers of rows in their place (`row_numbers.py`).
Where rows are held in another order than Megatron's, as q, k and v are, the linear's output is put
into Megatron's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from megatron.core import tensor_parallel as mtp

from lora_moe_rl.adapters.sharding import FUSED
from lora_moe_rl.base.dense import EMBEDDING, HEAD, Dense
from lora_moe_rl.base.shared import Shared
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.trainer.local_modules import ReplicatedLinear
from lora_moe_rl.trainer.row_numbers import NUMBERED, RowNumbers

Order = Callable[[torch.Tensor], torch.Tensor]
LINEARS = (mtp.ColumnParallelLinear, mtp.RowParallelLinear)


class SharedDense:
    """Those of one rank."""

    def __init__(self, shared: Shared):
        self.shared, self.base = shared, Base(shared.held.model_dir)
        self.base.weights.close()
        self.numbers = RowNumbers(self.base, shared.held.tp)
        self.orders: dict[torch.nn.Module, Order] = {}

    def place(self, provider, hf_config) -> None:
        """The models that Bridge's provider builds take what is held, before they are loaded.
        `hf_config`: by which Bridge knows what it need not load."""
        setattr(hf_config, NUMBERED, self.numbers)

        def take(models: list[torch.nn.Module]) -> list[torch.nn.Module]:  # no method: a copy of
            self.take(models)  # the provider would copy its object too
            return models

        provider.register_pre_wrap_hook(take, prepend=True)

    def take(self, models: Sequence[torch.nn.Module]) -> None:
        """Raises HeldBaseError for bytes that are not those that were written, and for a linear
        that is not as what is held of it."""
        for model in models:
            self._take_vocabulary(model)
            self._take_linears(model)

    def finish(self) -> None:
        """Once the rest is loaded. Raises HeldBaseError for what Bridge would lay out otherwise."""
        self.numbers.check()
        for linear, order in self.orders.items():
            if (bias := getattr(linear, "bias", None)) is not None:
                places = order(torch.arange(len(bias), device=bias.device))
                bias.data = bias.data[places.argsort()]

    def _take_vocabulary(self, model: torch.nn.Module) -> None:
        for name, module in _vocabulary(model):
            if one := self.shared.dense.get(name):
                box = self.shared.box(one)
                adopt(name, module, self.shared.store.part(name, box))
                self.numbers.take(name, module, module, self.numbers.part(one, box))

    def _take_linears(self, model: torch.nn.Module) -> None:
        by_module = {(o.layer, m): o for o in self.shared.dense.values() for m in o.modules}
        for layer, number, path, modules in _linears(model):
            one = by_module.get((number, modules[0]))
            if one is None:
                continue
            built = linear = layer.get_submodule(path)
            if not isinstance(built, LINEARS):
                raise HeldBaseError(
                    f"{one.name}: Megatron has it otherwise ({type(built).__name__}); set "
                    "model.held_once=off"
                )
            box = self.shared.box(one, modules)
            part, numbers = self.shared.store.part(one.name, box), self.numbers.part(one, box)
            rank, ways = self.shared.at.tp
            order = _order(one, self.base, self.shared.held.tp, ways)
            if one.kind == "replicated" and ways > 1:
                # Megatron cuts it into rows; whole, it is another module.
                linear = ReplicatedLinear(part)
                layer.set_submodule(path, linear)
                numbers = numbers.chunk(ways)[rank]
            else:
                adopt(one.name, linear, part, order)
            if order is not None:
                self.orders[linear], numbers = order, order(numbers)
            self.numbers.take(one.name, linear, built, numbers)


def _vocabulary(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The embedding and the head, on the stages that have them."""
    if hasattr(model, "embedding"):
        yield EMBEDDING, model.embedding.word_embeddings
    if hasattr(model, "output_layer"):
        yield HEAD, model.output_layer


def _linears(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, int, str, tuple[str, ...]]]:
    """(layer, its global number, path of a linear in it, canonical modules)."""
    for layer in model.decoder.layers:
        found = dict(layer.named_modules())
        for path, modules in FUSED.items():
            if path in found and not modules[0].startswith("experts."):
                yield layer, layer.layer_number - 1, path, modules


def _order(one: Dense, base: Base, engine_tp: int, ways: int) -> Order | None:
    """What puts the output of one of `ways` ranks into Megatron's order; None where it is in it."""
    if not one.fused_rows:
        return None
    pieces = engine_tp // ways
    dims = base.shape.modules(one.layer)
    sizes = [dims[module][1] // engine_tp for module in one.modules]
    if "k_proj" in one.modules:
        groups = base.shape.dims["kv_heads"] // engine_tp
        return partial(by_group, sizes=sizes, pieces=pieces, groups=groups)
    return partial(by_module, sizes=sizes, pieces=pieces) if pieces > 1 else None


def by_group(y: torch.Tensor, sizes: list[int], pieces: int, groups: int) -> torch.Tensor:
    """`pieces` times q, k and v of `groups` groups -> q, k and v of each group."""
    parts = y.unflatten(-1, (pieces, -1)).split(sizes, dim=-1)
    return torch.cat([part.unflatten(-1, (groups, -1)) for part in parts], dim=-1).flatten(-3)


def by_module(y: torch.Tensor, sizes: list[int], pieces: int) -> torch.Tensor:
    """`pieces` times gate and up -> gate, then up."""
    parts = y.unflatten(-1, (pieces, -1)).split(sizes, dim=-1)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)


def adopt(
    name: str, linear: torch.nn.Module, held: torch.Tensor, order: Order | None = None
) -> None:
    """Points a linear at what is held. Raises HeldBaseError for one of another shape or dtype."""
    weight = linear.weight
    if held.shape != weight.shape or held.dtype != weight.dtype:
        raise HeldBaseError(
            f"{name}: Megatron wants {tuple(weight.shape)} {weight.dtype}, and held is "
            f"{tuple(held.shape)} {held.dtype}; set model.held_once=off"
        )
    linear.weight.data = held
    if order is not None:
        linear.register_forward_hook(lambda module, args, output: (order(output[0]), output[1]))
