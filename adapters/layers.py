"""LoRA around Megatron-core linears: wrappers that keep the base module as it is.

Shape letters: T tokens of this rank, r rank, E local experts, R the ranks of fused sites together.
The A of the sites fused in one base linear is one parameter `[R, in]` (`[E, R, in]` for experts,
`[R, in]` again where all experts share it), so that x is read once; the B of each site is its own.
Parameters are float32 and are cast to the activations' dtype. How they are cut over ranks is read
from `adapters/sharding.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel as mtp

from lora_moe_rl.adapters.served import Sum, moved_A, moved_B
from lora_moe_rl.adapters.sharding import RankLayout, kind_of, window
from lora_moe_rl.adapters.spec import Site
from lora_moe_rl.kernels.grouped_lora import grouped_lora

Merge = Callable[[Sequence[torch.Tensor]], torch.Tensor]
Served = tuple[str, tuple[int, ...], torch.Tensor | Sum]  # of a canonical tensor: name, start, part


class Start(Protocol):
    """Where a site's A and B start when they do not start as Kaiming and zero."""

    def tensors(self, site: Site, experts: range | None) -> tuple[np.ndarray, np.ndarray]:
        """(A `[r, in]`, B `[out, r]`), stacked over `experts` where there are any."""
        ...


class Switch:
    """Turns every adapter of a model on or off: off is the reference policy, without a copy.
    `factor` is on top of each site's scale: of an adapter of a lower rank than its place."""

    def __init__(self):
        self.on, self.factor = True, 1.0


@dataclass(frozen=True)
class Slice:
    """This rank's part of a canonical tensor: `tensor[index]`, at `start` of the whole. A part
    that is not trained is a buffer."""

    name: str
    tensor: torch.Tensor
    index: tuple
    start: tuple[int, ...]
    exported: bool
    trained: bool = True


def _device(base: torch.nn.Module) -> torch.device:
    """The device of a linear's weights, which are no parameters where they stay quantised."""
    first = next(base.parameters(), None)
    return base.device if first is None else first.device  # pyright: ignore[reportReturnType]


