"""`lora-moe-rl export`: an adapter for PEFT and vLLM, or a merged model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rollout.facts import SLOT_RANKS, slot_rank

ABOUT = """\
Write what a run trained for other tools: as a PEFT adapter, or merged into its base.

SOURCE is a run directory (its newest valid checkpoint), a checkpoint, or a PEFT directory.
"""
EPILOG = """\
examples:
  lora-moe-rl export runs/demo --to peft --out adapter
  lora-moe-rl export runs/demo --to peft --for vllm --out adapter
  lora-moe-rl export runs/demo --to merged --base Qwen/Qwen3-30B-A3B --out merged
"""
WORST_SHOWN = 10  # quantised tensors


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    _check_options(options)
    return _export_merged(options) if options.to == "merged" else _export_peft(options)


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
        "--base", metavar="DIR", help="the base model; by default the one that the source names"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of a merged model; by default "
        "the base's own form",
    )  # fmt: skip
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser


def _check_options(options: argparse.Namespace) -> None:
    other = {"merged": ("form", "reader"), "peft": ("dtype",)}[options.to]
    for name in other:
        if getattr(options, name) is not None:
            flag = {"reader": "for"}.get(name, name)
            raise ConfigError(f"--{flag} has no effect with --to {options.to}")
    if options.reader == "vllm" and options.form == "3d":
        raise ConfigError("--for vllm writes experts one by one: leave out --form 3d")


def _base(options: argparse.Namespace) -> Path | None:
    from lora_moe_rl.models.directory import resolve_model

    return resolve_model(options.base) if options.base else None


def _export_peft(options: argparse.Namespace) -> int:
    from lora_moe_rl.adapters import peft
    from lora_moe_rl.config import ModelConfig
    from lora_moe_rl.files import adapter_source as source
    from lora_moe_rl.files.out_directory import require_empty
    from lora_moe_rl.models.directory import base_name
    from lora_moe_rl.rollout.serve_command import serve_command

    require_empty(options.out)
    found = source.load(options.source, _base(options))
    spec, tensors = found.spec, found.tensors
    if options.reader == "vllm":
        spec, tensors = peft.for_vllm(spec, tensors)
    base = options.base or found.config.model.path
    config = found.config.model_copy(update={"model": ModelConfig(path=base)})
    form = options.form or "2d"
    peft.write(options.out, spec, tensors, config, form)
    ranks = ", ".join(str(rank) for rank in sorted({site.rank for site in spec}))
    print(
        f"{options.out}: {len(spec.sites)} sites of {found.path}, rank {ranks}, "
        f"{spec.num_parameters:,} parameters"
    )
    if form == "2d" and max(site.rank for site in spec) <= SLOT_RANKS[-1]:
        named = options.out.name, str(options.out.absolute())
        mla = spec.shape.family.attention == "mla"
        print(serve_command(base_name(base), named, slot_rank(spec), mla))
    return 0


def _export_merged(options: argparse.Namespace) -> int:
    from rich.console import Console

    from lora_moe_rl.export.merged import export_merged
    from lora_moe_rl.files import adapter_source as source
    from lora_moe_rl.models.directory import resolve_model

    found = source.load(options.source, _base(options))
    base = resolve_model(options.base or found.config.model.path)
    found.check_base(base)
    say = Console(highlight=False, soft_wrap=True, stderr=True).print
    report = export_merged(found.spec, found.tensors, base, options.out, options.dtype, say)
    print(
        f"{report.directory}: {report.changed_tensors:,} tensors changed, {report.shards} shards, "
        f"{report.kept_shards} of them found finished; {report.bytes_written / 1e9:.2f} GB written"
    )
    worst = sorted(report.errors.items(), key=lambda item: -item[1].over_delta)
    for name, error in worst[:WORST_SHOWN]:
        print(
            f"{name}: quantised, off by {error.relative:.2e} of its norm, {error.over_delta:.2f} "
            f"of what the adapter changed"
        )
    if len(worst) > WORST_SHOWN:
        print(f"these are the largest of {len(worst):,}; all are in {report.directory}/merge.json")
    return 0
