"""`lora-moe-rl serve-check`: an exported adapter in `vllm serve`, against the merged model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lora_moe_rl.export.comparisons import Comparison, as_json, largest, show
from lora_moe_rl.rollout.facts import slot_rank

ABOUT = """\
Start `vllm serve` with the base and the adapter on loopback, ask it for logprobs through the OpenAI
API, and compare them with the merged model in transformers, in float32: that of --merged DIR, or
the base with scale * B A added to its weights. The base alone is compared too. The server is ended.
Exit code 1 when they differ.
"""
# Largest |difference| of a logprob, by dtype of the server.
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.2, "float16": 0.05}
PROMPTS, NEW_TOKENS = (5, 24, 60, 120), 8


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    rows, command = check(options)
    if options.json:
        print(json.dumps({"command": command, **as_json(rows)}, indent=1))
    else:
        print(command)
        show(rows)
    return 0 if all(row.passed for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl serve-check",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("adapter", type=Path, metavar="DIR", help="a PEFT directory")
    parser.add_argument("--base", required=True, metavar="DIR", help="the base model")
    parser.add_argument("--merged", type=Path, metavar="DIR", help="an exported merged model")
    parser.add_argument("--dtype", choices=list(TOLERANCES), help="of the server (CPU: float32)")
    parser.add_argument("--tolerance", type=float, help="in place of that of the dtype")
    parser.add_argument("--timeout", type=float, default=600, help="for the start, seconds (600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser


def check(options: argparse.Namespace) -> tuple[list[Comparison], str]:
    """(comparisons, the command of the server)."""
    from lora_moe_rl.export import serving
    from lora_moe_rl.files import adapter_source as source
    from lora_moe_rl.models.directory import resolve_model
    from lora_moe_rl.rollout import platform
    from lora_moe_rl.verify import hf

    base = resolve_model(options.base)
    found = source.load(options.adapter, base)
    dtype = options.dtype or ("float32" if platform.is_cpu() else "bfloat16")
    tolerance = TOLERANCES[dtype] if options.tolerance is None else options.tolerance
    shape, say = found.spec.shape, lambda text: print(text, file=sys.stderr)
    prompts = random_prompts(shape.vocab_size)
    say("starting vllm serve")
    mla = shape.family.attention == "mla"
    with serving.start(
        base, options.adapter, slot_rank(found.spec), mla, dtype, options.timeout
    ) as server:
        served = [server.logprobs(serving.ADAPTER, ids, NEW_TOKENS) for ids in prompts]
        bare = [server.logprobs(str(base), ids, NEW_TOKENS) for ids in prompts]
        command = server.command
    say("comparing with transformers")
    model = hf.load(base)
    expected_bare = [hf.logprobs(model, ids) for ids, _ in bare]
    without = [hf.logprobs(model, ids) for ids, _ in served]
    if options.merged is not None:
        model = hf.load(options.merged)
    else:
        hf.merge(model, found.spec, found.tensors)
    expected = [hf.logprobs(model, ids) for ids, _ in served]
    scores = [values for _, values in served]
    return [
        Comparison("base", largest([v for _, v in bare], expected_bare), tolerance),
        Comparison("adapter, against merged", largest(scores, expected), tolerance),
        # Nearer to the base than this, and serving the base would pass.
        Comparison("adapter, against base", largest(scores, without), 5 * tolerance, at_least=True),
    ], command


def random_prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, length).tolist() for length in PROMPTS]
