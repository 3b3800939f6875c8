"""The command line of `lora-moe-rl verify replay`, its tables and its JSON."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import positive, verify_parser
from lora_moe_rl.config.overrides import override, with_settings
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.verify.command import progress
from lora_moe_rl.verify.layouts import Layout, parse_layouts
from lora_moe_rl.verify.ranks import spec_of
from lora_moe_rl.verify.replay_record import ENGINES, RESPONSE
from lora_moe_rl.verify.replay_run import (
    COMPARED,
    TOLERANCE,
    RecordRow,
    ReplayRow,
    Report,
    Verification,
    with_recompute,
)
from lora_moe_rl.verify.replay_tables import SHIFTS

ABOUT = """\
Records router decisions with vLLM where a record may go wrong: prefix-cache hits, chunked prefill,
preemption, aborted and resumed requests, tensor parallelism, LoRA on experts. Every route must be
the Hugging Face forward's own. Replays them in Megatron in each layout: what the token dispatchers
were really given must equal the table, also where no router would choose so, and logprobs must
agree; tables that are wrong by a token, a layer or one expert must be noticed. Float32. Exit code 1
when anything is wrong, 2 when a layout does not fit the model. Settings are adapter.* and seed.
"""
DEFAULT_LAYOUTS = "tp2,pp2,pp2vpp2,ep2,tp2ep2,pp2+recompute"
RECOMPUTE = "+recompute"
SETTINGS = ("adapter.", "seed=")
TABLE_WIDTH = 142
SHOWN = 3
BASE = {
    "model": {"max_length": 160},
    "adapter": {"rank": 8},
    "trainer": {"dtype": "float32", "device": "cpu", "micro_batch_tokens": 512},
    "rollout": {"max_response_tokens": RESPONSE},
    "replay": {"missing": "route", "audit": 1, "audit_samples": 1_000_000},
}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    verification = _verification(options)
    with progress(len(verification.layouts) + 2, options.json) as say:
        verification.say = say
        report = verification.run()
    if options.json:
        print(json.dumps(as_json(report), indent=1))
    else:
        show(report)
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = verify_parser("replay", ABOUT)
    parser.add_argument(
        "--layouts",
        default=DEFAULT_LAYOUTS,
        help=f"of the trainer, with commas; {RECOMPUTE}: activations are recomputed in backward "
        f"({DEFAULT_LAYOUTS})",
    )
    parser.add_argument(
        "--engines",
        default=",".join(ENGINES),
        help="roomy (plain, batched, prefix hits, aborts, LoRA), chunked (prefill), tight (a KV "
        f"cache that preempts), tp2 ({','.join(ENGINES)})",
    )
    parser.add_argument("--samples", type=positive, default=16, help="of each condition (16)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help=f"for logprobs, relative where they are beyond -1 ({TOLERANCE:.0e})",
    )
    parser.add_argument(
        "--timeout", type=positive, default=600, help="longest wait for one stage, seconds (600)"
    )
    return parser


def _verification(options: argparse.Namespace) -> Verification:
    """All that can be refused before anything starts. Raises ConfigError or ModelError."""
    for setting in options.settings:
        if not setting.startswith(SETTINGS):
            raise ConfigError(
                f"verify replay does not read {setting!r}; it reads adapter.*=VALUE and seed=VALUE"
            )
    engines = _names(options.engines)
    if unknown := [name for name in engines if name not in ENGINES]:
        raise ConfigError(f"--engines: {unknown[0]} is none of {', '.join(ENGINES)}")
    if "roomy" not in engines:
        raise ConfigError("--engines: roomy is always needed: it alone serves an adapter")
    model_dir = resolve_model(options.model)
    settings = BASE | {"model": {**BASE["model"], "path": str(model_dir)}}
    config = override(with_settings(RunConfig(), settings), options.settings)
    spec = spec_of(model_dir, config)
    if not any(site.module.startswith("experts.") for site in spec):
        raise ConfigError("adapter.targets leaves the routed experts out; verify replay needs them")
    return Verification(
        config,
        spec,
        model_dir,
        _layouts(_names(options.layouts), config, spec),
        engines,
        options.samples,
        options.timeout,
        options.tolerance,
    )


def _layouts(names: Sequence[str], config: RunConfig, spec) -> list[Layout]:
    plain = parse_layouts([name.removesuffix(RECOMPUTE) for name in names], config, spec.shape)
    return [
        with_recompute(layout) if name.endswith(RECOMPUTE) else layout
        for name, layout in zip(names, plain, strict=True)
    ]


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"{text!r} names nothing")
    return names


def show(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, TABLE_WIDTH))
    console.print(f"{report.model}: cpu, float32, {report.seconds:.0f} s")
    console.print(_records(report))
    console.print(_replays(report))
    console.print(f"routes of the other experts that the record has not: {report.moved:.0%}")
    for line in notes(report):
        console.print(Text(line, style="yellow"))
    for line in explanations(report):
        console.print(Text(line, style="red"))
    console.print(Text("PASS" if report.passed else "FAIL", style="bold"))


def _table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for i, name in enumerate(names):
        justify = "left" if i in (0, len(names) - 1) else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _records(report: Report):
    rows = []
    for row in report.records:
        r = row.recording
        if r.table is None:
            rows.append([r.name, "-", "-", "-", "-", "-", "-", f"absent: {r.absent}"])
            continue
        rows.append(
            [r.name, f"{row.routes:,}", f"{r.table.coverage:.1%}", str(len(row.differences)),
             str(len(row.ties)), _number(row.error), f"{r.seconds:.1f}",
             f"{_verdict(row.passed)} {r.proof}"]
        )  # fmt: skip
    names = ("vLLM records", "routes", "valid", "differ", "ties", "logprobs", "seconds", "")
    return _table("beside Hugging Face's own routes and logprobs:", names, rows)


def _replays(report: Report):
    rows = []
    for row in report.replays:
        caught = [f"{row.caught[by][0]:,}" if by in row.caught else "-" for by in SHIFTS]
        errors = [_number(row.errors.get(name)) for name in COMPARED]
        rows.append(
            [row.name, str(row.ranks), str(row.micro_batches), f"{row.routes:,}",
             f"{row.wrong:,}", *errors, *caught, f"{row.seconds:.1f}", _verdict(row.passed)]
        )  # fmt: skip
    shifts = [f"by {by}" for by in SHIFTS]
    names = ("Megatron", "ranks", "batches", "used", "wrong", *COMPARED, *shifts, "seconds", "")
    title = "routes used; errors of logprobs; wrong routes noticed in tables shifted by one ...:"
    return _table(title, names, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _verdict(passed: bool) -> str:
    return "[green]PASS[/]" if passed else "[bold red]FAIL[/]"


def notes(report: Report) -> list[str]:
    """Ties: they pass, and are said."""
    return [
        f"{row.recording.name}: a tie within rounding: {line}"
        for row in report.records
        for line in row.ties
    ]


def explanations(report: Report) -> list[str]:
    """What is wrong, and where."""
    found = [f"{r.recording.name}: {line}" for r in report.records for line in _record_faults(r)]
    return found + [f"{r.name}: {line}" for r in report.replays for line in _replay_faults(r)]


def _record_faults(row: RecordRow) -> Iterator[str]:
    if row.recording.failure:
        yield row.recording.failure
    yield from row.differences[:SHOWN]
    if row.error is not None and not row.error <= row.tolerance:
        yield f"vLLM's logprobs are off by {row.error:.2g}, more than {row.tolerance:.0e}"


def _replay_faults(row: ReplayRow) -> Iterator[str]:
    if row.failure:
        yield row.failure.splitlines()[0]
        return
    yield from row.first[:SHOWN]
    if row.unseen:
        yield f"{row.unseen} tokens of a layer passed no dispatcher"
    for name, error in row.errors.items():
        if not error <= row.tolerance:
            yield f"logprobs are off from {name}'s by {error:.2g}, more than {row.tolerance:.0e}"
    for by, (wrong, error, audit) in row.caught.items():
        if not wrong:
            yield f"a table that is wrong by a {by} was not noticed in the routes used"
        if not audit:
            yield f"the audit of a run did not notice a table that is wrong by a {by}"
        if error <= row.tolerance:
            yield f"a table that is wrong by a {by} moved no logprob by more than {error:.2g}"


def as_json(report: Report) -> dict[str, Any]:
    """All that the tables say. A number that is not finite is null."""
    return {
        "model": report.model,
        "passed": report.passed,
        "seconds": round(report.seconds, 1),
        "other_experts_moved": report.moved,
        "records": [_record_json(row) for row in report.records],
        "replays": [_replay_json(row) for row in report.replays],
    }


def _record_json(row: RecordRow) -> dict[str, Any]:
    r = row.recording
    return {
        "name": r.name,
        "passed": row.passed,
        "absent": r.absent,
        "failure": r.failure,
        "proof": r.proof,
        "adapter": r.adapter,
        "samples": len(r.sequences),
        "routes": row.routes,
        "coverage": None if r.table is None else r.table.coverage,
        "differences": row.differences,
        "ties": row.ties,
        "logprob_error": _finite(row.error),
        "seconds": round(r.seconds, 1),
    }


def _replay_json(row: ReplayRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "passed": row.passed,
        "ranks": row.ranks,
        "micro_batches": row.micro_batches,
        "routes": row.routes,
        "wrong": row.wrong,
        "first_wrong": row.first,
        "unseen": row.unseen,
        "logprob_errors": {name: _finite(error) for name, error in row.errors.items()},
        "caught": {
            by: {"wrong_routes": wrong, "logprob_error": _finite(error), "audit": audit}
            for by, (wrong, error, audit) in row.caught.items()
        },
        "failure": row.failure,
        "seconds": round(row.seconds, 1),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
