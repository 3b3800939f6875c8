"""Names of layouts, as `tp2ep2`, and the config of each. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.fit import check_layout

AXES = ("tp", "pp", "ep", "etp", "dp", "vpp")
_PART = re.compile(r"(etp|vpp|tp|pp|ep|dp)(\d+)")


@dataclass(frozen=True)
class Layout:
    """`config` is that of a run whose trainer is laid out so."""

    name: str
    config: RunConfig

    @property
    def world_size(self) -> int:
        return self.config.trainer.world_size

    def sizes(self) -> dict[str, int]:
        """Ranks along each axis of the sharding table."""
        t = self.config.trainer
        expert_dp = t.tp * t.dp // (t.ep * t.etp)
        return {"tp": t.tp, "dp": t.dp, "ep": t.ep, "etp": t.etp, "expert_dp": expert_dp}


def parse_layout(name: str, config: RunConfig) -> Layout:
    """`etp2tp2` is tensor-parallel size 2 with expert-tensor-parallel size 2. Without dp there are
    as few data-parallel ranks as fit: `ep2` alone has two. Raises ConfigError."""
    parts = _PART.findall(name)
    if not parts or "".join(axis + size for axis, size in parts) != name:
        raise ConfigError(
            f"--layouts: {name!r} is not a layout; write sizes of {', '.join(AXES)} one after the "
            f"other, as tp2ep2 or pp2vpp2"
        )
    sizes = {axis: int(size) for axis, size in parts}
    if len(sizes) != len(parts) or 0 in sizes.values():
        raise ConfigError(f"--layouts: {name!r} gives a size twice, or a size of 0")
    stage = sizes.get("ep", 1) * sizes.get("etp", 1)
    tp, dp = sizes.get("tp", 1), sizes.pop("dp", None)
    dp = dp or math.lcm(tp, stage) // tp
    world_size = tp * sizes.get("pp", 1) * dp
    try:
        return Layout(name, with_settings(config, {"trainer": sizes | {"world_size": world_size}}))
    except ConfigError as error:
        raise ConfigError(f"--layouts: {name}: {error}") from error


def parse_layouts(names: Sequence[str], config: RunConfig, shape: ModelShape) -> list[Layout]:
    """Raises ConfigError, with the reason, for each layout that the model does not allow."""
    layouts, refused = [], []
    for name in names:
        layout = parse_layout(name, config)
        try:
            check_layout(shape, layout.config)
        except ConfigError as error:
            refused.append(f"{name}: {error}")
        layouts.append(layout)
    if refused:
        raise ConfigError("--layouts: " + "\n".join(refused))
    return layouts
