"""Norms of a run's adapter, by checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.files.checkpoint import all_of, step_of
from lora_moe_rl.page.runs import Run

SITE = re.compile(r"layers\.(?P<layer>\d+)\.(?P<module>.+)")


def adapter_norms(run: Run) -> dict[str, Any]:
    """JSON: of each checkpoint that the run has kept its step and ||scale * B A|| (Frobenius) of
    each module and layer, and of each routed expert; or why it cannot be read. `error`: why they
    cannot be looked for."""
    folder = run.path / "checkpoints"
    real = folder.resolve()
    try:
        found = [path for path in all_of(folder) if path.resolve().parent == real]  # and no link
    except OSError as error:
        return {"checkpoints": [], "error": str(error)}
    return {"checkpoints": [_of_checkpoint(path) for path in found if path.is_dir()]}


def _of_checkpoint(path: Path) -> dict[str, Any]:
    from lora_moe_rl.export.inspection import inspect  # they import torch
    from lora_moe_rl.files.adapter_source import load

    step = step_of(path)
    try:
        report = inspect(load(path))
    except (LoraMoeRlError, OSError) as error:
        return {"step": step, "error": str(error)}
    sites = []
    for name, one in report["sites"].items():
        place = SITE.fullmatch(name)
        assert place is not None, name
        kept = {key: one[key] for key in ("rank", "scale", "norm", "of_expert")}
        sites.append({"layer": int(place["layer"]), "module": place["module"], **kept})
    return {"step": step, "parameters": report["parameters"], "sites": sites}
