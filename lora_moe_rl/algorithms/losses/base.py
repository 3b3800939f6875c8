"""What a loss is: the policy's gradient at each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lora_moe_rl.algorithms.parts.part import LOG_BOUND, Part
from lora_moe_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens
    from lora_moe_rl.algorithms.parts.divergence import Divergence
    from lora_moe_rl.algorithms.parts.selection import Selection, StepTokens


class PolicyLoss(Part):
    """Base of all losses. `level`: of what its ratio is, a token or a whole sample. `has_ratio`:
    False for a loss that compares the policy with no older one. `averages_advantages`: whether all
    tokens of a sample have the mean of its advantages. `selects`: whether it has a `select`, which
    says what `tokens.selected` is; it follows from that and is not declared. `needs_moved`: whether
    what it is for does nothing while no token has moved from `old`. `of_moved`: settings that do
    nothing then, in a loss whose gradient is REINFORCE's. `of_any_policy`: whether it is what it is
    whichever policy has sampled the tokens, so that nothing allows for an older one."""

    level: ClassVar[Literal["token", "sequence"]] = "token"
    has_ratio: ClassVar[bool] = True
    averages_advantages: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    needs_moved: ClassVar[bool] = False
    of_moved: ClassVar[tuple[str, ...]] = ()
    of_any_policy: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "selects" in vars(cls):
            raise ConfigError(
                f"{cls.__name__} declares selects: leave it out, a loss selects tokens when it has "
                "the method select"
            )
        cls.selects = cls.select is not PolicyLoss.select

    @property
    def divergence(self) -> Divergence | None:
        """See `Algorithm.divergence`."""
        return None

    def select(self, tokens: StepTokens) -> Selection:
        """See `Algorithm.select`; `old` is what the ratio is against, here as in `values`."""
        raise NotImplementedError

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [T] of each token, to be made small, and the part's metrics [T]. The ratio is
        of `logprobs` to `old`."""
        raise NotImplementedError


def selected_of(tokens: Tokens) -> Tensor:
    """`tokens.selected` [T]. Raises ValueError without."""
    if tokens.selected is None:
        raise ValueError("the loss wants to know the tokens that are selected; they are missing")
    return tokens.selected


def ratio_of(tokens: Tokens) -> Tensor:
    """exp(logprobs - old) [T], differentiable."""
    return (tokens.logprobs - tokens.old).clamp(-LOG_BOUND, LOG_BOUND).exp()
