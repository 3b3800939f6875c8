"""The command line of `lora-moe-rl verify layout`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lora_moe_rl.adapters.sharding import reductions
from lora_moe_rl.config.options import not_negative, positive, verify_parser
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.verify.layout import DEFAULT_LAYOUTS, Verification, make_config, plan
from lora_moe_rl.verify.report import progress

ABOUT = """\
For each layout, with the same samples, replayed routes and random adapters, compare with one rank:
the adapter before training, loss, logprobs, the gradient of every adapted linear, the gradient
norm, the adapter after three optimizer steps, and the checkpoint. One rank is compared with the
Hugging Face forward of the hand-merged weights. Exit code 1 when anything is wrong, 2 when a layout
does not fit the model. Settings are adapter.*, trainer.device, trainer.dtype (by default float32)
and seed.
"""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    config = make_config(options.model, options.settings)
    model_dir = resolve_model(config.model.path, config.model.revision)
    dropped = tuple(_entry(text) for text in options.drop)
    spec, layouts = plan(config, options.layouts, model_dir)
    with progress(len(layouts) + 3, options.json) as say:
        verification = Verification(
            spec,
            model_dir,
            layouts,
            options.samples,
            options.timeout,
            options.tolerance,
            dropped,
            say,
        )
        report = verification.run()
    return report.conclude(options.json)


def _parser() -> argparse.ArgumentParser:
    parser = verify_parser("layout", ABOUT)
    parser.add_argument(
        "--layouts",
        help="names as tp2ep2, pp2vpp2, etp2tp2, tp2dp2, with commas "
        f"(those of {DEFAULT_LAYOUTS} that the model allows)",
    )
    parser.add_argument("--samples", type=positive, default=32, help="sequences (32)")
    parser.add_argument(
        "--tolerance",
        type=not_negative,
        help="for loss, logprobs and gradients, in place of that of the device and dtype "
        "(float32 on the CPU: 1e-5)",
    )
    parser.add_argument(
        "--timeout", type=positive, default=600, help="longest wait for one layout, seconds (600)"
    )
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="KIND.TENSOR.AXIS",
        help="leave one sum of the sharding table out, as column.A.tp, to see it noticed",
    )
    return parser


def _entry(text: str) -> tuple[str, str, str]:
    known = {".".join(entry): entry for entry in reductions()}
    if text not in known:
        raise ConfigError(f"--drop {text} is not in the table; there are {', '.join(known)}")
    return known[text]
