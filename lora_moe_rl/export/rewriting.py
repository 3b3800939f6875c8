"""The frame of commands that write a checkpoint as another: dequantise, language-model, untie."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_moe_rl.export.merged import MergeReport, Say


def rewriting_parser(name: str, about: str, epilog: str) -> argparse.ArgumentParser:
    """MODEL, --out, --revision."""
    parser = argparse.ArgumentParser(
        prog=f"lora-moe-rl {name}",
        description=about,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a directory, or a name of the hub")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty")
    parser.add_argument("--revision", help="branch, tag or commit of a model of the hub")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser


def rewritten(
    options: argparse.Namespace, write: Callable[[Path, Path, Say], MergeReport], what: str
) -> int:
    """Writes what is asked for, and says so; `what` its changed tensors are. Returns the exit
    status."""
    from rich.console import Console

    from lora_moe_rl.export.merged_out import check_out
    from lora_moe_rl.models.directory import resolve_model

    check_out(options.out)
    err = Console(highlight=False, emoji=False, markup=False, soft_wrap=True, stderr=True)
    source = resolve_model(options.model, options.revision, named="MODEL ")
    report = write(source, options.out, err.print)
    print(
        f"{report.directory}: {report.changed_tensors:,} {what}, "
        f"{report.shards} shards, {report.kept_shards} of them found finished; "
        f"{report.bytes_written / 1e9:.2f} GB written"
    )
    return 0
