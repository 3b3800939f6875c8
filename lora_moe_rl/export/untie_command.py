"""`lora-moe-rl untie`: a head of its own for a model whose head is its embedding."""

from __future__ import annotations

from collections.abc import Sequence

from lora_moe_rl.export.rewriting import rewriting_parser, rewritten

ABOUT = """\
Write a checkpoint whose head is its embedding (tie_word_embeddings; Qwen3-4B and smaller,
ERNIE-4.5-21B-A3B) with the embedding once more as its head. It is the same model, which is then
trained, served and exported; its adapters are those of the first. A command that was stopped goes
on.
"""
EPILOG = """\
example:
  lora-moe-rl untie Qwen/Qwen3-0.6B --out qwen3-0.6b-untied
"""


def main(argv: Sequence[str]) -> int:
    from lora_moe_rl.export.untie import write

    options = rewriting_parser("untie", ABOUT, EPILOG).parse_args(argv)
    return rewritten(options, write, "tensors, the embedding twice")
