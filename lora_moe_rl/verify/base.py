"""The command line of `lora-moe-rl verify base`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lora_moe_rl.config.options import positive, verify_parser
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.untrusted import read_json
from lora_moe_rl.models import quantised
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.rollout.device import check_cpu_build, check_quantised
from lora_moe_rl.verify.base_run import PROMPT, Verification
from lora_moe_rl.verify.comparisons import Comparisons
from lora_moe_rl.verify.layouts import read_config
from lora_moe_rl.verify.ranks import spec_of
from lora_moe_rl.verify.report import progress

ABOUT = """\
A quantised base, in trainer and engine: vLLM samples under a random adapter, and a Megatron rank
scores the tokens with the routes that came with them. How far the logprobs are apart, the KL
between the two, and the trainer's logprobs and gradients against those of the same model written
out as numbers, each with its bound. Float32 on the CPU; needs room for the model in float32 in the
directory for temporary files. Exit code 1 when anything is wrong. Settings are adapter.*,
trainer.fp8_forward and seed.
"""
SETTINGS = ("adapter.*", "trainer.fp8_forward", "seed")
BASE = {
    "trainer": {"dtype": "float32", "device": "cpu", "micro_batch_tokens": 1024},
}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    check_cpu_build("verify base")
    lengths = {
        "model": {"max_length": PROMPT + options.tokens},
        "rollout": {"max_response_tokens": options.tokens},
    }
    config = read_config("verify base", options.model, options.settings, SETTINGS, BASE | lengths)
    model_dir = resolve_model(config.model.path, config.model.revision)
    spec = spec_of(model_dir, config, servable=True)
    form = quantised.form(read_json(model_dir / "config.json"))
    check_quantised(config, form)
    if form is None:
        raise ConfigError(
            f"{options.model} is not quantised: trainer and engine read the same numbers, which "
            "`lora-moe-rl verify layout`, `refit` and `replay` look at"
        )
    with progress(4, options.json) as say:
        verification = Verification(config, spec, model_dir, options.samples, options.timeout, say)
        rows = verification.run()
    head = {"model": options.model, "form": form, "fp8_forward": config.trainer.fp8_forward}
    return Comparisons(head, rows, measured="found").conclude(options.json)


def _parser() -> argparse.ArgumentParser:
    parser = verify_parser("base", ABOUT)
    parser.add_argument("--samples", type=positive, default=8, help="that vLLM makes (8)")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens sampled of each (64)")
    parser.add_argument(
        "--timeout", type=positive, default=600, help="longest wait for one stage, seconds (600)"
    )
    return parser
