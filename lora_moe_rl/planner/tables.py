"""A plan on the terminal."""

from __future__ import annotations

from itertools import product

from rich.table import Table
from rich.text import Text

from lora_moe_rl.config import RolloutConfig
from lora_moe_rl.planner.changes import Change
from lora_moe_rl.planner.hardware import GIB
from lora_moe_rl.planner.plan import Assumed, RunPlan
from lora_moe_rl.planner.proposal import SEARCHED, Proposal
from lora_moe_rl.planner.refused import Refused
from lora_moe_rl.planner.request import Request
from lora_moe_rl.planner.rollout import EngineRank
from lora_moe_rl.planner.search import MARGIN
from lora_moe_rl.planner.trainer import FORMATS, SHOWN
from lora_moe_rl.verify.report import console, table

WIDTH = 118


def show(plan: RunPlan, chosen: bool) -> None:
    out = console(WIDTH)
    for line in _head(plan, chosen):
        out.print(Text(line))
    out.print(_trainer(plan))
    out.print(Text(_formats(plan)))
    if plan.held:
        out.print(_held(plan))
        for line in _why_twice(plan):
            out.print(Text(line))
    if plan.engine is not None:
        out.print(_engine(plan, plan.engine))
        if plan.turns:
            out.print(_turns(plan))
        out.print(_refits(plan))
    out.print(_hosts(plan))
    for line in (*_routes(plan), *_flops(plan), *_seconds(plan)):
        out.print(Text(line))
    for warning in plan.warnings:
        out.print(Text(f"may not fit: {warning}", style="yellow"))
    for problem in plan.problems:
        out.print(Text(f"does not fit: {problem}", style="red"))
    if not plan.problems:
        out.print(Text("fits", style="bold green"))


def _head(plan: RunPlan, chosen: bool) -> list[str]:
    facts, trainer, rollout = plan.facts, plan.config.trainer, plan.config.rollout
    hardware = plan.assumed.hardware
    mine, theirs, shared = plan.gpus
    gpus = f"{mine} shared" if shared else f"{mine} trainer + {theirs} engines"
    if plan.turns:
        gpus = f"trainer and engines take turns on {mine}"
    if (idle := hardware.gpus - (mine if shared else mine + theirs)) > 0:
        gpus += f", {idle} idle"
    engines = f"engines {rollout.engines} of {engine_name(rollout)}"
    if plan.config.offline:
        name = plan.config.algorithm.name
        gpus, engines = f"{mine} trainer", f"no engines (algorithm={name} samples nothing)"
    cp = f" cp {trainer.cp}" if trainer.cp > 1 else ""
    layout = f"tp {trainer.tp}{cp} pp {trainer.pp} ep {trainer.ep} dp {trainer.dp}"
    layout += f" vpp {trainer.vpp}" if trainer.vpp > 1 else ""
    layout += f" etp {trainer.etp}" if trainer.etp > 1 else ""
    size = plan.spec.num_parameters
    return [
        f"{facts.name}: {plan.parameters:,} parameters, adapter {size:,} in "
        f"{plan.adapter_tensors:,} tensors ({2 * size / 1e9:,.2f} GB in bf16)",
        f"{hardware.gpus} GPUs ({hardware.gpu}, {hardware.spec.memory:g} GiB): {gpus}",
        f"trainer {layout}, recompute {trainer.recompute}; {engines}"
        + (" (the fastest layout found)" if chosen else ""),
    ]


def engine_name(rollout: RolloutConfig) -> str:
    """How an engine is laid out."""
    nodes = f" on {rollout.nodes} nodes" if rollout.nodes > 1 else ""
    cut = " ep" if rollout.ep else " fully sharded" if rollout.fully_sharded else ""
    return f"{_size(rollout)}{cut}{nodes}"


def _size(rollout: RolloutConfig) -> str:
    return f"dp {rollout.dp}" if rollout.dp > 1 else f"tp {rollout.tp}"


def _gib(value: float) -> str:
    return f"{value / GIB:,.2f}"


def _trainer(plan: RunPlan) -> Table:
    title = f"a trainer rank, GiB (base in {plan.assumed.weights})"
    on_host = [c.host + c.host_in_step for c in plan.classes]
    offloaded = ["host"] if any(on_host) else []
    made = table(["", "ranks", "layers", "parameters", *SHOWN, "total", *offloaded], title)
    for c, host in zip(plan.classes, on_host, strict=True):
        cells = [_gib(size) for size in c.shown.values()]
        parameters = f"{c.base_parameters / 1e9:,.3f} B"
        layers = str(len(c.layers))
        cells += [_gib(c.total), *(_gib(host) for _ in offloaded)]
        made.add_row(c.name, str(c.ranks), layers, parameters, *cells)
    return made


