"""`lora-moe-rl serve-check`: an exported adapter in `vllm serve`, against the merged model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lora_moe_rl.config.options import above_zero, not_negative, result_parser
from lora_moe_rl.rollout.facts import slot_rank
from lora_moe_rl.verify.comparisons import (
    Comparisons,
    largest,
    largest_scaled,
    random_prompts,
)
from lora_moe_rl.verify.forward import Forward, allowed
from lora_moe_rl.verify.report import Check

ABOUT = """\
Start `vllm serve` with the base and the adapter on loopback, ask it for logprobs through the OpenAI
API, and compare them with the merged model in transformers, in float64 (float32 where memory is too
small for that): that of --merged DIR, or the base with scale * B A added to its weights. The base
alone is compared too. The server is ended. Exit code 1 when they differ.
"""
# Largest |difference| of a logprob, by dtype of the server; in float32 relative where it is beyond
# -1, and 3 times what transformers' own float32 is off by, where that is more.
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.2, "float16": 0.05}
NEW_TOKENS = 8


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    report = check(options)
    if not options.json:
        print(report.head["command"])
    return report.conclude(options.json)


def _parser() -> argparse.ArgumentParser:
    parser = result_parser("serve-check", ABOUT)
    parser.add_argument("adapter", type=Path, metavar="DIR", help="a PEFT directory")
    parser.add_argument("--base", required=True, metavar="DIR", help="the base model")
    parser.add_argument("--merged", type=Path, metavar="DIR", help="an exported merged model")
    parser.add_argument("--dtype", choices=list(TOLERANCES), help="of the server (CPU: float32)")
    parser.add_argument("--tolerance", type=not_negative, help="in place of that of the dtype")
    parser.add_argument(
        "--timeout", type=above_zero, default=600, help="for the start, seconds (600)"
    )
    return parser


def check(options: argparse.Namespace) -> Comparisons:
    """Starts the server and compares it; the report holds its command."""
    from lora_moe_rl.files import adapter_source as source
    from lora_moe_rl.models.directory import check_model_dir, resolve_model
    from lora_moe_rl.rollout import device as engine_device
    from lora_moe_rl.verify import serving

    base = resolve_model(options.base, named="--base ")
    if options.merged is not None:
        check_model_dir(options.merged)
    found = source.load(options.adapter, base)
    dtype = options.dtype or ("float32" if engine_device.is_cpu() else "bfloat16")
    tolerance = TOLERANCES[dtype] if options.tolerance is None else options.tolerance
    shape, say = found.spec.shape, lambda text: print(text, file=sys.stderr)
    prompts = random_prompts(shape.vocab_size)
    say("starting vllm serve")
    with serving.start(
        base, options.adapter, slot_rank(found.spec), shape, dtype, options.timeout
    ) as server:
        served = [server.logprobs(serving.ADAPTER, ids, NEW_TOKENS) for ids in prompts]
        bare = [server.logprobs(str(base), ids, NEW_TOKENS) for ids in prompts]
        command = server.command
    say("comparing with transformers")
    plain = Forward(base)
    adapter = (None, None) if options.merged is not None else (found.spec, found.tensors)
    merged = Forward(options.merged or base, *adapter)
    error = largest_scaled if dtype == "float32" else largest
    at_least = 0.0
    rows = []
    for name, said, forward in (
        ("base", bare, plain),
        ("adapter, against merged", served, merged),
    ):
        exact, rounding = forward.of([ids for ids, _ in said])
        limit = allowed(tolerance, rounding) if dtype == "float32" else tolerance
        at_least = max(at_least, 5 * limit)
        rows.append(Check(name, error([values for _, values in said], exact), limit))
    # Nearer to the base than this, and serving the base would pass.
    without, _ = plain.of([ids for ids, _ in served])
    apart = error([values for _, values in served], without)
    rows.append(Check("adapter, against base", apart, at_least, at_least=True))
    return Comparisons({"command": command}, rows)
