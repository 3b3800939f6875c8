"""`lora-moe-rl serve-check`: an exported adapter in `vllm serve`, against the merged model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lora_moe_rl.config.options import above_zero, not_negative, result_parser
from lora_moe_rl.rollout.facts import slot_rank
from lora_moe_rl.verify.comparisons import Comparisons, largest, random_prompts
from lora_moe_rl.verify.report import Check

ABOUT = """\
Start `vllm serve` with the base and the adapter on loopback, ask it for logprobs through the OpenAI
API, and compare them with the merged model in transformers, in float32: that of --merged DIR, or
the base with scale * B A added to its weights. The base alone is compared too. The server is ended.
Exit code 1 when they differ.
"""
# Largest |difference| of a logprob, by dtype of the server.
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
    from lora_moe_rl.verify import hf, serving

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
    model = hf.load(base)
    expected_bare = [hf.logprobs(model, ids) for ids, _ in bare]
    without = [hf.logprobs(model, ids) for ids, _ in served]
    if options.merged is not None:
        model = hf.load(options.merged)
    else:
        hf.merge(model, found.spec, found.tensors)
    expected = [hf.logprobs(model, ids) for ids, _ in served]
    scores = [values for _, values in served]
    rows = [
        Check("base", largest([v for _, v in bare], expected_bare), tolerance),
        Check("adapter, against merged", largest(scores, expected), tolerance),
        # Nearer to the base than this, and serving the base would pass.
        Check("adapter, against base", largest(scores, without), 5 * tolerance, at_least=True),
    ]
    return Comparisons({"command": command}, rows)
