"""Linears, embedding and head that trainer and engines hold once.

Megatron-Bridge has loaded them; each is compared with what is held, bit for bit, and gives way to
it. Where rows are held in another order than Megatron's, as q, k and v are, the linear's output is
put into Megatron's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel as mtp

from lora_moe_rl.adapters.sharding import FUSED
from lora_moe_rl.base.dense import EMBEDDING, HEAD, Dense
from lora_moe_rl.base.same import check_same
from lora_moe_rl.base.shared import Shared
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.trainer.local_modules import ReplicatedLinear

Order = Callable[[torch.Tensor], torch.Tensor]
LINEARS = (mtp.ColumnParallelLinear, mtp.RowParallelLinear, ReplicatedLinear)


def share(chunks: Sequence[torch.nn.Module], shared: Shared) -> None:
    """Raises HeldBaseError for other values than are held."""
    base = Base(shared.held.model_dir)
    base.weights.close()
    for chunk in chunks:
        model = getattr(chunk, "module", chunk)
        share_vocabulary(model, shared)
        _share_linears(model, shared, base)


def share_vocabulary(model: torch.nn.Module, shared: Shared) -> None:
    for name, linear in _vocabulary(model):
        if name in shared.dense:
            rows = len(linear.weight)
            first = ps.get_tensor_model_parallel_rank() * rows
            adopt(name, linear, shared.store[name][first : first + rows])


def _share_linears(model: torch.nn.Module, shared: Shared, base: Base) -> None:
    by_module = {(one.layer, m): one for one in shared.dense.values() for m in one.modules}
    for layer, modules, linear in _linears(model):
        if one := by_module.get((layer, modules[0])):
            part = _part(shared, one, modules, base)
            adopt(one.name, linear, part, _order(one, base, shared.held.tp))


def _vocabulary(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Of the stage that has them."""
    if hasattr(model, "embedding"):
        yield EMBEDDING, model.embedding.word_embeddings
    if hasattr(model, "output_layer"):
        yield HEAD, model.output_layer


def _linears(model: torch.nn.Module) -> Iterator[tuple[int, tuple[str, ...], torch.nn.Module]]:
    """(global layer, canonical modules, linear)."""
    for layer in model.decoder.layers:
        found = dict(layer.named_modules())
        for path, modules in FUSED.items():
            if isinstance(linear := found.get(path), LINEARS):
                yield layer.layer_number - 1, modules, linear


def _part(shared: Shared, one: Dense, modules: Sequence[str], base: Base) -> torch.Tensor:
    """This rank's `[rows, columns]` of `modules`, which are all of `one` or some of its rows."""
    whole = shared.store[one.name]
    if one.kind == "replicated":
        rows = [base.shape.modules(one.layer)[module][1] for module in one.modules]
        first = one.modules.index(modules[0])
        return whole.split(rows)[first]
    ways, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    return whole.chunk(ways, dim=0 if one.kind == "column" else 1)[rank]


def _order(one: Dense, base: Base, engine_tp: int) -> Order | None:
    """What puts a rank's output into Megatron's order; None where it is in it."""
    if not one.fused_rows:
        return None
    pieces = engine_tp // ps.get_tensor_model_parallel_world_size()
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
    """Points a linear at what is held, once it is seen to be the same. Raises HeldBaseError."""
    check_same(name, held if order is None else order(held.t()).t(), linear.weight)
    linear.weight.data = held
    if order is None:
        return
    if (bias := getattr(linear, "bias", None)) is not None:
        places = order(torch.arange(len(bias)))
        bias.data = bias.data[places.argsort()]
    linear.register_forward_hook(lambda module, args, output: (order(output[0]), output[1]))
