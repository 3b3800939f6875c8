"""What rounding leaves of an adapter's change, and rounding that takes nothing of it away.

A change smaller than half a step of the weight's dtype is lost when each sum goes to its nearest
neighbour: in bfloat16, of changes of a thousandth of the weights about half arrives, of a ten
thousandth a sixteenth. Stochastic rounding goes up or down with probabilities such that the mean of
the result is the sum itself. Its noise is larger, and of no direction.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic"]


@dataclass
class Arrived:
    """Sums of squares over a tensor. W is the base, D the change that was wanted, R the result:
    `error` of R - (W + D), `value` of W + D, `change` of D, `got` of R - W."""

    error: float = 0.0
    value: float = 0.0
    change: float = 0.0
    got: float = 0.0

    def add(self, other: Arrived) -> None:
        self.error += other.error
        self.value += other.value
        self.change += other.change
        self.got += other.got

    @property
    def relative(self) -> float:
        """||error|| / ||W + D||"""
        return math.sqrt(self.error / self.value) if self.value else 0.0

    @property
    def error_over_change(self) -> float:
        """||error|| / ||D||; infinite where something changed that was not to."""
        if self.change:
            return math.sqrt(self.error / self.change)
        return math.inf if self.error else 0.0

    @property
    def cosine(self) -> float:
        """Between R - W and D; 1 where both are nothing, 0 where one is."""
        if self.change and self.got:
            return self._product / math.sqrt(self.change * self.got)
        return float(not self.change and not self.got)

    @property
    def lost(self) -> float:
        """|1 - <R - W, D> / <D, D>|: the share of the change that is not there. Noise that has
        nothing to do with D does not count here, but in `error_over_change`."""
        if self.change:
            return abs(1 - self._product / self.change)
        return math.inf if self.error else 0.0

    @property
    def _product(self) -> float:
        """<R - W, D>, as ||(R - W) - D||^2 has it."""
        return (self.got + self.change - self.error) / 2

    def __str__(self) -> str:
        return (
            f"{self.lost:.1%} of the change lost, error / change {self.error_over_change:.2g}, "
            f"cosine {self.cosine:.2f}"
        )


def measure(before: Tensor, change: Tensor, after: Tensor) -> Arrived:
    """`before` W, `change` D, both float32 and used up (memory is what this costs), and `after` R,
    of one shape."""
    got = after.to(torch.float32, copy=True).sub_(before)
    sums = {"got": _square(got), "change": _square(change)}
    sums["value"] = _square(before.add_(change))
    return Arrived(error=_square(got.sub_(change)), **sums)


def seed_of(*parts: str | int) -> int:
    """64 bits that depend on all parts, the same in every process and on every machine."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def round_to(
    value: Tensor, dtype: torch.dtype, rounding: Rounding = "nearest", seed: int = 0, first: int = 0
) -> Tensor:
    """`value`, float32, in `dtype`: float32, bfloat16 or float16.

    Stochastic: what lies at `fraction` of the way from one neighbour to the next goes to the next
    with that probability, what `dtype` can hold stays, and beyond its largest is infinity. The
    numbers drawn depend on `seed` and on an element's place, `first` that of the first element, so
    that rows may be rounded apart.
    """
    if rounding == "nearest" or dtype == torch.float32:
        return value.to(dtype)
    limits = torch.finfo(dtype)
    dropped = 23 + round(math.log2(limits.eps))  # bits of float32's mantissa
    noise = _bits(value.shape, seed, first, value.device).bitwise_and_((1 << dropped) - 1)
    if dtype == torch.bfloat16:  # has float32's exponents
        cut = _cut(noise.add_(value.view(torch.int32)), dropped)
        return torch.where(value.isnan(), value, cut).to(dtype)
    # Below the smallest normal number steps are as wide as just above it: one is added meanwhile.
    size = value.abs()
    shift = (size < limits.smallest_normal) * limits.smallest_normal
    cut = _cut(noise.add_((size + shift).view(torch.int32)), dropped) - shift
    return torch.where(value.isfinite(), cut.copysign(value), value).to(dtype)


def _cut(bits: Tensor, dropped: int) -> Tensor:
    """The float32 of these bits, without the last ones. In place."""
    return bits.bitwise_and_(-(1 << dropped)).view(torch.float32)


def _bits(shape: torch.Size, seed: int, first: int, device: torch.device) -> Tensor:
    """A random int32 for each place, by arithmetic alone: a GPU and a CPU draw the same."""
    key = seed_of(seed)  # neighbouring seeds are no neighbours then
    low, high = (_signed(part & 0xFFFFFFFF) for part in (key, key >> 32))
    number = torch.arange(first, first + shape.numel(), device=device, dtype=torch.int32)
    return _mixed(number.bitwise_xor_(low).add_(high)).view(shape)


def _mixed(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer (fmix32, Austin Appleby), in int32 that wraps. Every bit of
    the result depends on every bit of x. In place."""
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x ^= (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
        x *= _signed(factor)
    return x


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


def _square(value: Tensor) -> float:
    """The sum of squares: of a row in float32, of rows in float64."""
    return float(torch.linalg.vector_norm(value, dim=-1).double().square().sum())
