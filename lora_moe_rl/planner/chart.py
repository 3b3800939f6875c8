"""Memory by class of rank, as stacked bars."""

from __future__ import annotations

from pathlib import Path

from lora_moe_rl.planner.hardware import GIB
from lora_moe_rl.planner.plan import RunPlan

COLORS = {
    "base": "#2b6cb0",
    "weights": "#2b6cb0",
    "scratch": "#7fa8d4",
    "adapter": "#dd8a2c",
    "adapter slots": "#dd8a2c",
    "gradients": "#e9b872",
    "optimizer": "#f3d9ae",
    "Adam's step": "#f8ecd6",
    "refit": "#a8762f",
    "activations": "#4a9a6a",
    "one layer's work": "#8fc3a3",
    "communication": "#c3e0cd",
    "logits": "#b9483d",
    "KV cache": "#7b5ea7",
    "working": "#bbbbbb",
    "allocator": "#bbbbbb",
    "runtime": "#dddddd",
}


def draw(plan: RunPlan, path: Path) -> None:
    """A PNG with a bar for each class of trainer rank, and for an engine rank if there are any."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = {f"{c.name}\n{c.ranks} ranks": c.memory for c in plan.classes}
    ranks = plan.config.rollout.engines * plan.config.rollout.ranks
    if plan.engine is not None:
        bars[f"engines\n{ranks} ranks"] = plan.engine.memory
    figure = Figure(figsize=(2.5 + 1.1 * len(bars), 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    axes = figure.subplots()
    bottom = dict.fromkeys(bars, 0.0)
    for kind, color in COLORS.items():
        heights = {name: memory.get(kind, 0) / GIB for name, memory in bars.items()}
        if any(heights.values()):
            axes.bar(
                list(bars), list(heights.values()), bottom=list(bottom.values()), width=0.7,
                color=color, label=kind, linewidth=0,
            )  # fmt: skip
        bottom = {name: bottom[name] + heights[name] for name in bars}
    memory = plan.assumed.hardware.spec.memory
    axes.axhline(memory, color="black", linewidth=1, linestyle="--")
    axes.text(len(bars) - 0.5, memory, f"{memory:g} GiB", fontsize=8, va="bottom", ha="right")
    axes.set_ylabel("GiB")
    axes.set_title(f"{plan.facts.name}, memory of a rank", loc="left", fontsize=11)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8, reverse=True)
    with open(path, "wb") as file:  # with the name as it is, whatever its end
        figure.savefig(file, format="png")
