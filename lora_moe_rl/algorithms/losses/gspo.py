"""GSPO (arXiv:2507.18071): the clipped objective with one ratio a sample, in its token form.

The ratio is exp of the mean of logprobs - old over the sample's tokens; each token has the gradient
of its own logprob (equation 14), so that advantages may differ within a sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_moe_rl.algorithms.losses.base import PolicyLoss
from lora_moe_rl.algorithms.losses.ppo_clip import ClipSettings, clipped
from lora_moe_rl.algorithms.parts import by_sample

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens

LOG_BOUND = 10.0  # verl's value


class GSPOClip(PolicyLoss):
    Settings = ClipSettings
    settings: ClipSettings
    of_moved = ("clip_low", "clip_high")
    level = "sequence"
    metrics = {"ratio": "token_mean", "clipped_low": "token_mean", "clipped_high": "token_mean"}

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        was = tokens.logprobs.detach()
        of_sample = by_sample.mean(was - tokens.old, tokens)
        ratio = (of_sample + (tokens.logprobs - was)).clamp(max=LOG_BOUND).exp()
        return clipped(ratio, tokens.advantages, self.settings)
