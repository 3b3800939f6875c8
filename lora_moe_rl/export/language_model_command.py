"""`lora-moe-rl language-model`: the language model of one of text and images."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

ABOUT = """\
Write the language model of a checkpoint of text and images (Kimi-K2.5, Kimi-K2.6) as a checkpoint
of its own, which is then trained, served and exported like Kimi-K2. Tensors are copied bit for bit,
INT4 as it is; the vision tower is left where it is. A command that was stopped goes on.
"""
EPILOG = """\
example:
  lora-moe-rl language-model moonshotai/Kimi-K2.5 --out kimi-k2.5-text
"""


def main(argv: Sequence[str]) -> int:
    from rich.console import Console

    from lora_moe_rl.export.language_model import write
    from lora_moe_rl.export.merged_out import check_out
    from lora_moe_rl.models.directory import resolve_model

    options = _parser().parse_args(argv)
    check_out(options.out)
    err = Console(highlight=False, emoji=False, markup=False, soft_wrap=True, stderr=True)
    source = resolve_model(options.model, options.revision, named="MODEL ")
    report = write(source, options.out, err.print)
    print(
        f"{report.directory}: {report.changed_tensors:,} tensors of the language model, "
        f"{report.shards} shards, {report.kept_shards} of them found finished; "
        f"{report.bytes_written / 1e9:.2f} GB written"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl language-model",
        description=ABOUT,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a directory, or a name of the hub")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty")
    parser.add_argument("--revision", help="branch, tag or commit of a model of the hub")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser
