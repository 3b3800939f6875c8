"""`lora-moe-rl dequantise`: a quantised checkpoint as one of numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_moe_rl.export.rewriting import rewriting_parser, rewritten

if TYPE_CHECKING:
    from lora_moe_rl.export.merged import MergeReport, Say

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
    from lora_moe_rl.export.merged import dequantise

    options = _parser().parse_args(argv)

    def write(source: Path, out: Path, say: Say) -> MergeReport:
        return dequantise(source, out, options.dtype, say)

    return rewritten(options, write, f"quantised tensors as {options.dtype}")


def _parser() -> argparse.ArgumentParser:
    parser = rewriting_parser("dequantise", ABOUT, EPILOG)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float16"),
        default="bfloat16",
        help="of the numbers (bfloat16, in which INT4 is rounded once, MXFP4 exact)",
    )
    return parser
