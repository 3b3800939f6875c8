"""What `verify refit` goes through: engines, trainers, transports, and faults. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.fit import check_blocks, check_layout
from lora_moe_rl.refit.plan import EngineLayout, Plan, Transfer
from lora_moe_rl.refit.transports import transport_names
from lora_moe_rl.rollout.device import check_engine
from lora_moe_rl.rollout.facts import slot_rank

_ENGINE = re.compile(r"(tp|dp)([1-9]\d*)(ep|fs)?")
TRANSPORTS = transport_names()
Combination = tuple[str, str, str]  # names of engine, trainer and transport


@dataclass(frozen=True)
class Engine:
    """`config` is that of a run whose engines are laid out so."""

    name: str
    config: RunConfig

    def layout(self, spec: AdapterSpec) -> EngineLayout:
        merged = self.config.refit.mode == "merged"
        return EngineLayout.of(self.config.rollout, slot_rank(spec), merged)


def parse_engine(
    name: str, config: RunConfig, spec: AdapterSpec, form: str | None = None
) -> Engine:
    """`tp2` cuts every linear over two ranks; `tp2ep` gives each half of the experts; `tp2fs` cuts
    adapters along the rank too; `dp2ep` gives each half of the experts and all of the rest. `form`:
    of a quantised base. Raises ConfigError."""
    match = _ENGINE.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"--engines: {name!r} is not an engine; write tp1, tp2, tp2ep (experts over the "
            "ranks), tp2fs (fully sharded adapters) or dp2ep (experts over data-parallel ranks)"
        )
    size, how = int(match[2]), match[3]
    settings = {match[1]: size, "ep": how == "ep", "fully_sharded": how == "fs"}
    try:
        engine = Engine(name, with_settings(config, {"rollout": settings}))
        check_layout(spec.shape, engine.config)
        check_blocks(spec.shape, engine.config, form)
        check_engine(engine.config, spec)
    except ConfigError as error:
        raise ConfigError(f"--engines: {name}: {error}") from error
    return engine


def covering(
    engines: Sequence[str], trainers: Sequence[str], transports: Sequence[str]
) -> list[Combination]:
    """Combinations in which every two of an engine, a trainer and a transport meet, those of an
    engine together, those of a trainer within it. Not all of the product: each is a refit, and a
    layout's or a transport's faults do not depend on all the others at once."""
    product = list(itertools.product(engines, trainers, transports))
    open_pairs = {pair for combination in product for pair in _pairs(combination)}
    chosen = set()
    while open_pairs:
        best = max(product, key=lambda c: len(open_pairs & _pairs(c)))
        chosen.add(best)
        open_pairs -= _pairs(best)
    return [combination for combination in product if combination in chosen]


def _pairs(combination: Combination) -> set[tuple]:
    return set(itertools.combinations(enumerate(combination), 2))


Fault = Callable[[Plan, EngineLayout], Plan]


def parse_fault(text: str, spec: AdapterSpec) -> Fault:
    """`left-out:TENSOR` or `misplaced:TENSOR`, to see it noticed. Raises ConfigError."""
    kind, _, tensor = text.partition(":")
    if kind not in FAULTS:
        raise ConfigError(f"--fault: {kind!r} is not a fault; there are {', '.join(FAULTS)}")
    if tensor not in spec.tensor_shapes:
        example = next(name for name in reversed(spec.tensor_shapes) if ".experts." in name)
        raise ConfigError(f"--fault: the adapter has no tensor {tensor!r}; {example} is one")
    return lambda plan, engine: FAULTS[kind](plan, engine, tensor)


def _left_out(plan: Plan, engine: EngineLayout, tensor: str) -> Plan:
    """No transfer of the tensor takes place."""
    return replace(plan, transfers=tuple(t for t in plan.transfers if _tensor(t) != tensor))


def _misplaced(plan: Plan, engine: EngineLayout, tensor: str) -> Plan:
    """Each engine rank gets what the next one should: other experts, or other rows or columns."""
    if engine.ranks == 1:
        raise ConfigError("--fault misplaced needs an engine of several ranks, as tp2ep")
    moved = (
        replace(t, target=(t.target + 1) % engine.ranks) if _tensor(t) == tensor else t
        for t in plan.transfers
    )
    return replace(plan, transfers=tuple(moved))


FAULTS = {"left-out": _left_out, "misplaced": _misplaced}


def _tensor(transfer: Transfer) -> str:
    return f"{transfer.site.name}.{transfer.matrix}"
