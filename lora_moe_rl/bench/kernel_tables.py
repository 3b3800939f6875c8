"""The tables of `bench kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lora_moe_rl.bench.kernel_contenders import CONTENDERS
from lora_moe_rl.verify import report


def parts(result: dict[str, Any]) -> Iterator[Any]:
    """What is printed of the figures."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    ceilings = result["ceilings"]
    yield (
        f"{result['device']}, {result['date']}, {versions}\n"
        f"copy {ceilings['copy_gb_s']:.1f} GB/s, matmul {ceilings['matmul_tflop_s']:.3f} TFLOP/s"
    )
    yield adapters(result["adapters"])
    for name, reason in _reasons(result["adapters"]).items():
        yield f"{name} was not run: {reason}"
    yield merges(result["merge"])
    yield codec(result["codec"])
    if result["gpu_figures"]:
        yield result["gpu_figures"]


def adapters(rows: list[dict[str, Any]]):
    """Milliseconds of each contender; ours also as a share of the base layer."""
    title = "adapters of one MoE layer, forward and backward, ms"
    columns = ("shape", "tokens", "rank", "load", *CONTENDERS, "ours / base", "GB/s", "TFLOP/s")
    table = report.table(columns, title, left=(0, 3))
    for row in rows:
        times = row["seconds"]
        cells = [f"{1e3 * times[name]:.2f}" if name in times else "-" for name in CONTENDERS]
        table.add_row(
            _label(row["shape"]), str(row["tokens"]), str(row["rank"]), row["load"], *cells,
            f"{row['share_of_base']:.0%}",
            f"{row['gb_s']:.1f} ({row['share_of_copy']:.0%})",
            f"{row['tflop_s']:.3f} ({row['share_of_matmul']:.0%})",
        )  # fmt: skip
    return table


def merges(rows: list[dict[str, Any]]):
    columns = ("shape", "format", "ms", "GB/s", "of a copy")
    table = report.table(columns, "merge of gate and up, rank 32", left=(0, 1))
    for row in rows:
        table.add_row(
            _label(row["shape"]), row["format"], f"{1e3 * row['seconds']:.2f}",
            f"{row['gb_s']:.2f}", f"{row['share_of_copy']:.0%}",
        )  # fmt: skip
    return table


def codec(rows: list[dict[str, Any]]):
    columns = ("model", "tokens", "bytes a token", "GB/s", "of a copy")
    table = report.table(columns, "route codec, one layer's ids unpacked")
    for row in rows:
        table.add_row(
            row["name"], str(row["tokens"]), str(row["row_bytes"]),
            f"{row['unpack_gb_s']:.2f}", f"{row['unpack_share_of_copy']:.0%}",
        )  # fmt: skip
    return table


def _label(shape: dict[str, Any]) -> str:
    sides = f"{shape['experts']} x {shape['hidden']}/{shape['intermediate']}"
    scaled = f", 1/{shape['scaled']} sides" if shape["scaled"] > 1 else ""
    return f"{shape['name']} ({sides}{scaled})"


def _reasons(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {name: reason for row in rows for name, reason in row["not_run"].items()}
