"""The policy beside its teacher's likeliest tokens, where the head has a few rows of logits.

    shares of all tokens ──> those of the likeliest, by themselves; the sum of the others
    Divergence.of        ──> how far apart, and what each logprob is worth to that
                         ──> what each logit is worth to it

The sum of the others is made of them alone: what is left of 1 would be rounding where a policy is
sure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from lora_moe_rl.algorithms.parts.divergence import LEAST, Divergence, with_rest
from lora_moe_rl.kernels.backend import on_device


class TeacherTokens(NamedTuple):
    """ids int64 `[T, K]` and logprobs float32 `[T, K]`, a teacher's likeliest tokens at each
    place, and what the policy is compared with them by."""

    divergence: Divergence
    ids: torch.Tensor
    logprobs: torch.Tensor

    @classmethod
    def of(
        cls,
        divergence: Divergence,
        likeliest: tuple[np.ndarray, np.ndarray],
        vocab_size: int,
        device: torch.device,
    ) -> TeacherTokens:
        """likeliest: ids and logprobs. Raises ValueError for tokens that the policy has not."""
        ids, logprobs = likeliest
        if (outside := ids[(ids < 0) | (ids >= vocab_size)]).size:
            raise ValueError(
                f"the teacher's likeliest tokens have the id {outside[0]}, and the policy's "
                f"vocabulary has {vocab_size}: it has another vocabulary (algorithm.teacher_model)"
            )
        every = (
            torch.from_numpy(one.reshape(len(one), -1)) for one in (ids.astype("i8"), logprobs)
        )
        return cls(divergence, *(on_device(one, device) for one in every))

    def at(self, rows: torch.Tensor) -> TeacherTokens:
        """Those of some places."""
        return self._replace(ids=self.ids[rows], logprobs=self.logprobs[rows])


class Compared:
    """A few rows: `logits` float32 `[R, V / tp]` are less the largest of each; `places` and `here`
    int64 and bool `[R, K]`, where the likeliest tokens stand in them."""

    def __init__(
        self, taught: TeacherTokens, logits: torch.Tensor, places: torch.Tensor, here: torch.Tensor
    ):
        self.taught, self.places, self.here = taught, places, here
        self.of_likeliest = logits.gather(1, places).where(here, 0)

    def sums(self, shares: torch.Tensor) -> torch.Tensor:
        """`[R, 1 + K]`, this rank's part: of exponentials of all logits but the likeliest, and
        these logits themselves. shares: exponentials of all logits."""
        likeliest = torch.zeros_like(shares).scatter_add_(1, self.places, self.here.to(shares))
        self.others = likeliest.neg_().add_(1).mul_(shares)
        return torch.cat([self.others.sum(-1, keepdim=True), self.of_likeliest], 1)

    def found(
        self, sums: torch.Tensor, total: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(The divergence `[R]`, what each logit here is worth to it `[R, V / tp]`). sums: over all
        ranks; total `[R]`: the logarithm of the sum of all exponentials; shares: probabilities."""
        others = sums[:, :1].clamp(min=LEAST)
        policy = torch.cat([sums[:, 1:], others.log()], 1) - total[:, None]
        divergence, slopes = self.taught.divergence.of(with_rest(self.taught.logprobs), policy)
        of_logits = self.others.mul_(slopes[:, -1:] / others)
        of_logits.addcmul_(shares, -slopes.sum(-1, keepdim=True))
        return divergence, of_logits.scatter_add_(
            1, self.places, slopes[:, :-1].where(self.here, 0)
        )
