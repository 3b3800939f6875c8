"""The tables of `bench kernels`."""

from __future__ import annotations

from typing import Any

from lora_moe_rl.bench.kernel_contenders import CONTENDERS
from lora_moe_rl.bench.step import BUSY


def show(result: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    ceilings = result["ceilings"]
    console.print(
        f"{result['device']}, {result['date']}, {versions}\n"
        f"copy {ceilings['copy_gb_s']:.1f} GB/s, matmul {ceilings['matmul_tflop_s']:.3f} TFLOP/s"
    )
    console.print(adapters(result["adapters"]))
    for name, reason in _reasons(result["adapters"]).items():
        console.print(f"{name} was not run: {reason}")
    console.print(merges(result["merge"]))
    console.print(codec(result["codec"]))
    if (busy := result["busy_cores_before"]) > BUSY:
        console.print(
            f"just before, other programs kept {busy:.2f} cores busy: measure again on a quiet "
            "machine",
            style="yellow",
        )
    if result["gpu_figures"]:
        console.print(result["gpu_figures"])


def adapters(rows: list[dict[str, Any]]):
    """Milliseconds of each contender; ours also as a share of the base layer."""
    table = _table("adapters of one MoE layer, forward and backward, ms")
    for name in ("shape", "tokens", "rank", "load", *CONTENDERS, "ours / base", "GB/s", "TFLOP/s"):
        table.add_column(name, justify="left" if name in ("shape", "load") else "right")
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
    table = _table("merge of gate and up, rank 32")
    for name in ("shape", "format", "ms", "GB/s", "of a copy"):
        table.add_column(name, justify="left" if name in ("shape", "format") else "right")
    for row in rows:
        table.add_row(
            _label(row["shape"]), row["format"], f"{1e3 * row['seconds']:.2f}",
            f"{row['gb_s']:.2f}", f"{row['share_of_copy']:.0%}",
        )  # fmt: skip
    return table


def codec(rows: list[dict[str, Any]]):
    table = _table("route codec, GB/s of int16 ids")
    for name in ("model", "tokens", "bytes a token", "pack", "unpack", "unpack, of a copy"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(
            row["name"], str(row["tokens"]), str(row["row_bytes"]), f"{row['pack_gb_s']:.2f}",
            f"{row['unpack_gb_s']:.2f}", f"{row['unpack_share_of_copy']:.0%}",
        )  # fmt: skip
    return table


def _table(title: str):
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold")


def _label(shape: dict[str, Any]) -> str:
    sides = f"{shape['experts']} x {shape['hidden']}/{shape['intermediate']}"
    scaled = f", 1/{shape['scaled']} sides" if shape["scaled"] > 1 else ""
    return f"{shape['name']} ({sides}{scaled})"


def _reasons(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {name: reason for row in rows for name, reason in row["not_run"].items()}
