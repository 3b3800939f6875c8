"""`lora-moe-rl export`: an adapter for PEFT and vLLM, or a merged model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_moe_rl.config.options import natural, not_negative
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rollout.facts import SLOT_RANKS, slot_rank

if TYPE_CHECKING:
    from lora_moe_rl.adapters.families import ModelShape
    from lora_moe_rl.adapters.peft_config import Form as PeftForm
    from lora_moe_rl.config import ModelConfig
    from lora_moe_rl.export.merged import MergeReport
    from lora_moe_rl.export.merged_weights import Form
    from lora_moe_rl.files.adapter_source import Source

ABOUT = """\
Write what a run trained for other tools: as a PEFT adapter, or merged into its base.

SOURCE is a run directory (its newest valid checkpoint), a checkpoint, or a PEFT directory.
"""
EPILOG = """\
examples:
  lora-moe-rl export RUN --to peft --out adapter
  lora-moe-rl export RUN --to peft --for vllm --out adapter
  lora-moe-rl export RUN --to peft --critic --out critic
  lora-moe-rl export RUN --to peft --out adapter --push-to-hub me/demo-adapter
  lora-moe-rl export RUN --to merged --base Qwen/Qwen3-30B-A3B --out merged
"""
WORST_SHOWN = 10  # tensors
# Of the change that rounding takes away (refit.warn_lost and refit.stop_lost of a merged refit).
WARN_LOST, STOP_LOST = 0.1, 0.9
OF_MERGED = ("dtype", "adapted_float32", "rounding", "seed", "warn_lost", "stop_lost")


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    _check_options(options)
    code = _export_merged(options) if options.to == "merged" else _export_peft(options)
    if options.push_to_hub is not None:
        from lora_moe_rl.export import hub

        print(hub.push(options.out, options.push_to_hub, bool(options.public)))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl export",
        description=ABOUT,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("--to", choices=("peft", "merged"), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty")
    parser.add_argument(
        "--form",
        choices=("2d", "3d"),
        help="of routed experts in a PEFT adapter: one by one (the default; vLLM, Megatron-Bridge, "
        "PEFT), or stacked in target_parameters (PEFT with transformers 5)",
    )
    parser.add_argument(
        "--for",
        dest="reader",
        choices=("vllm",),
        help="vllm: one rank, that of a slot, and one scale for all modules, which is what "
        "--max-lora-rank needs to know; the function is the same",
    )
    parser.add_argument(
        "--critic", action="store_const", const=True,
        help="the critic instead of the policy: adapters with the value head as the layer `score` "
        "of transformers' classes for sequence classification",
    )  # fmt: skip
    parser.add_argument(
        "--base", metavar="DIR", help="the base model; by default the one that the source names"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of a merged model; by default "
        "the base's own form",
    )  # fmt: skip
    parser.add_argument(
        "--adapted-float32", action="store_const", const=True,
        help="write what the adapter changes in float32, all else as the base has it",
    )  # fmt: skip
    parser.add_argument(
        "--rounding",
        choices=("nearest", "stochastic"),
        help="of sums to bfloat16 and float16: to the nearest (the default), which loses changes "
        "smaller than half a step; or to either neighbour, so that the mean is the sum",
    )
    parser.add_argument("--seed", type=natural, help="of --rounding stochastic (0)")
    parser.add_argument(
        "--warn-lost", type=not_negative, metavar="SHARE", help="warn when rounding takes more "
        f"than this of the change away ({WARN_LOST:g})",
    )  # fmt: skip
    parser.add_argument(
        "--stop-lost", type=not_negative, metavar="SHARE", help="write nothing that loads when it "
        f"takes more than this ({STOP_LOST:g})",
    )  # fmt: skip
    parser.add_argument(
        "--push-to-hub", metavar="OWNER/NAME", help="then put it on the Hugging Face hub, where it "
        "is private unless --public; the token is that of HF_TOKEN or of `hf auth login`",
    )  # fmt: skip
    parser.add_argument(
        "--public", action="store_const", const=True, help="with --push-to-hub: for everybody"
    )
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser


def _check_options(options: argparse.Namespace) -> None:
    other = {"merged": ("form", "reader", "critic"), "peft": OF_MERGED}[options.to]
    for name in other:
        if getattr(options, name) is not None:
            flag = "for" if name == "reader" else name.replace("_", "-")
            raise ConfigError(f"--{flag} has no effect with --to {options.to}")
    if options.reader == "vllm" and options.form == "3d":
        raise ConfigError("--for vllm writes experts one by one: leave out --form 3d")
    if options.reader == "vllm" and options.critic:
        raise ConfigError("--for vllm and --critic are both given: vLLM serves no value head")
    if options.adapted_float32 and options.dtype is not None:
        raise ConfigError(f"--adapted-float32 and --dtype {options.dtype} are both given: choose")
    if options.seed is not None and options.rounding != "stochastic":
        raise ConfigError(f"--seed {options.seed} has no effect without --rounding stochastic")
    if options.public and options.push_to_hub is None:
        raise ConfigError("--public has no effect without --push-to-hub OWNER/NAME")
    if options.push_to_hub is not None:
        from lora_moe_rl.export import hub

        hub.check_name(options.push_to_hub)


def _base(options: argparse.Namespace) -> Path | None:
    from lora_moe_rl.models.directory import resolve_model

    return resolve_model(options.base, named="--base ") if options.base else None


def _export_peft(options: argparse.Namespace) -> int:
    from lora_moe_rl.adapters import peft
    from lora_moe_rl.adapters.spec import VALUE_HEAD
    from lora_moe_rl.config import ModelConfig
    from lora_moe_rl.export import card, chat_template
    from lora_moe_rl.export.peft_out import check_form, disk_errors
    from lora_moe_rl.export.run_settings import run_of
    from lora_moe_rl.files import adapter_source as source
    from lora_moe_rl.files import trainer_state
    from lora_moe_rl.files.out_directory import require_empty

    require_empty(options.out)
    whose = trainer_state.CRITIC if options.critic else trainer_state.POLICY
    found = source.load(options.source, _base(options), whose=whose)
    spec, tensors = found.spec, found.tensors
    check_form(options.form, spec)
    form = _form_of_peft(options, spec.shape)
    if options.reader == "vllm":
        spec, tensors = peft.for_vllm(spec, tensors)
    model = ModelConfig(path=options.base) if options.base else found.config.model
    base, config = str(model.path), found.config.model_copy(update={"model": model})
    run = run_of(options.source, found.path)
    template = chat_template.of_adapter(run, found.path)
    what = "critic" if options.critic else "adapter"
    beside = chat_template.beside(template)
    beside[card.FILE] = card.text(spec, base, run, found.path, what, template is not None)
    with disk_errors(options.out):
        files = tensors.get(VALUE_HEAD), beside, found.fingerprint
        peft.write(options.out, spec, tensors, config, form, *files)
    ranks = ", ".join(str(rank) for rank in sorted({site.rank for site in spec}))
    print(
        f"{options.out}: {len(spec.sites)} sites of {found.path}, rank {ranks}, "
        f"{spec.num_parameters:,} parameters"
    )
    _say_template(options.out, template)
    _say_use(options, replace(found, spec=spec), model, form, template is not None)
    return 0


def _form_of_peft(options: argparse.Namespace, shape: ModelShape) -> PeftForm:
    from lora_moe_rl.adapters import peft

    asked = options.form
    if options.reader == "vllm" and shape.family.experts != "interleaved":
        asked = "2d"
    form = peft.form_of(shape, asked)
    if options.reader == "vllm" and form == "3d":
        raise ConfigError(
            f"--for vllm writes experts one by one, which vLLM does not read for "
            f"{shape.architecture}: leave it out"
        )
    return form


def _say_template(out: Path, template: str | None) -> None:
    from lora_moe_rl.export import chat_template

    if template is not None:
        print(f"{out / chat_template.FILE}: the run's own chat template, not the base's")


def _say_use(
    options: argparse.Namespace,
    written: Source,
    base: ModelConfig,
    form: PeftForm,
    own_template: bool,
) -> None:
    """How the adapter that was written is loaded or served."""
    from lora_moe_rl.export import chat_template
    from lora_moe_rl.models.directory import base_name
    from lora_moe_rl.rollout.serve_command import serve_command, serving_of

    spec = written.spec
    if options.critic:
        print(
            "load it with AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1) "
            "and peft.PeftModel.from_pretrained; a value is `score` of a token's last hidden state"
        )
    elif form == "2d" and max(site.rank for site in spec) <= SLOT_RANKS[-1]:
        out = options.out.absolute()
        mla, more = serving_of(spec.shape)
        if own_template:
            more = [*more, "--chat-template", str(out / chat_template.FILE)]
        named = options.out.name, str(out)
        if base.revision is not None:
            more = [*more, "--revision", base.revision]
        served = base_name(str(base.path)), named, slot_rank(spec), mla, more
        print(serve_command(*served, form=written.form))


def _export_merged(options: argparse.Namespace) -> int:
    from rich.console import Console

    from lora_moe_rl.export import card, chat_template
    from lora_moe_rl.export.merged import export_merged
    from lora_moe_rl.export.merged_out import check_out
    from lora_moe_rl.export.run_settings import run_of
    from lora_moe_rl.files import adapter_source as source
    from lora_moe_rl.models.directory import resolve_model

    check_out(options.out)
    found = source.load(options.source, _base(options))
    named = found.config.model
    name = options.base or str(named.path)
    base = _base(options) or resolve_model(name, named.revision)
    found.check_base(base)
    run = run_of(options.source, found.path)
    template = chat_template.of_adapter(run, found.path)
    own = {} if template is None else chat_template.in_place_of(base, template)
    own[card.FILE] = card.text(found.spec, name, run, found.path, "merged", template is not None)
    err = Console(highlight=False, emoji=False, markup=False, soft_wrap=True, stderr=True)
    stop = STOP_LOST if options.stop_lost is None else options.stop_lost
    report = export_merged(
        found.spec, found.tensors, base, options.out, _form(options), err.print, stop, own
    )
    print(
        f"{report.directory}: {report.changed_tensors:,} tensors changed, {report.shards} shards, "
        f"{report.kept_shards} of them found finished; {report.bytes_written / 1e9:.2f} GB written"
    )
    _say_template(options.out, template)
    print(f"rounding: {report.total}")
    _say_worst(report, WARN_LOST if options.warn_lost is None else options.warn_lost)
    return 0


def _form(options: argparse.Namespace) -> Form:
    from lora_moe_rl.export.merged_weights import Form

    names = ("dtype", "adapted_float32", "rounding", "seed")
    given = {name: getattr(options, name) for name in names}
    return Form(**{name: value for name, value in given.items() if value is not None})


def _say_worst(report: MergeReport, warn: float) -> None:
    """The tensors that lost most, if any lost more than `warn`."""
    worst = sorted(report.arrived.items(), key=lambda item: -item[1].lost)
    worst = [(name, one) for name, one in worst if one.lost > warn]
    for name, one in worst[:WORST_SHOWN]:
        print(f"{name}: {one}")
    if len(worst) > WORST_SHOWN:
        print(f"these lost most; all are in {report.directory}/merge.json")
    if report.total.lost > warn:
        print(
            f"warning: {report.total.lost:.1%} of what was trained is not in this model "
            f"(--warn-lost {warn:g}). Serve the adapter beside the base (--to peft), or write "
            "--rounding stochastic, --adapted-float32 or --dtype float32",
            file=sys.stderr,
        )
