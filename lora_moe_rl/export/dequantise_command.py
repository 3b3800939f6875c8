"""`lora-moe-rl dequantise`: a quantised checkpoint as one of numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

ABOUT = """\
Write the model of a quantised checkpoint as numbers, for what takes no such base: GPT-OSS (MXFP4),
MiniMax-M2 (FP8). Known are gpt-oss's stacks of MXFP4, FP8 in blocks of 128 x 128 with float32
scales, and compressed-tensors' INT4 and MXFP4 in groups of 32.

A tensor is in memory a few rows at a time, or an expert; a command that was stopped goes on.
"""
EPILOG = """\
examples:
  lora-moe-rl dequantise openai/gpt-oss-20b --out gpt-oss-20b-bf16
  lora-moe-rl dequantise MODEL_DIR --dtype float32 --out DIR
"""


def main(argv: Sequence[str]) -> int:
    from rich.console import Console

    from lora_moe_rl.export.merged import dequantise
    from lora_moe_rl.export.merged_out import check_out
    from lora_moe_rl.models.directory import resolve_model

    options = _parser().parse_args(argv)
    check_out(options.out)
    err = Console(highlight=False, emoji=False, markup=False, soft_wrap=True, stderr=True)
    source = resolve_model(options.model, options.revision, named="MODEL ")
    report = dequantise(source, options.out, options.dtype, err.print)
    print(
        f"{report.directory}: {report.changed_tensors:,} quantised tensors as {options.dtype}, "
        f"{report.shards} shards, {report.kept_shards} of them found finished; "
        f"{report.bytes_written / 1e9:.2f} GB written"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl dequantise",
        description=ABOUT,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a directory, or a name of the hub")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float16"),
        default="bfloat16",
        help="of the numbers (bfloat16, in which INT4 is rounded once, MXFP4 exact)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model of the hub")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser
