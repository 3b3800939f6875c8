"""LoRA around Megatron-core linears: wrappers that keep the base module as it is.

Shape letters: T tokens of this rank, S sites fused in one base linear, r rank, E local experts.
The A of fused sites is one parameter `[S * r, in]` (`[E, S * r, in]` for experts), so that x is
read once; the B of each site is its own. Parameters are float32 and are cast to the activations'
dtype. How they are cut and summed is read from `adapters/sharding.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel as mtp
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from lora_moe_rl.adapters.sharding import RULES, RankLayout, kind_of
from lora_moe_rl.adapters.spec import Site
from lora_moe_rl.kernels.grouped_linear import grouped_linear

Merge = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class Switch:
    """Turns every adapter of a model on or off: off is the reference policy, without a copy."""

    def __init__(self):
        self.on = True


@dataclass(frozen=True)
class Slice:
    """This rank's part of a canonical tensor: `parameter[index]`, at `start` of the whole."""

    name: str
    parameter: torch.nn.Parameter
    index: tuple[slice, ...]
    start: tuple[int, ...]
    exported: bool


class LoRALinear(torch.nn.Module):
    """`base(x) + merge(scale_i * B_i A_i x)` for the sites fused in one base linear.

    `merge` lays the sites' outputs out as the base's output; a site that is not adapted is None in
    `sites`, and its part of the output stays the base's.
    """

    def __init__(
        self,
        base: torch.nn.Module,
        sites: Sequence[Site | None],
        widths: Sequence[int],
        layout: RankLayout,
        sequence_parallel: bool,
        switch: Switch,
        seed: int,
        merge: Merge | None = None,
    ):
        """`widths`: columns of the base's local output that belong to each of `sites`."""
        super().__init__()
        self.base, self.switch, self.layout = base, switch, layout
        self.places, self.widths = list(sites), list(widths)
        self.sites = [site for site in sites if site is not None]
        self.kind = kind_of(self.sites[0].module)
        self.sequence_parallel = sequence_parallel
        self.merge = merge or (lambda parts: parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        ranks = {site.rank for site in self.sites}
        if len(ranks) != 1:
            raise ValueError(f"fused sites need one rank, got {sorted(ranks)}")
        self.rank = ranks.pop()
        device = next(base.parameters()).device
        self.A = _parameter(
            torch.cat([self._init_A(site, seed) for site in self.sites], dim=-2), device
        )
        self.B = torch.nn.ParameterList(
            _parameter(torch.zeros(self._local("B", site.shape_B)[1]), device)
            for site in self.sites
        )
        self._mark(self.A, "A")
        for parameter in self.B:
            self._mark(parameter, "B")
        if hasattr(base, "return_layernorm_output"):  # Transformer Engine's fused norm and linear
            base.return_layernorm_output = True
            self._normed_by_base = True
        else:
            self._normed_by_base = False

    def forward(self, x: torch.Tensor, *args):
        """As the base: returns (output, bias). args: tokens of each expert, for experts."""
        y, bias = self.base(x, *args)
        if self._normed_by_base:
            y, x = y
        if not self.switch.on:
            return y, bias
        return y + self._delta(x, *args).to(y.dtype), bias

    def _delta(self, x: torch.Tensor, counts=None) -> torch.Tensor:
        if self.kind == "experts":
            counts = list(counts)
            xa = grouped_linear(x, self.A.to(x.dtype), counts)
        else:
            xa = self._across_tp(F.linear(x, self.A.to(x.dtype)))
        parts = iter(zip(self.sites, self.B, xa.split(self.rank, dim=-1), strict=True))
        outs = []
        for place, width in zip(self.places, self.widths, strict=True):
            if place is None:
                outs.append(xa.new_zeros(*xa.shape[:-1], width))
                continue
            site, B, part = next(parts)
            B = (site.scale * B).to(x.dtype)
            if self.kind == "experts":
                outs.append(grouped_linear(part.contiguous(), B, counts))
            else:
                outs.append(F.linear(part, B))
        return self.merge(outs)

    def _across_tp(self, xa: torch.Tensor) -> torch.Tensor:
        """A x of all tokens this rank's B needs; r numbers a token travel, not `in` or `out`."""
        if self.layout.tp_size == 1 or self.kind == "replicated":
            return xa
        if self.kind == "column":
            if self.sequence_parallel:
                return mtp.gather_from_sequence_parallel_region(xa)
            return mtp.copy_to_tensor_model_parallel_region(xa)
        if self.sequence_parallel:
            return mtp.reduce_scatter_to_sequence_parallel_region(xa)
        return mtp.reduce_from_tensor_model_parallel_region(xa)

    def _local(self, tensor: str, shape: tuple[int, ...]):
        return self.layout.local_range(self.kind, tensor, shape)

    def _init_A(self, site: Site, seed: int) -> torch.Tensor:
        """This rank's part of A: uniform in +-1/sqrt(in), as PEFT's default (Kaiming, a=sqrt(5)).

        Drawn whole from a seed of (run, site, global expert), so that it does not depend on the
        layout.
        """
        start, local = self._local("A", site.shape_A)
        bound = 1 / math.sqrt(site.in_features)

        def draw(label: str) -> torch.Tensor:
            digest = hashlib.sha256(f"{seed}/{site.name}/{label}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            shape = site.shape_A[-2:]
            return torch.empty(shape).uniform_(-bound, bound, generator=generator)

        if site.num_experts is not None:
            return torch.stack([draw(str(e)) for e in range(start[0], start[0] + local[0])])
        window = tuple(slice(s, s + n) for s, n in zip(start, local, strict=True))
        return draw("dense")[window]

    def _mark(self, parameter: torch.nn.Parameter, tensor: str) -> None:
        """mcore's own marks: which group sums this gradient, and whether norms count it once."""
        rule = RULES[self.kind][tensor]
        parameter.allreduce = self.kind != "experts"  # False: expert-data-parallel gradients
        parameter.sequence_parallel = rule.sum_over_tp and self.sequence_parallel
        if rule.split is not None:
            set_tensor_model_parallel_attributes(parameter, True, rule.split, 1)

    def slices(self) -> Iterator[Slice]:
        """This rank's parts of the canonical tensors."""
        for i, site in enumerate(self.sites):
            for tensor, shape in (("A", site.shape_A), ("B", site.shape_B)):
                start, _ = self._local(tensor, shape)
                rows = slice(i * self.rank, (i + 1) * self.rank)
                index = (Ellipsis, rows, slice(None)) if tensor == "A" else (Ellipsis,)
                parameter = self.A if tensor == "A" else self.B[i]
                exported = self.layout.exports(self.kind, tensor)
                yield Slice(f"{site.name}.{tensor}", parameter, index, start, exported)


def _parameter(value: torch.Tensor, device) -> torch.nn.Parameter:
    return torch.nn.Parameter(value.to(device=device, dtype=torch.float32).contiguous())


def merge_qkv(groups: int) -> Merge:
    """q, k, v outputs to mcore's fused layout: for each of `groups` local kv heads, its q heads,
    then its k, then its v."""

    def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        grouped = [part.unflatten(-1, (groups, -1)) for part in parts]
        return torch.cat(grouped, dim=-1).flatten(-2)

    return merge
