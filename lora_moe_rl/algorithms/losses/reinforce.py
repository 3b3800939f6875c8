"""REINFORCE: -advantage logprob. A correction gives it the importance weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_moe_rl.algorithms.losses.base import PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class Reinforce(PolicyLoss):
    has_ratio = False

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -(tokens.advantages * tokens.logprobs), {}
