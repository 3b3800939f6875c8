"""The command line of `lora-moe-rl verify async`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lora_moe_rl.config.options import not_negative, positive, verify_parser
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.rollout.device import check_cpu_build
from lora_moe_rl.verify.comparisons import Comparisons
from lora_moe_rl.verify.in_flight_run import PROMPT, PUBLISHED, WAYS, Verification
from lora_moe_rl.verify.layouts import read_config
from lora_moe_rl.verify.ranks import spec_of
from lora_moe_rl.verify.report import progress

ABOUT = f"""\
Samples with vLLM while newer adapter versions are published, {PUBLISHED} in all, in each way that a
run has: requests end on the version they began with (finish), or go on under the newest, with
routes to be trained joined or split. Then every sampled token is scored again under the version
that it carries, by an engine that serves nothing else, and by a Megatron rank at that version with
the routes that came with the samples. What the trainer is off with joined routes is shown. Float32
on the CPU. Exit code 1 when anything is wrong. Settings are adapter.* and seed.
"""
TOLERANCE = 1e-5
SETTINGS = ("adapter.*", "seed")
BASE = {
    "trainer": {"dtype": "float32", "device": "cpu", "micro_batch_tokens": 1024},
}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    check_cpu_build("verify async")
    lengths = {
        "model": {"max_length": PROMPT + options.tokens + 1},  # to score is to ask for one more
        "rollout": {"max_response_tokens": options.tokens},
    }
    config = read_config("verify async", options.model, options.settings, SETTINGS, BASE | lengths)
    model_dir = resolve_model(config.model.path, config.model.revision)
    spec = spec_of(model_dir, config, servable=True)
    with progress(2 * len(WAYS) + 2, options.json) as say:
        verification = Verification(
            config, spec, model_dir, options.samples, options.timeout, options.tolerance, say
        )
        rows = verification.run()
    return Comparisons({"model": options.model}, rows).conclude(options.json)


def _parser() -> argparse.ArgumentParser:
    parser = verify_parser("async", ABOUT)
    parser.add_argument("--samples", type=positive, default=8, help="in flight at once (8)")
    parser.add_argument("--tokens", type=positive, default=128, help="tokens sampled of each (128)")
    parser.add_argument(
        "--tolerance", type=not_negative, default=TOLERANCE, help=f"({TOLERANCE:.0e})"
    )
    parser.add_argument(
        "--timeout", type=positive, default=600, help="longest wait for one stage, seconds (600)"
    )
    return parser
