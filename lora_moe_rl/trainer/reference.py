"""The frozen adapter that a policy is measured against (algorithm.reference=start): the one that
the run started from.

It is a second set of values for the policy's own parameters, in the memory of one more adapter: a
forward under it is the policy's, with other numbers, and its own routers choose. That it is what it
should be is looked at in each step, before the update: while the policy is still the start both
give the same logprobs, on the same routes, and once it has moved away they do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lora_moe_rl.adapters.attach import Adapters
from lora_moe_rl.algorithms.parts.kl import k3
from lora_moe_rl.errors import FrozenStartError
from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.rollout.facts import Dtype

if TYPE_CHECKING:
    from lora_moe_rl.trainer.engine import TrainingEngine, Work
    from lora_moe_rl.trainer.meter import Meter

KL, MOVED = "reference/kl", "reference/moved"
# Mean KL of the start to itself: two forwards of the same numbers. On a GPU the sums of experts'
# outputs may come in another order each time, which bfloat16 shows.
SAME: dict[Dtype, float] = {"float32": 1e-7, "bfloat16": 1e-3}
# Relative size of a change that shows in some logprob even where weights are cast to bfloat16.
SHOWS = 0.01
# A policy that is surer of its tokens than this may have no logprob left that could change.
SURE = 1e-3


class Moved(NamedTuple):
    """Sums of squares over the whole adapter: of what the policy is away from the start, and of the
    start itself."""

    away: float
    size: float


class FrozenAdapter:
    def __init__(self, adapters: Adapters, tensors: Mapping[str, np.ndarray]):
        """`tensors`: whole canonical ones, of which each rank keeps its parts. Raises AdapterError
        for a tensor that is missing or of another shape."""
        self.adapters = adapters
        self.values = [torch.full_like(one.data, torch.nan) for one in adapters.parameters()]
        with self.on():
            adapters.load(tensors)
        self._sum = self._summed()
        if not all(one.isfinite().all() for one in self.values):
            raise FrozenStartError(
                "the adapter that the run starts from is not finite, or does not fill this rank's "
                "part, and cannot be measured against; algorithm.reference=base measures against "
                "the base"
            )

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, the policy's parameters have these values."""
        with self.adapters.holding(self.values):
            yield

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.values)

    def moved(self) -> list[float]:
        """The two of `Moved`, of each element on one rank alone. Raises FrozenStartError when it is
        no longer as it was loaded."""
        if self._summed() != self._sum:
            raise FrozenStartError(
                "the frozen adapter of algorithm.reference=start has been written to since it was "
                "loaded; --resume loads it anew"
            )
        parameters, sums = self.adapters.parameters(), []
        frozen = {id(one): value for one, value in zip(parameters, self.values, strict=True)}
        for s in self.adapters.slices():
            if s.exported:
                value = frozen[id(s.tensor)][s.index]
                both = (s.tensor.detach()[s.index] - value, value)
                sums.append(torch.stack([one.square().sum(dtype=torch.float64) for one in both]))
        return torch.stack(sums).sum(0).tolist() if sums else [0.0, 0.0]

    def _summed(self) -> list[int]:
        """The sum of the bits of each tensor, which does not depend on their order."""
        bits = [one.view(torch.int32).sum(dtype=torch.int64) for one in self.values]
        return torch.stack(bits).tolist() if bits else []


def measure(work: Work, before: torch.Tensor, meter: Meter) -> None:
    """Adds the KL of a micro-batch's tokens in the loss: `before` [T], logprobs of the policy
    before the update."""
    stands = on_device(torch.from_numpy(work.stands), before.device)
    ours, theirs = (one.detach().to(torch.float64) for one in (before, work.known["reference"]))
    for name, values in (("kl", k3(ours, theirs)), ("nll", -ours)):
        meter.add(f"reference {name}", (values.where(stands > 0, 0) * stands).sum())


def moved(engine: TrainingEngine, meter: Meter) -> Moved | None:
    """The same on every rank; None where the policy is measured against the base, or nothing."""
    frozen = engine.frozen_start
    return None if frozen is None else Moved(*meter.all_reduce(frozen.moved()))


def metrics(meter: Meter, moved: Moved, version: int, dtype: Dtype) -> dict[str, float]:
    """`moved`: before the update of `version`. Raises FrozenStartError when the two policies are
    not as far apart as the two adapters say."""
    away, size = moved
    kl, nll, tokens = meter.summed(["reference kl", "reference nll", "tokens"])
    found = {KL: kl / max(tokens, 1.0), MOVED: (away / size) ** 0.5 if size else 0.0}
    check(found, version, dtype, nll / max(tokens, 1.0))
    return found


def check(found: dict[str, float], version: int, dtype: Dtype, nll: float) -> None:
    """`nll`: minus the policy's logprob, mean over tokens. Raises FrozenStartError: see `metrics`.
    NaN is told of elsewhere."""
    kl, moved = found[KL], found[MOVED]
    if version == 0 and moved:
        raise FrozenStartError(
            f"algorithm.reference=start, and before its first update the policy is not the adapter "
            f"that it is measured against: they are {moved:.3g} of its size apart"
        )
    if not moved and kl > SAME[dtype]:
        raise FrozenStartError(
            f"algorithm.reference=start: the policy of version {version} is the adapter that the "
            f"run starts from, and their KL should be 0, and is {kl:.3g} nats a token "
            f"({SAME[dtype]:g} is let pass in {dtype})"
        )
    if moved > SHOWS and kl == 0 and nll > SURE:
        raise FrozenStartError(
            f"algorithm.reference=start: the policy of version {version} has moved away from the "
            f"adapter that the run starts from by {moved:.3g} of its size, and yet every logprob "
            "is the same under both: the KL would be 0 for ever"
        )
