"""Whether what bounds a loss's ratio is told of a step in which no ratio is other than 1."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.settings import PolicyGradientConfig
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.plugins import PARTS
from lora_moe_rl.config.section import is_set


def check(config: RunConfig) -> str:
    """A warning of settings that do nothing while no token has moved from the policy before the
    update, where there is one update a step; '' without such. Recipes from elsewhere set them
    always."""
    settings = config.algorithm
    if not isinstance(settings, PolicyGradientConfig):
        return ""
    if not settings.on_policy or settings.anchor == "rollout":
        return ""
    loss = PARTS["loss"].find(settings.loss)
    given = [name for name in loss.of_moved if is_set(settings, name)]
    if not given:
        return ""
    said = ", ".join(f"{name}={getattr(settings, name)}" for name in given)
    return (
        f"algorithm.{said} {'has' if len(given) == 1 else 'have'} no effect with one update a "
        f"step, in which every ratio of loss={settings.loss} is 1 and its gradient REINFORCE's; "
        "set algorithm.mini_batches or algorithm.epochs higher, or algorithm.anchor=rollout, or "
        "leave it out"
    )