def _formats(plan: RunPlan) -> str:
    heaviest = plan.heaviest
    sizes = ", ".join(f"{form} {_gib(size)}" for form, size in heaviest.base_bytes.items())
    return f"base of {heaviest.name} by format, GiB: {sizes}\n"


def _held(plan: RunPlan) -> Table:
    """What a trainer rank and an engine rank hold together, by part of the model."""
    cells = [*product(FORMATS, (False, True))]
    heads = [f"{form}, {'once' if once else 'each'}" for form, once in cells]
    title = "the base on a trainer rank and an engine rank, GiB: a copy each, and held once"
    made = table(["", *heads], title)
    for part in plan.held:
        made.add_row(part.part, *(_gib(part.together(*cell)) for cell in cells))
    sums = (sum(part.together(*cell) for part in plan.held) for cell in cells)
    made.add_row("all", *map(_gib, sums))
    return made


def _why_twice(plan: RunPlan) -> list[str]:
    """What is held once, and why the rest is not."""
    weights = plan.assumed.weights
    once = [
        f"{part.part} in part" if part.why else part.part
        for part in plan.held
        if part.shared[weights]
    ]
    lines = [f"held once: {', '.join(once) or 'nothing'}"]
    lines += [f"  {part.part}: {part.why}" for part in plan.held if part.why]
    return [*lines, ""]


def _engine(plan: RunPlan, engine: EngineRank) -> Table:
    title = f"an engine rank, GiB (weights in {plan.assumed.served})"
    columns = ["", *engine.memory, "vLLM's share", "KiB a token", "sequences"]
    made = table(columns, title)
    rollout = plan.config.rollout
    name = f"{rollout.engines} x {_size(rollout)}"
    cells = [_gib(size) for size in engine.memory.values()]
    token = f"{engine.kv_token / 1024:,.1f}"
    sequences = f"{engine.sequences:,} of {plan.config.model.max_length:,}"
    made.add_row(name, *cells, _gib(engine.budget), token, sequences)
    return made


def _turns(plan: RunPlan) -> Table:
    memory = plan.assumed.hardware.spec.memory
    made = table(["turn", "trainer", "engine", "total", "host"], f"a GPU, GiB of {memory:g}")
    for turn in plan.turns:
        sizes = turn.trainer, turn.engine, turn.total, turn.host
        made.add_row(turn.name, *(_gib(size) for size in sizes))
    return made


def _hosts(plan: RunPlan) -> Table:
    """A row for each kind of node."""
    kinds = [*plan.hosts[0].memory]
    title = f"the memory of a node's host, GiB of {plan.assumed.hardware.node_memory:,.0f}"
    made = table(["a node of", "nodes", *kinds, "total"], title)
    for node in plan.hosts:
        sizes = (*node.memory.values(), node.total)
        made.add_row(node.name, str(node.nodes), *map(_gib, sizes))
    return made


def _refits(plan: RunPlan) -> Table:
    speed = plan.assumed.hardware.spec.link * plan.assumed.efficiency.links / 1e9
    title = f"a refit, GB (at {speed:.0f} GB/s a GPU)"
    columns = ["", "adapter", "sent by a rank", "to an engine rank", "a link", "transfers", "ms"]
    made = table(columns, title)
    for refit in plan.refits:
        sizes = (refit.adapter, refit.sent, refit.received, refit.link)
        cells = [f"{size / 1e9:,.3f}" if size else "-" for size in sizes]
        transfers = f"{refit.transfers:,}" if refit.transfers else "-"
        made.add_row(refit.way, *cells, transfers, f"{1e3 * refit.seconds:,.0f}")
    return made


def _routes(plan: RunPlan) -> list[str]:
    routes = plan.routes
    if routes is None:
        return []
    return [
        f"routes: {routes.token:,} bytes a token packed (int16 {routes.token_int16:,}, int32 "
        f"{routes.token_int32:,}), {routes.step / 1e9:,.2f} GB a step"
    ]


def _flops(plan: RunPlan) -> list[str]:
    f, length = plan.flops, plan.assumed.lengths.sample
    return [
        f"operations a token at {length:,} tokens: forward {f.forward / 1e9:,.1f} G, training "
        f"{f.train / 1e9:,.1f} G, of which adapters {6 * f.adapter / 1e9:,.2f} G "
        f"({f.adapter_share:+.1%}); all parameters trained: {f.full / 1e9:,.1f} G",
        f"active parameters a token: base {f.active / 1e9:,.2f} B, adapters "
        f"{f.adapter / 1e6:,.1f} M",
    ]


