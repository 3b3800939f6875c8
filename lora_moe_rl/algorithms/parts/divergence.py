"""How far a policy is from its teacher at one token: of the teacher's likeliest tokens each by
itself, and of all others together.

    tokens     a     b     c   the rest
    teacher   0.6   0.2   0.1    0.1         top_k = 3
    policy    0.3   0.3   0.0    0.4

That is a divergence of two distributions of top_k + 1 outcomes, never more than that of all tokens,
and 0 only where they agree on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FORWARD, REVERSE = 0.0, 1.0
LEAST_LOG = -1e-7  # log of what the likeliest have together: so much is always left to the rest
LEAST = 2.0**-126  # whose logarithm is taken: float32's own, since devices take less for 0


@dataclass(frozen=True)
class Divergence:
    """`beta`, as in TRL: 0 is the forward KL, teacher to policy, and 1 the reverse KL; between them
    the generalized Jensen-Shannon divergence, beta KL(teacher || m) + (1 - beta) KL(policy || m)
    with m = beta teacher + (1 - beta) policy (arXiv:2306.13649)."""

    top_k: int
    beta: float

    def of(self, teacher: Tensor, policy: Tensor) -> tuple[Tensor, Tensor]:
        """teacher, policy: logprobs `[R, K + 1]`, those of the rest last. Returns the divergence
        `[R]`, and what it grows by with each of the policy's logprobs, `[R, K + 1]`, up to what is
        the same for all in proportion to their probabilities, which add up to 1."""
        p, q = teacher.exp(), policy.exp()
        if self.beta == FORWARD:
            return (p * (teacher - policy)).sum(-1), -p
        if self.beta == REVERSE:
            each = q * (policy - teacher)
            return each.sum(-1), each
        mixed = (self.beta * p + (1 - self.beta) * q).clamp(min=LEAST).log()
        to_mixed = (1 - self.beta) * q * (policy - mixed)
        return (self.beta * p * (teacher - mixed) + to_mixed).sum(-1), to_mixed


def with_rest(likeliest: Tensor) -> Tensor:
    """Logprobs `[R, K]` of some tokens -> `[R, K + 1]`, those of all others together last, which
    are what is left of 1: where that is little, float32 would have too little of it."""
    import torch

    together = likeliest.double().logsumexp(-1, keepdim=True).clamp(max=LEAST_LOG)
    return torch.cat([likeliest, (-together.expm1()).log().to(likeliest)], -1)
