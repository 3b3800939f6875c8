"""The figures of `bench replay` as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lora_moe_rl.bench.report import Result
from lora_moe_rl.verify import report

WIDTHS = ("packed", "uint8", "int16", "int32")
MISMATCH = {
    "kl": "KL (k3)",
    "mean_abs_logprob_diff": "mean |Δlogprob|",
    "max_abs_logprob_diff": "largest |Δlogprob|",
    "off_by_2x": "tokens off by more than 2x",
}


def parts(result: Result) -> Iterator[Any]:
    """What is printed of the figures, the goals left out."""
    for name, table in _TABLES.items():
        if name in result:
            yield table(result[name])


def _table(title: str, names: list[str], rows: list[list[str]]):
    table = report.table(names, title)
    for row in rows:
        table.add_row(*row)
    return table


def _bytes(found: Result):
    rows = [
        [name, *("-" if row[width] is None else f"{row[width]:,}" for width in WIDTHS)]
        for name, row in found.items()
    ]
    return _table("bytes of a token's routes", ["", *WIDTHS], rows)


def _codec(found: Result):
    rows = [
        [name, f"{row['pack_gb_s']:.2f}", f"{row['unpack_gb_s']:.2f}"]
        for name, row in found.items()
    ]
    return _table("codec, GB/s of int16 ids on one core", ["", "pack", "unpack"], rows)


def _step(found: Result):
    rows = [[name, f"{1e3 * seconds:.3f}"] for name, seconds in found["seconds"].items()]
    rows.append(["all that replay adds", f"{1e3 * found['added']:.3f}"])
    rows += [
        [f"forward and backward {name} replay", f"{1e3 * seconds:.1f}"]
        for name, seconds in found["pair"].items()
    ]
    rows.append(["a step of bench step", f"{1e3 * found['step']:.1f}"])
    return _table(f"a step of {found['tokens']:,} tokens, ms", ["", "ms"], rows)


def _exchange(found: list[dict[str, Any]]):
    rows = []
    for row in found:
        seconds = [f"{1e3 * row[way]:.1f}" for way in ("asking", "told")]
        rows.append([str(row["layers"]), str(row["times"]), *seconds, f"{row['ratio']:.3f}"])
    names = ["MoE layers", "questions", "asking, ms", "told, ms", "told / asking"]
    return _table("forward and backward on two ranks with EP 2, medians", names, rows)


def _kimi(found: Result):
    rows = [[name, f"{seconds:.3f}"] for name, seconds in found["seconds"].items()]
    rows.append(["all", f"{found['total']:.3f}"])
    rows.append(["CPU seconds, packing of tokens included", f"{found['cpu_seconds']:.3f}"])
    title = (
        f"one rank's {found['layers']} MoE layers of {found['samples']} samples of "
        f"{found['tokens']:,} tokens ({found['bytes'] / 1e6:,.0f} MB), seconds"
    )
    return _table(title, ["", "s"], rows)


def _effect(found: Result):
    rows = [
        [text, f"{found['on'][name]:.2e}", f"{found['off'][name]:.2e}", _ratio(found, name)]
        for name, text in MISMATCH.items()
    ]
    title = (
        f"mismatch in bfloat16, {found['tokens']:,} tokens, {found['parameters'] / 1e6:.0f}M "
        f"parameters, {found['shape']['num_hidden_layers']} layers, "
        f"{found['shape']['n_routed_experts']} experts; without replay "
        f"{found['disagreement']:.1%} of the routes differ"
    )
    return _table(title, ["", "replay", "no replay", "ratio"], rows)


def _ratio(found: Result, name: str) -> str:
    value = found["on_over_off"][name]
    return "-" if value is None else f"{value:.3f}"


_TABLES = {
    "bytes": _bytes,
    "codec": _codec,
    "step": _step,
    "exchange": _exchange,
    "kimi": _kimi,
    "effect": _effect,
}
