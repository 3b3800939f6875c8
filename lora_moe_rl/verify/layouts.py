"""Names of layouts, as `tp2ep2`, and the config of each; what else a `verify` command reads."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import names
from lora_moe_rl.config.overrides import override, with_settings
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.fit import check_layout

AXES = ("tp", "cp", "pp", "ep", "etp", "dp", "vpp")
_PART = re.compile(r"(etp|vpp|tp|cp|pp|ep|dp)(\d+)")


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
        expert_dp = t.stage_ranks // (t.ep * t.etp)
        return {"tp": t.tp, "dp": t.dense_dp, "ep": t.ep, "etp": t.etp, "expert_dp": expert_dp}


def read_config(
    command: str, model: str, settings: Sequence[str], read: Sequence[str], base: Mapping[str, Any]
) -> RunConfig:
    """The config of `base` with the settings. `read` are the keys that the command reads, as
    `adapter.*` or `seed`; raises ConfigError for another one."""
    starts = tuple(key[:-1] if key.endswith("*") else f"{key}=" for key in read)
    for setting in settings:
        if not setting.startswith(starts):
            raise ConfigError(f"{command} does not read {setting!r}; it reads {', '.join(read)}")
    sections = {**base, "model": {**base.get("model", {}), "path": model}}
    return override(with_settings(RunConfig(), sections), settings)


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
    shared, dp = sizes.get("tp", 1) * sizes.get("cp", 1), sizes.pop("dp", None)
    dp = dp or math.lcm(shared, stage) // shared
    world_size = shared * sizes.get("pp", 1) * dp
    try:
        return Layout(name, with_settings(config, {"trainer": sizes | {"world_size": world_size}}))
    except ConfigError as error:
        raise ConfigError(f"--layouts: {name}: {error}") from error


def parse_layouts(
    wanted: Sequence[str], config: RunConfig, shape: ModelShape, form: str | None = None
) -> list[Layout]:
    """Raises ConfigError, with the reason, for each layout that the model does not allow. `form`:
    of a quantised base."""
    layouts, refused = [], []
    for name in wanted:
        layout = parse_layout(name, config)
        try:
            check_layout(shape, layout.config, form)
        except ConfigError as error:
            refused.append(f"{name}: {error}")
        layouts.append(layout)
    if refused:
        raise ConfigError("--layouts: " + "\n".join(refused))
    return layouts


def chosen(
    named: str | None, default: str, parse: Callable[[list[str]], list[Layout]], option: str
) -> list[Layout]:
    """The layouts that were named by `option`, or those of the default that the model allows; of
    others why not is said on stderr. Raises what `parse` raises for one that was named, and for a
    model that allows none."""
    if named is not None:
        return parse(names(named, option, "a layout"))
    found, reasons = [], []
    for name in default.split(","):
        try:
            found += parse([name])
        except ConfigError as error:
            reasons.append(str(error).removeprefix("--layouts: "))
    if not found:
        raise ConfigError(f"{option}: none of {default} can be: " + "; ".join(reasons))
    for reason in reasons:
        print(f"left out: {reason}", file=sys.stderr)
    return found


def placed(layouts: Sequence[Layout]) -> list[Layout]:
    """The same layouts on the device that all of them fit on, a GPU for each rank or the CPU, with
    the dtype that `auto` is there. Raises ConfigError."""
    import torch

    from lora_moe_rl.trainer.device import Device

    trainer = layouts[0].config.trainer
    needed, gpus = max(layout.world_size for layout in layouts), torch.cuda.device_count()
    if trainer.device == "cuda" and gpus < needed:
        raise ConfigError(
            f"trainer.device=cuda: {needed} ranks need as many GPUs, and torch sees {gpus}; "
            f"leave layouts out or use trainer.device=cpu"
        )
    device = "cuda" if trainer.device != "cpu" and gpus >= needed else "cpu"
    dtype = Device.choose(trainer.model_copy(update={"device": device})).dtype
    settings = {"trainer": {"device": device, "dtype": str(dtype).removeprefix("torch.")}}
    return [replace(x, config=with_settings(x.config, settings)) for x in layouts]