def _seconds(plan: RunPlan) -> list[str]:
    s, lengths, e = plan.seconds, plan.assumed.lengths, plan.assumed.efficiency
    parts = ", ".join(f"{name} {value:,.1f}" for name, value in s.parts.items())
    stages = f"train {s.train:,.0f}"
    if plan.engine is not None:
        stages = f"rollout {s.rollout:,.0f} + {stages} + refit {s.refit:.2f}"
    return [
        f"a step by roofline, s: {s.step:,.0f} = {stages} ({parts})",
        f"  assumed: prompts of {lengths.prompt:,} and responses of {lengths.response:,} tokens, "
        f"evenly loaded experts; of the peak: training {e.train_flops:.0%}, prefill "
        f"{e.prefill_flops:.0%}, decode bandwidth {e.decode_bandwidth:.0%}, links {e.links:.0%}",
    ]


def show_proposals(proposals: list[Proposal], assumed: Assumed) -> None:
    gpus = assumed.hardware.gpus
    columns = ["layouts by estimated step", "s", "rollout", "train", "GiB", "sequences"]
    made = table(columns, f"the fastest layouts found of {gpus} GPUs")
    for p in proposals:
        s = p.seconds
        cells = [f"{value:,.0f}" for value in (s.step, s.rollout, s.train)]
        made.add_row(_words(p.settings), *cells, _gib(p.heaviest.total), f"{p.engine.sequences:,}")
    console(WIDTH).print(made)


def show_whys(whys: list[str], found: list[Refused]) -> None:
    out = console(WIDTH)
    for place, why in enumerate(whys, 1):
        out.print(Text(f"{place}. {why}"))
    if found:
        out.print(Text("what does not fit, the nearest first:"))
    for one in found:
        step = "" if one.step is None else f" ({one.step:,.0f} s if it did)"
        out.print(Text(f"- {_words(one.settings)}{step}: {one.why}"))


def _words(settings: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def show_nothing(request: Request, reasons: list[str]) -> None:
    hardware, adapter = request.assumed.hardware, request.config.adapter
    out = console(WIDTH)
    text = f"no layout of {request.facts.name} with adapter.rank={adapter.rank} fits "
    text += f"{hardware.gpus} GPUs ({hardware.gpu}, {hardware.spec.memory:g} GiB)"
    out.print(Text(text, style="red"))
    for reason in reasons:
        out.print(Text(f"  why: {reason}", style="red"))


def show_changes(changes: list[Change]) -> None:
    out = console(WIDTH)
    if not changes:
        out.print(Text("no change that was tried makes it fit, nor all of them together"))
        return
    out.print(Text("each of these was planned, and fits; to add to the command, least harm first:"))
    for change in changes:
        out.print(Text(f"  {' '.join(change.words)}    # {change.harm}"), soft_wrap=True)


def show_choice(own: RunPlan, proposals: list[Proposal]) -> None:
    console(WIDTH).print(Text(choice(own, proposals)))


def choice(own: RunPlan, proposals: list[Proposal]) -> str:
    """Why the fastest proposal is not the layout that was given, in a sentence."""
    if not proposals:
        return f"the search proposes nothing: no layout leaves {MARGIN:.0%} of a GPU free"
    best = proposals[0]
    differing = ", ".join(
        f"{section}.{key}"
        for section, keys in SEARCHED.items()
        for key in keys
        if getattr(getattr(own.config, section), key) != getattr(getattr(best.config, section), key)
    )
    if not differing:
        return "the layout given here is the fastest that was found"
    if own.problems:
        return f"the layout given here does not fit; the first of the list differs in {differing}"
    mine, theirs = own.seconds, best.seconds
    verdict = "faster" if theirs.step < mine.step else "no faster"
    return (
        f"the layout given here fits too; the first of the list is {verdict} by the roofline "
        f"({theirs.step:,.0f} s a step for {mine.step:,.0f}: rollout {theirs.rollout:,.0f} for "
        f"{mine.rollout:,.0f}, train {theirs.train:,.0f} for {mine.train:,.0f}) and holds "
        f"{_gib(best.heaviest.total)} GiB on a trainer rank for {_gib(own.heaviest.total)}; it "
        f"differs in {differing}. No GPU has confirmed either estimate: the layout with more "
        "memory left is the safer one"
    )