class LoRALinear(torch.nn.Module):
    """`base(x) + merge(scale_i * B_i A_i x)` for the sites fused in one base linear.

    `merge` lays the sites' outputs out as the base's output; a site that is not adapted is None in
    `places`, and its part of the output stays the base's.
    """

    def __init__(
        self,
        base: torch.nn.Module,
        places: Sequence[Site | None],
        widths: Sequence[int],
        layout: RankLayout,
        switch: Switch,
        seed: int | str,
        start: Start | None = None,
        merge: Merge | None = None,
        kernel: str = "auto",
    ):
        """`widths`: columns of the base's local output that belong to each of `places`. `kernel`:
        of routed experts, see `kernels/grouped_lora`."""
        super().__init__()
        self.base, self.switch, self.layout, self.kernel = base, switch, layout, kernel
        self.places, self.widths = list(places), list(widths)
        self.sites = [site for site in places if site is not None]
        (self.kind,) = {kind_of(site) for site in self.sites}
        self.grouped = self.sites[0].num_experts is not None
        self.side_by_side = merge is None and None not in places
        self.merge = merge or (lambda parts: parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        self.ranks = [site.rank - site.frozen_rank for site in self.sites]
        self.frozen_ranks = [site.frozen_rank for site in self.sites]
        device = _device(base)
        starts = [self._start(site, seed, start) for site in self.sites]
        self.A = _parameter(torch.cat([A for A, _ in starts], dim=-2), device)
        self.B = torch.nn.ParameterList(_parameter(B, device) for _, B in starts)
        if any(self.frozen_ranks):  # the start, taken off again: the function begins as the base's
            self.register_buffer("A0", self.A.detach().clone(), persistent=False)
            for i, B in enumerate(self.B):
                self.register_buffer(f"B0_{i}", -B.detach(), persistent=False)
        # Transformer Engine's fused norm and linear: the adapter reads what the linear reads.
        self.normed_by_base = hasattr(base, "return_layernorm_output")
        if self.normed_by_base:
            base.return_layernorm_output = True

    def forward(self, x: torch.Tensor, *args):
        """As the base: returns (output, bias). args: tokens of each expert, for experts."""
        y, bias, _ = self._forward(x, *args)
        return y, bias

    def _forward(self, x: torch.Tensor, *args):
        """(output, bias, what the linear reads). The base may be another adapter's layer."""
        if isinstance(self.base, LoRALinear):
            y, bias, x = self.base._forward(x, *args)
        else:
            y, bias = self.base(x, *args)
            if self.normed_by_base:
                y, x = y
        if not self.switch.on:
            return y, bias, x
        if self.grouped and self.side_by_side and y.dtype == x.dtype and not y._is_view():
            return self._grouped(x, *args, into=y), bias, x  # no delta to cut, join and add
        return y + self._delta(x, *args).to(y.dtype), bias, x

    def _grouped(
        self, x: torch.Tensor, counts: Sequence[int], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        A, Bs, scales = self._whole_A(), self._whole_B(), self._scales()
        return grouped_lora(x, A, Bs, counts, scales, self.kernel, into=into)

    def _scales(self) -> list[float]:
        return [site.scale * self.switch.factor for site in self.sites]

    def _delta(self, x: torch.Tensor, *args) -> torch.Tensor:
        A, Bs, scales = self._whole_A(), self._whole_B(), self._scales()
        if self.grouped:
            both = self._grouped(x, *args)
            outs = both.split([B.shape[-2] for B in Bs], dim=-1)
        else:
            xa = self._across_tp(F.linear(x, A.to(x.dtype)))
            parts = xa.split([site.rank for site in self.sites], dim=-1)
            outs = [
                F.linear(part, (scale * B).to(x.dtype))
                for part, B, scale in zip(parts, Bs, scales, strict=True)
            ]
        if len(self.places) == len(self.sites):
            return self.merge(outs)
        given = iter(outs)
        return self.merge(
            [
                outs[0].new_zeros(*outs[0].shape[:-1], width) if place is None else next(given)
                for place, width in zip(self.places, self.widths, strict=True)
            ]
        )

    def _whole_A(self) -> torch.Tensor:
        """A of all sites, one after the other, as `served.py` has it."""
        if not any(self.frozen_ranks):
            return self.A
        trained = self.A.split(self.ranks, dim=-2)
        moved = moved_A(self.A, self.A0).value().split(self.ranks, dim=-2)
        return torch.cat([part for pair in zip(trained, moved) for part in pair], dim=-2)

    def _whole_B(self) -> list[torch.Tensor]:
        """B of each site, `[out, rank]`, as `served.py` has it."""
        return [
            torch.cat([moved_B(B, self._minus_B0(i)).value(), self._minus_B0(i)], dim=-1)
            if self.frozen_ranks[i]
            else B
            for i, B in enumerate(self.B)
        ]

    def _minus_B0(self, i: int) -> torch.Tensor:
        return getattr(self, f"B0_{i}")

    def _across_tp(self, xa: torch.Tensor) -> torch.Tensor:
        """A x of all tokens this rank's B needs; r numbers a token travel, not `in` or `out`.

        Experts need nothing: their dispatcher sums the outputs over expert-tensor-parallel ranks.
        """
        if self.layout.tp[1] == 1:
            return xa
        if self.kind == "column":
            return mtp.gather_from_sequence_parallel_region(xa)
        if self.kind == "row":
            return mtp.reduce_scatter_to_sequence_parallel_region(xa)
        return xa

    def _start(self, site: Site, seed: int | str, start: Start | None):
        """This rank's parts of the trained A and B at the start, float32."""
        rank = site.trained_rank
        (of_A,) = self.layout.boxes(site, "A", rank)
        start_A, local_A = of_A.start, of_A.shape
        of_B = self.layout.boxes(site, "B", rank)
        rows = sum(box.shape[-2] for box in of_B)
        local_B = (*of_B[0].shape[:-2], rows, rank)
        if _device(self.base).type == "meta":  # of a model that is planned, not trained
            return torch.empty(local_A, device="meta"), torch.empty(local_B, device="meta")
        if start is None:
            return _kaiming(site, rank, window(start_A, local_A), seed), torch.zeros(local_B)
        experts = range(start_A[0], start_A[0] + local_A[0]) if self.grouped else None
        skip = 1 if self.grouped else 0  # the experts are picked already
        A, B = (torch.from_numpy(np.asarray(t)) for t in start.tensors(site, experts))
        everything = (slice(None),) * skip
        mine = [B[everything + window(box.start, box.shape)[skip:]] for box in of_B]
        return A[everything + window(start_A, local_A)[skip:]], torch.cat(mine, dim=-2)

    def parameters_of(self, tensor: str) -> list[torch.nn.Parameter]:
        return [self.A] if tensor == "A" else list(self.B)

    @torch.no_grad()
    def begin(self, seed: int | str, ranks: Mapping[str, int]) -> None:
        """Starts anew as `seed` starts an adapter of these ranks, by site. What is left of the rank
        is zero in A and B, so that nothing of it ever has a gradient."""
        starts = [self._start(site, seed, None)[0] for site in self.sites]
        for site, A in zip(self.sites, starts, strict=True):
            A[..., ranks[site.name] :, :] = 0
        self.A.copy_(torch.cat(starts, dim=-2))
        for B in self.B:
            B.zero_()

    def slices(self) -> Iterator[Slice]:
        """This rank's parts of the canonical tensors, as a checkpoint has them: each that is
        trained, and then the frozen one of the same rows, if there is one."""
        rows = _spans(self.ranks)
        rows0 = _spans(self.frozen_ranks)
        for i, site in enumerate(self.sites):
            start = self.layout.boxes(site, "A")[0].start
            exported = self.layout.exports(self.kind, "A")
            index = (Ellipsis, rows[i], slice(None))
            yield Slice(f"{site.name}.A", self.A, index, start, exported)
            if site.frozen_rank:
                start = (*start[:-2], self.ranks[i], start[-1])
                index = (Ellipsis, rows0[i], slice(None))
                yield Slice(f"{site.name}.A", self.A0, index, start, exported, trained=False)
            yield from self._slices_of_B(i, site)

    def _slices_of_B(self, i: int, site: Site) -> Iterator[Slice]:
        exported, name = self.layout.exports(self.kind, "B"), f"{site.name}.B"
        boxes = self.layout.boxes(site, "B")
        for rows, box in zip(_spans([box.shape[-2] for box in boxes]), boxes, strict=True):
            index = (Ellipsis, rows, slice(None)) if len(boxes) > 1 else (Ellipsis,)
            yield Slice(name, self.B[i], index, box.start, exported)
            if site.frozen_rank:
                start = (*box.start[:-1], self.ranks[i])
                minus_B0 = self._minus_B0(i)
                yield Slice(name, minus_B0, index, start, exported, trained=False)

    def served(self) -> Iterator[Served]:
        """The same, as they are served."""
        slices = self.slices()
        for s in slices:
            first = s.tensor.detach()[s.index]
            if not any(self.frozen_ranks):
                yield s.name, s.start, first
                continue
            frozen = next(slices)
            second = frozen.tensor.detach()[frozen.index]
            is_A = s.name.endswith(".A")
            yield s.name, s.start, first if is_A else moved_B(first, second)
            yield s.name, frozen.start, moved_A(first, second) if is_A else second


def _kaiming(site: Site, rank: int, where: tuple[slice, ...], seed: int | str) -> torch.Tensor:
    """A part of A: uniform in +-1/sqrt(in), as PEFT's default (Kaiming, a=sqrt(5)).

    Drawn whole from a seed of (run, site, global expert), so that it does not depend on the layout.
    """
    bound = 1 / math.sqrt(site.in_features)

    def draw(label: str) -> torch.Tensor:
        digest = hashlib.sha256(f"{seed}/{site.name}/{label}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.empty(rank, site.in_features).uniform_(-bound, bound, generator=generator)

    if len(where) == 2:
        return draw("dense")[where]
    experts = range(where[0].start, where[0].stop)
    return torch.stack([draw(str(expert))[where[1:]] for expert in experts])


def _parameter(value: torch.Tensor, device) -> torch.nn.Parameter:
    """A copy: a part of a larger tensor would keep all of it in memory."""
    value = value.to(device=device, dtype=torch.float32)
    return torch.nn.Parameter(value.clone(memory_format=torch.contiguous_format))


def _spans(sizes: Sequence[int]) -> list[slice]:
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def merge_qkv(groups: int, gated: int = 0, fused: Sequence[int] = ()) -> Merge:
    """q, k, v outputs to mcore's fused layout: for each of `groups` local kv heads, its q heads,
    then its k, then its v. `gated`: the size of heads where q has of each its query and the gate of
    its output; mcore has the queries of a group, then their gates. `fused`: the columns of q, k and
    v, where one site has all three."""

    def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        apart = parts[0].split(fused, dim=-1) if fused else parts
        grouped = [part.unflatten(-1, (groups, -1)) for part in apart]
        if gated:
            grouped[0] = grouped[0].unflatten(-1, (-1, 2, gated)).transpose(-3, -2).flatten(-3)
        return torch.cat(grouped, dim=-1).flatten(-2)

    return merge


def merge_delta(dims: Mapping[str, int], tp: int) -> Merge:
    """in_proj_qkvz and in_proj_ba outputs, by key head, to mcore's fused layout: all local queries,
    keys, values, output gates, betas, decays."""
    heads = dims["linear_key_heads"] // tp
    of_each = dims["linear_value_heads"] // dims["linear_key_heads"]  # value heads of a key head
    key, value = dims["linear_key_dim"], of_each * dims["linear_value_dim"]
    sizes = ((key, key, value, value), (of_each, of_each))

    def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        by_kind = (
            piece
            for part, widths in zip(parts, sizes, strict=True)
            for piece in part.unflatten(-1, (heads, -1)).split(widths, dim=-1)
        )
        return torch.cat([piece.flatten(-2) for piece in by_kind], dim=-1)

    return merge
