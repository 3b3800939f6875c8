"""`lora-moe-rl language-model`: the language model of one of text and images."""

from __future__ import annotations

from collections.abc import Sequence

from lora_moe_rl.export.rewriting import rewriting_parser, rewritten

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
    from lora_moe_rl.export.language_model import write

    options = rewriting_parser("language-model", ABOUT, EPILOG).parse_args(argv)
    return rewritten(options, write, "tensors of the language model")
