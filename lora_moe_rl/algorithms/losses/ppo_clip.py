"""PPO's clipped objective (arXiv:1707.06347), each token by itself, with a bound on either side.

loss = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A). The upper bound of its own is
DAPO's clip-higher (arXiv:2503.14476). With `dual_clip` a loss of a negative advantage is at most
-dual_clip A (arXiv:1912.09729), however far the ratio has gone up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from lora_moe_rl.algorithms.losses.base import PolicyLoss, ratio_of
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class ClipSettings(Section):
    clip_low: float = Field(
        0.2, ge=0, lt=1, description="The ratio is clipped below at 1 - clip_low."
    )
    clip_high: float = Field(0.2, ge=0, description="The ratio is clipped above at 1 + clip_high.")


class PPOClip(PolicyLoss):
    class Settings(ClipSettings):
        dual_clip: float | None = Field(
            None, gt=1, description="Bound of the ratio under a negative advantage; null: none."
        )

    settings: Settings
    of_moved = ("clip_low", "clip_high", "dual_clip")
    metrics = {"ratio": "token_mean", "clipped_low": "token_mean", "clipped_high": "token_mean"}

    def __init__(self, settings: Any):
        super().__init__(settings)
        if settings.dual_clip is not None:
            self.metrics = {**self.metrics, "clipped_dual": "token_mean"}

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        values, metrics = clipped(ratio_of(tokens), tokens.advantages, self.settings)
        bound = self.settings.dual_clip
        if bound is None:
            return values, metrics
        at_most = -tokens.advantages * bound
        beyond = (values > at_most) & (tokens.advantages < 0)
        return at_most.where(beyond, values), {**metrics, "clipped_dual": beyond.float()}


def clipped(
    ratio: Tensor, advantages: Tensor, settings: ClipSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss [T], and `ratio`, `clipped_low`, `clipped_high` (1 for tokens whose gradient
    the clip removed)."""
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    values = -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)
    was = ratio.detach()
    return values, {
        "ratio": was,
        "clipped_low": ((was < low) & (advantages < 0)).float(),
        "clipped_high": ((was > high) & (advantages > 0)).float(),
    }
