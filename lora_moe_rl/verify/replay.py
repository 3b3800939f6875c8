"""The command line of `lora-moe-rl verify replay`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import names, not_negative, positive, verify_parser
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models import quantised
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.models.fit import cut_block
from lora_moe_rl.rollout.device import check_cpu_build
from lora_moe_rl.verify.comparisons import ROUNDING
from lora_moe_rl.verify.layouts import Layout, chosen, parse_layouts, read_config
from lora_moe_rl.verify.ranks import spec_of
from lora_moe_rl.verify.refit_plan import parse_engine
from lora_moe_rl.verify.replay_record import ENGINES, RESPONSE, tensor_parallel
from lora_moe_rl.verify.replay_report import TOLERANCE
from lora_moe_rl.verify.replay_run import Verification, with_recompute
from lora_moe_rl.verify.replay_spread import SPREAD
from lora_moe_rl.verify.report import progress

ABOUT = """\
Records router decisions with vLLM where a record may go wrong: prefix-cache hits, chunked prefill,
preemption, aborted and resumed requests, tensor and data parallelism, LoRA on experts. Every route
must be the Hugging Face forward's own. Replays them in Megatron in each layout: what the token
dispatchers were really given must equal the table, also where no router would choose so, and
logprobs must agree; tables that are wrong by a token, a layer or one expert must be noticed.
Float32. Exit code 1 when anything is wrong, 2 when a layout does not fit the model. Settings are
adapter.* and seed.
"""
DEFAULT_LAYOUTS = "tp2,pp2,pp2vpp2,ep2,tp2ep2,pp2+recompute"
RECOMPUTE = "+recompute"
SETTINGS = ("adapter.*", "seed")
BASE = {
    "model": {"max_length": 160},
    "adapter": {"rank": 8},
    "trainer": {"dtype": "float32", "device": "cpu", "micro_batch_tokens": 512},
    "rollout": {"max_response_tokens": RESPONSE},
    "replay": {"missing": "route", "audit": 1, "audit_samples": 1_000_000},
}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    check_cpu_build("verify replay")
    verification = _verification(options)
    with progress(len(verification.layouts) + 2, options.json) as say:
        verification.say = say
        report = verification.run()
    return report.conclude(options.json)


def _parser() -> argparse.ArgumentParser:
    parser = verify_parser("replay", ABOUT)
    parser.add_argument(
        "--layouts",
        help=f"of the trainer, with commas; {RECOMPUTE}: activations are recomputed in backward "
        f"(those of {DEFAULT_LAYOUTS} that the model allows)",
    )
    parser.add_argument(
        "--engines",
        help="roomy (plain, batched, prefix hits, aborts, LoRA), chunked (prefill), tight (a KV "
        f"cache that preempts), tp2, {SPREAD} (experts over data-parallel ranks) "
        f"(those of {','.join(ENGINES)} that the model allows)",
    )
    parser.add_argument("--samples", type=positive, default=16, help="of each condition (16)")
    parser.add_argument(
        "--tolerance",
        type=not_negative,
        default=TOLERANCE,
        help=f"for the worst token's logprob, relative where it is beyond -1 ({TOLERANCE:.0e}); "
        f"{ROUNDING} times what Hugging Face's own float32 is off by, where that is more",
    )
    parser.add_argument(
        "--timeout", type=positive, default=600, help="longest wait for one stage, seconds (600)"
    )
    return parser


def _verification(options: argparse.Namespace) -> Verification:
    """All that can be refused before anything starts. Raises ConfigError or ModelError."""
    config = read_config("verify replay", options.model, options.settings, SETTINGS, BASE)
    wanted = options.engines or ",".join(ENGINES)
    engines = names(wanted, "--engines", "an engine", (*ENGINES, SPREAD))
    if "roomy" not in engines:
        raise ConfigError("--engines: roomy is always needed: it alone serves an adapter")
    model_dir = resolve_model(config.model.path, config.model.revision)
    form = quantised.form_in(model_dir)
    spec = spec_of(model_dir, config)
    if not any(site.module.startswith("experts.") for site in spec):
        raise ConfigError("adapter.targets leaves the routed experts out; verify replay needs them")
    engines = _allowed(engines, options.engines is not None, config, spec, form)

    def parse(wanted: list[str]) -> list[Layout]:
        return _layouts(wanted, config, spec, form)

    return Verification(
        config,
        spec,
        model_dir,
        chosen(options.layouts, DEFAULT_LAYOUTS, parse, "--layouts"),
        [name for name in engines if name != SPREAD],
        options.samples,
        options.timeout,
        options.tolerance,
        parse_engine(SPREAD, config, spec) if SPREAD in engines else None,
    )


def _allowed(
    engines: list[str], named: bool, config: RunConfig, spec: AdapterSpec, form: str | None
) -> list[str]:
    """Without tp2 where its ranks would cut blocks of FP8 weights. Raises ConfigError when it was
    named."""
    cut = cut_block(spec.shape, tensor_parallel(config).rollout) if form == "fp8" else ""
    if not cut or "tp2" not in engines:
        return engines
    if named:
        raise ConfigError(f"--engines: tp2: {cut}")
    print(f"tp2 is left out: {cut}", file=sys.stderr)
    return [name for name in engines if name != "tp2"]


def _layouts(
    wanted: Sequence[str], config: RunConfig, spec: AdapterSpec, form: str | None
) -> list[Layout]:
    plain = [name.removesuffix(RECOMPUTE) for name in wanted]
    layouts = parse_layouts(plain, config, spec.shape, form)
    return [
        with_recompute(layout) if name.endswith(RECOMPUTE) else layout
        for name, layout in zip(wanted, layouts, strict=True)
    ]
