"""What bounds the best layouts of a search, in a sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from lora_moe_rl.planner.hardware import GIB
from lora_moe_rl.planner.plan import RunPlan

BEST = 3  # layouts that are explained
OF_ROLLOUT = ("prefill", "decode", "scoring")
SAME = 0.005  # of a step: a smaller difference of seconds is none


def explain(plans: Sequence[RunPlan]) -> list[str]:
    """One sentence a plan, the fastest first: what its step waits for, the memory that is left and
    what travels; of all but the first, what it wins and loses against the one before."""
    sentences = []
    for i, plan in enumerate(plans):
        parts = [_time(plan), _memory(plan), _traffic(plan)]
        if i:
            parts.append(f"against the one before: {_against(plan, plans[i - 1])}")
        sentences.append("; ".join(parts))
    return sentences


def _time(plan: RunPlan) -> str:
    s = plan.seconds
    stages = {"rollout": s.rollout, "train": s.train, "refit": s.refit}
    stage = max(stages, key=lambda name: stages[name])
    parts = {
        name: value
        for name, value in s.parts.items()
        if (name in OF_ROLLOUT) == (stage == "rollout") and stage != "refit"
    }
    said = f"{stage} bounds a step, {stages[stage]:,.0f} of {s.step:,.0f} s"
    if parts:
        part = max(parts, key=lambda name: parts[name])
        said += f" ({part} {parts[part]:,.0f})"
    return said


def _memory(plan: RunPlan) -> str:
    """The turn with least left where trainer and engines take turns, else the heaviest rank."""
    whole = plan.assumed.hardware.spec.memory * GIB
    if plan.turns:
        turn = max(plan.turns, key=lambda turn: turn.total)
        left = f"a GPU has {(whole - turn.total) / GIB:.1f} GiB left in the turn of the {turn.name}"
    else:
        largest, size = plan.heaviest.largest
        total = plan.heaviest.total
        if plan.gpus[2] and plan.engine is not None:
            total += plan.engine.budget
        left = (
            f"a GPU of the trainer has {(whole - total) / GIB:.1f} GiB left, with {largest} of "
            f"{size / GIB:.1f}"
        )
    if plan.engine is None:
        return left
    return f"{left}; an engine rank has room for {plan.engine.sequences:,} sequences"


def _traffic(plan: RunPlan) -> str:
    sent = sum(plan.seconds.parts[name] for name in ("communication", "gradient sums"))
    said = f"trainer ranks wait {sent:,.1f} s for each other's data"
    way = plan.config.adapter.expert_layout
    refit = next((refit for refit in plan.refits if refit.way == way), None)
    if refit is None:
        return said
    return f"{said}, and a refit brings {refit.received / 1e9:,.2f} GB to an engine rank"


def _against(plan: RunPlan, before: RunPlan) -> str:
    mine, theirs = plan.seconds, before.seconds
    least = SAME * theirs.step
    changes = [
        (f"{stage} {abs(change):,.0f} s", change)
        for stage, change in (
            ("rollout", mine.rollout - theirs.rollout),
            ("train", mine.train - theirs.train),
        )
        if abs(change) >= least
    ]
    memory = plan.heaviest.total - before.heaviest.total
    if abs(memory) >= GIB / 10:
        changes.append((f"{abs(memory) / GIB:.1f} GiB of a trainer rank", memory))
    if plan.engine is not None and before.engine is not None:
        room = plan.engine.sequences - before.engine.sequences
        if room:
            changes.append((f"room for {abs(room):,} sequences", -room))
    won = [text for text, change in changes if change < 0]
    lost = [text for text, change in changes if change > 0]
    return f"wins {_and(won)}, loses {_and(lost)}"


def _and(parts: Sequence[str]) -> str:
    return " and ".join(parts) or "nothing"
