"""`lora-moe-rl adapter`: inspect, import, resize and combine adapters."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rollout.facts import SLOT_RANKS

if TYPE_CHECKING:
    from lora_moe_rl.adapters.resize import Change
    from lora_moe_rl.adapters.spec import AdapterSpec, Site
    from lora_moe_rl.files.adapter_source import Source

ABOUT = """\
Look at adapters and change them. DIR is a run directory (its newest valid checkpoint), a
checkpoint, or a PEFT directory; what is written is a PEFT directory.
"""
SHOWN = 12


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl adapter",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_subparsers(required=True, metavar="WHAT")

    one = _add(what, "inspect", _inspect, "sites, ranks, norms, and a heat map of ‖ΔW‖")
    one.add_argument("directory", type=Path, metavar="DIR")
    one.add_argument("--png", type=Path, metavar="FILE", help="write the heat map here")
    one.add_argument("--json", action="store_true", help="all figures as JSON")

    one = _add(what, "import", _import, "read another tool's PEFT adapter, and say how to train it")
    one.add_argument("directory", type=Path, metavar="DIR")
    one.add_argument(
        "--expert-order",
        choices=("fastest", "slowest"),
        help="of the columns of stacked experts' lora_B, where the adapter does not tell: PEFT has "
        "the expert fastest, Unsloth before September 2026 and Megatron-Bridge slowest",
    )
    _add_out(one)

    one = _add(what, "resize", _resize, "other ranks, by the SVD of ΔW")
    one.add_argument("directory", type=Path, metavar="DIR")
    one.add_argument("--rank", type=int, required=True, metavar="R", help="rank of every module")
    one.add_argument("--expert-rank", type=int, metavar="R", help="of routed experts, if another")
    _add_out(one)

    one = _add(what, "combine", _combine, "the weighted sum of adapters of one base")
    one.add_argument("parts", nargs="+", metavar="DIR[:WEIGHT]", help="weight: 1 unless given")
    one.add_argument(
        "--rank", type=int, metavar="R", help="compress the sum; by default it is exact"
    )
    one.add_argument("--expert-rank", type=int, metavar="R", help="of routed experts, if another")
    _add_out(one)
    return parser


def _add(what, name: str, run, sentence: str) -> argparse.ArgumentParser:
    one = what.add_parser(name, help=sentence, description=sentence)
    one.set_defaults(run=run)
    one.add_argument("--base", metavar="DIR", help="the base model, where DIR does not name one")
    one.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return one


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty")
    parser.add_argument("--form", choices=("2d", "3d"), help="of routed experts")


def _load(path: Path, options: argparse.Namespace) -> Source:
    from lora_moe_rl.files import adapter_source as source
    from lora_moe_rl.models.directory import resolve_model

    order = getattr(options, "expert_order", None)
    base = resolve_model(options.base, named="--base ") if options.base else None
    return source.load(path, base, order)


def _write(options: argparse.Namespace, found: Source, spec: AdapterSpec, tensors) -> None:
    from lora_moe_rl.adapters import peft
    from lora_moe_rl.export import chat_template
    from lora_moe_rl.export.peft_out import check_form, disk_errors
    from lora_moe_rl.export.run_settings import run_of

    check_form(options.form, spec)
    template = chat_template.of_adapter(run_of(found.path, found.path), found.path)
    beside = chat_template.beside(template)
    with disk_errors(options.out):
        parts = spec, tensors, found.config, options.form
        peft.write(options.out, *parts, beside=beside, base=found.fingerprint)
    print(f"{options.out}: {len(spec.sites)} sites, {spec.num_parameters:,} parameters")


def _inspect(options: argparse.Namespace) -> int:
    from lora_moe_rl.export.inspection import heat_map, inspect, print_report
    from lora_moe_rl.files.out_directory import require_file

    if options.png:
        require_file(options.png, "--png")
    found = _load(options.directory, options)
    report = inspect(found)
    if options.png:
        heat_map(found, report, options.png)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(found, report)
    return 0


def _import(options: argparse.Namespace) -> int:
    from lora_moe_rl.files.adapter_settings import settings_of
    from lora_moe_rl.files.out_directory import require_empty

    require_empty(options.out)
    found = _load(options.directory, options)
    _write(options, found, found.spec, found.tensors)
    print("to go on training it:")
    for setting in [f"adapter.init_from={options.out}", *settings_of(found.spec)]:
        print(f"  {setting}")
    return 0


def _resize(options: argparse.Namespace) -> int:
    from lora_moe_rl.adapters.resize import resize
    from lora_moe_rl.files.out_directory import require_empty

    require_empty(options.out)
    rank_of = _rank_of(options.rank, options.expert_rank)
    found = _load(options.directory, options)
    _check_expert_rank(options, found.spec)
    spec, tensors, changes = resize(found.spec, found.tensors, rank_of)
    _say_changes(changes)
    _write(options, found, spec, tensors)
    return 0


def _combine(options: argparse.Namespace) -> int:
    from lora_moe_rl.adapters.resize import combine, resize
    from lora_moe_rl.files.out_directory import require_empty

    require_empty(options.out)
    if options.expert_rank is not None and options.rank is None:
        raise ConfigError("--expert-rank needs --rank: without it the sum is exact")
    weighted = [_weighted(part) for part in options.parts]
    sources = [_load(path, options) for path, _ in weighted]
    _check_one_base(sources)
    parts = [(s.spec, s.tensors, weight) for s, (_, weight) in zip(sources, weighted, strict=True)]
    spec, tensors = combine(parts)
    _check_expert_rank(options, spec)
    if options.rank is not None:
        spec, tensors, changes = resize(spec, tensors, _rank_of(options.rank, options.expert_rank))
        _say_changes(changes)
    _write(options, sources[0], spec, tensors)
    return 0


def _weighted(text: str) -> tuple[Path, float]:
    """`DIR:0.5`; a name with a colon in it is one where what follows is no number, and where it is
    there. Raises ConfigError where DIR is there too."""
    path, colon, weight = text.rpartition(":")
    try:
        number = float(weight) if colon else 1.0
    except ValueError:
        return Path(text), 1.0
    if colon and os.path.lexists(text):
        if os.path.lexists(path):
            raise ConfigError(
                f"{text} is there, and so is {path}: write {text}:1 for the first, "
                f"{path}/:{weight} for {weight} times the second"
            )
        return Path(text), 1.0
    if not math.isfinite(number):
        raise ConfigError(f"{text}: the weight {weight} is not finite")
    return (Path(path), number) if colon else (Path(text), 1.0)


def _check_one_base(sources: list[Source]) -> None:
    """Compares bases by what runs kept of them, or else by name."""
    for one in sources[1:]:
        first = sources[0]
        if one.base and first.base:
            same = one.base["fingerprint"] == first.base["fingerprint"]
        else:
            same = one.config.model.path == first.config.model.path
        if not same:
            raise ConfigError(
                f"{first.path} is of the base {first.config.model.path}, and {one.path} of "
                f"{one.config.model.path}: adapters of several bases have no sum. Where both are "
                f"one, name it by --base DIR"
            )


def _check_expert_rank(options: argparse.Namespace, spec: AdapterSpec) -> None:
    if options.expert_rank is not None and not spec.has_experts:
        raise ConfigError(
            f"--expert-rank {options.expert_rank} has no effect: there are no routed experts in "
            "this adapter; leave it out"
        )


def _rank_of(rank: int, expert_rank: int | None):
    for flag, value in (("--rank", rank), ("--expert-rank", expert_rank)):
        if value is not None and not 1 <= value <= SLOT_RANKS[-1]:
            raise ConfigError(f"{flag} {value} is no rank; use 1 to {SLOT_RANKS[-1]}")

    def of(site: Site) -> int:
        return rank if site.num_experts is None or expert_rank is None else expert_rank

    return of


def _say_changes(changes: list[Change]) -> None:
    """The error of each site that lost something, worst first, and of the whole."""
    lossy = sorted((c for c in changes if c.lost), key=lambda c: -c.relative)
    for change in lossy[:SHOWN]:
        print(
            f"{change.site}: rank {change.before} -> {change.after}, "
            f"‖ΔW - ΔW'‖ / ‖ΔW‖ = {change.relative:.3e}"
        )
    if len(lossy) > SHOWN:
        print(f"... and {len(lossy) - SHOWN} more")
    norm = math.hypot(*(change.norm for change in changes))
    lost = math.hypot(*(change.lost for change in changes))
    grown = sum(change.after > change.before for change in changes)
    print(
        f"{len(changes)} sites resized, {grown} of them grown (exact); of all of these "
        f"‖ΔW - ΔW'‖ / ‖ΔW‖ = {lost / norm if norm else 0.0:.3e}"
    )
