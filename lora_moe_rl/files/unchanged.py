"""What of a run's settings must stay as it was when the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.keys import is_section
from lora_moe_rl.config.reference import against_start
from lora_moe_rl.errors import RunDirError

# What a checkpoint's tensors depend on: a resumed run cannot change them.
FIXED = ("model.path", "adapter")
# Of these, what `starting.other_ranks` can change under adapter.resize=true.
RESIZABLE = {
    f"adapter.{key}"
    for key in (
        "rank", "expert_rank", "expert_rank_over_top_k", "rank_pattern",
        "alpha", "expert_alpha", "alpha_pattern", "rslora",
    )
}  # fmt: skip


def check_unchanged(saved: dict[str, Any], config: RunConfig, path: Path) -> None:
    """Raises RunDirError when a key of FIXED differs between the saved config and `config`, unless
    adapter.resize allows it. Where the start is measured against it is told by its fingerprint
    (`run/frozen_start.py`), and may have moved."""
    before, now = flat(saved), flat_of(config)
    changed = [
        key
        for key in now
        # As text: the order of a map's keys means something (adapter.rank_pattern).
        if key.startswith(FIXED)
        and key != "adapter.resize"
        and not (config.adapter.resize and key in RESIZABLE)
        and not (key == "adapter.init_from" and against_start(config))
        and json.dumps(before.get(key)) != json.dumps(now[key])
    ]
    if not changed:
        return
    values = "; ".join(f"{key} was {before.get(key)} and is now {now[key]}" for key in changed)
    way_out = "Leave them as they were, or start anew with logging.run_dir=DIR"
    if set(changed) <= RESIZABLE:
        way_out += (
            "; or set adapter.resize=true: the adapter is brought to the new ranks and alphas by "
            "an SVD (exact when growing, the best approximation when shrinking), and Adam begins "
            "anew for what changed"
        )
    raise RunDirError(
        f"{path} cannot be resumed with another base or other adapters: {values}. {way_out}"
    )


def flat_of(config: RunConfig) -> dict[str, Any]:
    """`{dotted key: value}` of a config, as config.yaml has it."""
    return flat(yaml.safe_load(to_yaml(config)))


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{dotted key: value}`; a map that is a value stays one."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if is_section(name) and isinstance(value, dict):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found
