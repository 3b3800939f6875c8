"""The command line of `lora-moe-rl verify refit`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import names, positive, verify_parser
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models import quantised
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.models.tokenizer import check_tokenizer
from lora_moe_rl.refit.plan import Plan
from lora_moe_rl.upstream.versions import vllm_on_cpu
from lora_moe_rl.verify.layouts import Layout, chosen, parse_layouts, placed, read_config
from lora_moe_rl.verify.ranks import spec_of
from lora_moe_rl.verify.refit_plan import TRANSPORTS, Engine, covering, parse_engine, parse_fault
from lora_moe_rl.verify.refit_run import RefitVerification
from lora_moe_rl.verify.report import progress

ABOUT = """\
Puts a random adapter from real Megatron ranks into real vLLM engines, as a run does, and compares
vLLM's logprobs with the trainer's (with vLLM's routes replayed), with Hugging Face's forward of the
hand-merged weights, and with the base's, which must differ; and every adapter slot with what vLLM's
own loader puts into one. Every two of an engine, a trainer and a transport meet. With --mode merged
engines have no slots: what can be read back of their weights is compared with base + adapter. Exit
code 1 when anything is wrong, 2 when a layout does not fit the model. Settings are adapter.*,
trainer.device, trainer.dtype (by default float32, with engines on GPUs bfloat16),
rollout.gpu_memory_utilization and seed.
"""
DEFAULT_ENGINES = {"adapter": "tp1,tp2,tp2ep,tp2fs", "merged": "tp1,tp2,tp2ep"}
DEFAULT_TRAINERS = "tp2,pp2,ep2,tp2ep2"
DEFAULT_TRANSPORTS = "shm,distributed,directory"
SETTINGS = (
    "adapter.*", "trainer.device", "trainer.dtype", "rollout.gpu_memory_utilization", "seed",
)  # fmt: skip
# One slot for the adapter from files, and two as in a run.
BASE = {"model": {"max_length": 64}}
REFIT = {"adapter": {"slots": 3}, "merged": {"mode": "merged"}}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    verification = make_verification(options)
    phases = len(verification.combinations) + len(verification.engines) + 1
    with progress(phases, options.json) as say:
        verification.say = say
        report = verification.run()
    return report.conclude(options.json)


def make_verification(options: argparse.Namespace) -> RefitVerification:
    """All that can be refused before anything starts."""
    config = make_config(options.model, options.settings, options.mode)
    model_dir = resolve_model(config.model.path, config.model.revision)
    check_tokenizer(model_dir, config.model.trust_remote_code)  # engines load it, as in a run
    spec = spec_of(model_dir, config, servable=options.mode == "adapter")
    form = quantised.form_in(model_dir)
    engines, left_out = _engines(options.engines, config, spec, form)

    def parse(wanted: list[str]) -> list[Layout]:
        return parse_layouts(wanted, config, spec.shape, form)

    trainers = placed(chosen(options.trainers, DEFAULT_TRAINERS, parse, "--trainers"))
    placing = trainers[0].config.trainer.model_dump(include={"device", "dtype"})
    config = with_settings(config, {"trainer": placing})
    transports = names(options.transports, "--transports", "a transport", TRANSPORTS)
    combinations = covering([e.name for e in engines], [t.name for t in trainers], transports)
    fault = parse_fault(options.fault, spec) if options.fault else None
    for engine in engines:
        if fault is not None:
            fault(Plan((), 4), engine.layout(spec))  # refuses what it cannot be done to
    return RefitVerification(
        config,
        spec,
        model_dir,
        engines,
        trainers,
        combinations,
        options.samples,
        options.timeout,
        fault,
        left_out,
    )


def make_config(model: str, settings: Sequence[str] = (), mode: str = "adapter") -> RunConfig:
    """Raises ConfigError for a setting that this command does not read."""
    # vLLM's kernels of adapters on GPUs take 16 bits alone.
    dtype = "float32" if vllm_on_cpu() else "bfloat16"
    base = BASE | {"refit": REFIT[mode], "trainer": {"dtype": dtype}}
    return read_config("verify refit", model, settings, SETTINGS, base)


def _engines(
    named: str | None, config: RunConfig, spec: AdapterSpec, form: str | None
) -> tuple[list[Engine], list[str]]:
    """Those that were named, or those of the default that the model allows and why others are
    not."""
    if named is not None:
        wanted = names(named, "--engines", "an engine")
        return [parse_engine(name, config, spec, form) for name in wanted], []
    engines, left_out = [], []
    for name in DEFAULT_ENGINES[config.refit.mode].split(","):
        try:
            engines.append(parse_engine(name, config, spec, form))
        except ConfigError as error:
            left_out.append(str(error).removeprefix("--engines: "))
    if not engines:
        raise ConfigError(f"--engines: none of the default can be: {'; '.join(left_out)}")
    return engines, left_out


def _parser() -> argparse.ArgumentParser:
    parser = verify_parser("refit", ABOUT)
    parser.add_argument(
        "--engines",
        help="tp1, tp2, tp2ep (experts over the ranks), tp2fs (fully sharded adapters), dp2ep "
        "(experts over data-parallel ranks), with commas "
        f"(those of {DEFAULT_ENGINES['adapter']} that the model allows)",
    )
    parser.add_argument(
        "--mode",
        choices=tuple(REFIT),
        default="adapter",
        help="adapters in slots, or merged into the weights (adapter)",
    )
    parser.add_argument(
        "--trainers",
        help=f"layouts as in verify layout (those of {DEFAULT_TRAINERS} that the model allows)",
    )
    parser.add_argument(
        "--transports",
        default=DEFAULT_TRANSPORTS,
        help=f"of {', '.join(TRANSPORTS)} ({DEFAULT_TRANSPORTS})",
    )
    parser.add_argument("--samples", type=positive, default=32, help="sequences (32)")
    parser.add_argument(
        "--timeout",
        type=positive,
        default=600,
        help="longest life of a trainer layout, seconds (600)",
    )
    parser.add_argument(
        "--fault",
        metavar="KIND:TENSOR",
        help="leave a tensor's transfers out (left-out:layers.1.o_proj.A), or send them to the "
        "next engine rank (misplaced:layers.1.experts.up.B), to see it noticed",
    )
    return parser
