"""The figures of `bench refit` against its goals, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lora_moe_rl.bench.report import Result, goal
from lora_moe_rl.verify import report

WAYS = {
    "disk": "vLLM: files, load_inplace",
    "in_memory": "vLLM: from_lora_tensors",
    "publish": "ours: publish",
    "publish/send": "  trainer ranks write and hash",
    "publish/slot": "  a free slot",
    "publish/stage": "  engine checks and writes",
    "publish/commit": "  engine switches",
    "write": "ours: the write alone",
    "memcpy": "memcpy of the same bytes",
}


def seconds(result: Result, way: str) -> float:
    return result["seconds"][way]["median"]


def ratio(result: Result, way: str, to: str) -> float:
    return seconds(result, way) / seconds(result, to)


def _goal(value: Callable[[Result], float], limit: float, at_least: bool = False):
    return lambda result: goal(value(result), limit, at_least)


GOALS = {
    "write / memcpy": _goal(lambda r: ratio(r, "write", "memcpy"), 2.5),
    "publish / memcpy": _goal(lambda r: ratio(r, "publish", "memcpy"), 6),
    "vLLM's files / publish": _goal(lambda r: ratio(r, "disk", "publish"), 50, at_least=True),
    "vLLM in memory / publish": _goal(lambda r: ratio(r, "in_memory", "publish"), 15, True),
    "transfers a layer": _goal(lambda r: r["transfers_a_layer"]["all"], 14),
    "extra memory / largest part": _goal(
        lambda r: r["memory"]["extra"] / r["memory"]["largest_part"], 1
    ),
    "tokens/s around a refit / before": _goal(lambda r: r["generation"]["ratio"], 0.9, True),
    "seconds of Kimi-K2's plan": _goal(lambda r: r["kimi_k2"]["seconds"], 5),
}


def parts(result: Result) -> Iterator[Any]:
    """What is printed of the figures, the goals left out."""
    base, adapter, memory = result["base"], result["adapter"], result["memory"]
    yield (
        f"{base['layers']} layers, {base['experts']} experts, hidden {base['hidden_size']}, expert "
        f"width {base['moe_intermediate_size']}, LoRA rank {adapter['rank']} in bfloat16: "
        f"{adapter['tensors']:,} tensors, {adapter['bytes'] / 1e6:.1f} MB; 2 trainer ranks "
        f"({result['trainer']}), 1 engine, {result['cores']} cores"
    )
    yield (
        f"logprobs: ours equals vLLM's own path (difference {result['logprobs']['difference']:g}; "
        f"the base differs by {result['logprobs']['effect']:.3g})"
    )
    transfers, generation, plan = (
        result["transfers_a_layer"], result["generation"], result["kimi_k2"],
    )  # fmt: skip
    yield (
        f"transfers a layer: {transfers['all']:g}, at most {transfers['most_on_a_link']} between "
        f"two ranks\nmemory while receiving: {memory['extra'] / 1e6:.1f} MB more; the largest part "
        f"has {memory['largest_part'] / 1e6:.1f} MB\n"
        f"generation: {generation['tokens_per_second_before']:.0f} tokens/s before a refit, "
        f"{generation['tokens_per_second_around']:.0f} in the second around it; "
        f"{generation['requests']} requests in flight, all finished\n"
        f"plan of Kimi-K2, rank {plan['rank']}, {plan['trainer_ranks']} trainer ranks to "
        f"{plan['engine_ranks']}: {plan['transfers']:,} transfers, "
        f"{plan['bytes'] / 1e9:.1f} GB in all, {plan['most_bytes_received'] / 1e9:.2f} GB to a "
        f"rank, in {plan['seconds']:.2f} s; complete"
    )
    table = report.table(["", "ms", "best", "/ memcpy"], f"median of {result['rounds']}")
    for way, name in WAYS.items():
        found = result["seconds"][way]
        cells = [f"{found[which] * 1e3:,.1f}" for which in ("median", "best")]
        table.add_row(name, *cells, f"{ratio(result, way, 'memcpy'):,.1f}")
    yield table
