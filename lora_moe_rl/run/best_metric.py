"""What checkpoint.best_metric says of a run's checkpoints, where that is less than it seems."""

from __future__ import annotations

from lora_moe_rl.config import RunConfig
from lora_moe_rl.telemetry import metric_table


def check(config: RunConfig) -> list[str]:
    """Warnings."""
    settings = config.checkpoint
    if not settings.keep_best and not settings.stop_after:
        return []
    return [one for one in (_direction(config), _meetings(config)) if one]


def _direction(config: RunConfig) -> str:
    settings = config.checkpoint
    usual = metric_table.best_of(settings.best_metric or "")
    if settings.best_is in (None, usual) or usual is None:
        return ""
    return (
        f"checkpoint.best_is={settings.best_is}, and of {settings.best_metric} the {usual} is the "
        "best by docs/metrics.md: leave out checkpoint.best_is, unless the worst is wanted"
    )


def _meetings(config: RunConfig) -> str:
    """Of a metric of evaluations: how many checkpoints have none at their step."""
    settings, last = config.checkpoint, config.trainer.steps
    if not settings.keep_best or not settings.best_of_evaluations:
        return ""
    made = sorted({*range(settings.every, last + 1, settings.every), last})
    judged = [step for step in made if config.eval.is_due(step, last)]
    if len(judged) == len(made):
        return ""
    return (
        f"checkpoint.keep_best goes by {settings.best_metric}, which {len(judged)} of the run's "
        f"{len(made)} checkpoints have: they are made every {settings.every} steps, evaluations "
        f"every {config.eval.every or 'run'}; the others are never the best. Set eval.every to "
        f"checkpoint.every={settings.every}, or to a number that divides it"
    )
