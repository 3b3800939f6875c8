"""What a critic learns: the loss of its values, and how much of the returns they explain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VARIANCE_EPS = 1e-5  # verl's value


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """The loss of each token, half the squared error, and 1.0 for each token whose gradient the
    clip removed; both shaped as the inputs.

    values: the critic's, with gradient. old: those of before the update. The error is that of the
    value, or of the value held within `clip` of the old one, whichever is larger (PPO2's); None:
    the value's alone.
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error, error.detach().new_zeros(error.shape)
    held = (values.maximum(old - clip).minimum(old + clip) - returns).square()
    return 0.5 * error.maximum(held), (held > error).to(error.dtype)


def moments(values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """What `explained_variance` wants the means of, without gradient, shaped as the inputs."""
    error = returns - values.detach()
    return {
        "return": returns,
        "return_squared": returns.square(),
        "value_error": error,
        "value_error_squared": error.square(),
    }


def explained_variance(means: Mapping[str, float], tokens: float) -> float:
    """1 - variance of returns less values / variance of returns, over `tokens` tokens in the loss.

    means: of `moments`, over those tokens. 1 for a critic that knows all, 0 for one that knows the
    mean alone, less for one that says worse, NaN for fewer than two tokens.
    """
    if tokens < 2:
        return float("nan")
    unbiased = tokens / (tokens - 1)
    of_errors, of_returns = (
        max(means[f"{name}_squared"] - means[name] ** 2, 0.0) * unbiased
        for name in ("value_error", "return")
    )
    return 1.0 - of_errors / (of_returns + VARIANCE_EPS)
