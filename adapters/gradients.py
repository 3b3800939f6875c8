"""Gradients of the adapters: kept flat, summed over ranks by the table, and their norm.

Each (kind, A or B) of `adapters/sharding.py` has one flat float32 buffer, into which autograd
accumulates. Those that are summed over the same axes lie one after the other, so that a sum over an
axis is one collective for all of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from lora_moe_rl.adapters.layers import LoRALinear
from lora_moe_rl.adapters.sharding import Axis, Kind, RankLayout
from lora_moe_rl.adapters.value_head import ValueHead
from lora_moe_rl.errors import AdapterError

# Of the hash that copies are compared by: values at a time, whose 64-bit products a core's cache
# holds (with four times as many a CPU takes nine times as long), and the point of its polynomial.
CHUNK = 2**18
POINT = 0x5851F42D4C957F2D


def current_layout() -> RankLayout:
    """This process's place in Megatron's groups."""

    def place(axis: Axis) -> tuple[int, int]:
        group = group_of(axis)
        return dist.get_rank(group), dist.get_world_size(group)

    return RankLayout(**{axis: place(axis) for axis in ("tp", "dp", "ep", "etp", "expert_dp")})


def group_of(axis: Axis) -> dist.ProcessGroup:
    if axis == "tp":
        return ps.get_tensor_model_parallel_group()
    if axis == "dp":
        return ps.get_data_parallel_group(with_context_parallel=True)
    if axis == "ep":
        return ps.get_expert_model_parallel_group()
    if axis == "etp":
        return ps.get_expert_tensor_parallel_group()
    return ps.get_expert_data_parallel_group()


class Gradients:
    """`p.grad` of every adapter parameter of this rank, as views of flat buffers."""

    def __init__(self, layers: Iterable[LoRALinear | ValueHead], layout: RankLayout):
        self.layout = layout
        self.parameters: dict[tuple[Kind, str], list[torch.nn.Parameter]] = {}
        for kind in layout.table:
            for tensor in ("A", "B"):
                mine = [p for x in layers if x.kind == kind for p in x.parameters_of(tensor)]
                if mine:
                    self.parameters[kind, tensor] = mine
        in_turn = sorted(self.parameters, key=self._axes)  # what is summed alike is neighbours
        self.whole, spans = _buffer([self.parameters[key] for key in in_turn])
        self.spans = dict(zip(in_turn, spans, strict=True))
        self.flat = {key: self.whole[self.spans[key]] for key in self.parameters}

    def _axes(self, key: tuple[Kind, str]) -> tuple[Axis, ...]:
        kind, tensor = key
        return self.layout.table[kind][tensor].reduce

    def zero(self) -> None:
        self.whole.zero_()

    def reduce(self) -> None:
        """Sums over ranks as the table says. All ranks of a stage call it together."""
        self._check_views()
        for axes, alike in itertools.groupby(self.spans, self._axes):
            spans = [self.spans[key] for key in alike]
            flat = self.whole[spans[0].start : spans[-1].stop]
            for axis in axes:
                if self.layout.place(axis)[1] > 1:
                    dist.all_reduce(flat, group=group_of(axis))

    def scale(self, factor: float | torch.Tensor) -> None:
        self.whole.mul_(factor)

    def norm(self) -> float:
        """The norm of the whole adapter's gradient: every element counts once. It is the same on
        all ranks, and NaN or infinite when any element of any rank is."""
        mine = [
            flat for (kind, tensor), flat in self.flat.items() if self.layout.exports(kind, tensor)
        ]
        squares = [torch.linalg.vector_norm(flat, dtype=torch.float64) ** 2 for flat in mine]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        device = next(iter(self.flat.values())).device if self.flat else _default_device()
        total = total.to(device)
        dist.all_reduce(total)
        square = total.item()
        return math.sqrt(square) if math.isfinite(square) else float("nan")

    @torch.no_grad()
    def check_copies(self) -> None:
        """Raises AdapterError when ranks that must hold the same parameters hold others: a gradient
        was not summed where it must be. All ranks of a stage call it together."""
        keys, axes = list(self.flat), ("tp", "dp", "ep", "etp", "expert_dp")
        shared = [axis for axis in axes if self.layout.place(axis)[1] > 1]
        if not keys or not shared:
            return
        sums = torch.stack([_digest(self.parameters[key]) for key in keys])
        for axis in shared:
            rows = [i for i, key in enumerate(keys) if self.layout.copied_over(*key, axis)]
            if not rows:
                continue
            both = torch.stack([sums[rows], ~sums[rows]])  # ~ turns the order of integers round
            dist.all_reduce(both, op=dist.ReduceOp.MIN, group=group_of(axis))
            low, high = both[0].tolist(), (~both[1]).tolist()
            differing = [keys[row] for row, a, b in zip(rows, low, high, strict=True) if a != b]
            if differing:
                names = ", ".join(f"{kind}.{tensor}" for kind, tensor in differing)
                raise AdapterError(
                    f"the ranks of {axis} hold different copies of {names}: gradients were not "
                    "summed over it; go back to the last checkpoint and run `verify layout`"
                )

    def _check_views(self) -> None:
        for key, mine in self.parameters.items():
            low = self.flat[key].data_ptr()
            high = low + self.flat[key].nbytes
            for parameter in mine:
                if parameter.grad is None or not low <= parameter.grad.data_ptr() < high:
                    raise AdapterError(
                        f"a gradient of {'.'.join(key)} left its buffer: do not set p.grad to None"
                    )


def _buffer(lists: Sequence[list[torch.nn.Parameter]]) -> tuple[torch.Tensor, list[slice]]:
    """A buffer for the gradients of all these parameters, which get them there, and the span of it
    that is each list's."""
    every = [parameter for parameters in lists for parameter in parameters]
    sizes = [parameter.numel() for parameter in every]
    device = every[0].device if every else _default_device()
    whole = torch.zeros(sum(sizes), device=device)
    for parameter, view in zip(every, whole.split(sizes) if every else (), strict=True):
        parameter.grad = view.view_as(parameter)
    ends = list(itertools.accumulate(sum(p.numel() for p in parameters) for parameters in lists))
    return whole, [slice(*ends) for ends in itertools.pairwise([0, *ends])]


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd random int64 `[CHUNK]`, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    low, high = -(2**63), 2**63 - 1
    return (torch.randint(low, high, (CHUNK,), generator=generator) | 1).to(device)


def _digest(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """A hash of all bits in their places, int64 `[]`, without leaving the device: float32 values as
    integers, weighted by place, and the sums of chunks taken as a polynomial, modulo 2^64."""
    total = None
    for parameter in parameters:
        for bits in parameter.detach().contiguous().view(torch.int32).flatten().split(CHUNK):
            part = (bits * _weights(bits.device)[: len(bits)]).sum()
            total = part if total is None else total * POINT + part
    return total


def _default_device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
