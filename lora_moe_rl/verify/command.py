"""The command line of `lora-moe-rl verify layout`, its table and its JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from lora_moe_rl.adapters.sharding import reductions
from lora_moe_rl.config.options import positive, verify_parser
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.verify.compare import LAYOUT_QUANTITIES, Check, entries
from lora_moe_rl.verify.layout import (
    DEFAULT_LAYOUTS,
    Report,
    Row,
    Say,
    Verification,
    make_config,
    plan,
)

ABOUT = """\
For each layout, with the same samples, replayed routes and random adapters, compare with one rank:
the adapter before training, loss, logprobs, the gradient of every adapted linear, the gradient
norm, the adapter after three optimizer steps, and the checkpoint. One rank is compared with the
Hugging Face forward of the hand-merged weights. Exit code 1 when anything is wrong, 2 when a layout
does not fit the model. Settings are adapter.*, trainer.device, trainer.dtype (by default float32)
and seed.
"""
TABLE_WIDTH = 110
SHOWN = 3  # tensors named of each entry of the table that is wrong
# A sum that is left out changes a gradient by about its own size.
ROUNDING = 1e-3


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    config = make_config(options.model, options.settings)
    model_dir = resolve_model(config.model.path)
    dropped = tuple(_entry(text) for text in options.drop)
    spec, layouts = plan(config, _names(options.layouts), model_dir)
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
    if options.json:
        print(json.dumps(as_json(report), indent=1))
    else:
        show(report)
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = verify_parser("layout", ABOUT)
    parser.add_argument(
        "--layouts",
        default=DEFAULT_LAYOUTS,
        help=f"names as tp2ep2, pp2vpp2, etp2tp2, tp2dp2, with commas ({DEFAULT_LAYOUTS})",
    )
    parser.add_argument("--samples", type=positive, default=32, help="sequences (32)")
    parser.add_argument(
        "--tolerance",
        type=float,
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


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError("--layouts names no layout; write for example tp2,ep2")
    return names


def _entry(text: str) -> tuple[str, str, str]:
    known = {".".join(entry): entry for entry in reductions()}
    if text not in known:
        raise ConfigError(f"--drop {text} is not in the table; there are {', '.join(known)}")
    return known[text]


@contextlib.contextmanager
def progress(phases: int, quiet: bool) -> Iterator[Say]:
    """A bar on a terminal; on stderr, so that --json stays clean."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=quiet
    ) as progress:
        task = progress.add_task("starting", total=phases, completed=-1)

        def say(text: str) -> None:
            progress.update(task, description=text)
            progress.advance(task)

        yield say


def show(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    # Cut off by a narrow terminal, the figures would be worth nothing.
    width = max(Console().width, TABLE_WIDTH)
    console = Console(highlight=False, soft_wrap=True, width=width)
    console.print(
        f"{report.model}: {report.device}, {report.dtype}, {report.samples} samples, "
        f"{report.seconds:.0f} s; the largest error against one rank:"
    )
    console.print(table(report))
    for line in explanations(report):
        console.print(Text(line, style="red"))
    console.print(Text("PASS" if report.passed else "FAIL", style="bold"))


def table(report: Report):
    """A row a layout, a column a quantity: the largest error, or that there is none to tell."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    rows.add_column("")
    rows.add_column("ranks", justify="right")
    for quantity in LAYOUT_QUANTITIES:
        rows.add_column(quantity, justify="right")
    rows.add_column("seconds", justify="right")
    rows.add_column("")
    limits = {c.quantity: f"{c.tolerance:.0e}" for row in report.rows for c in row.checks}
    cells = (limits.get(quantity, "") for quantity in LAYOUT_QUANTITIES)
    rows.add_row("tolerance", "", *cells, "", "", style="dim", end_section=True)
    for row in report.rows:
        checks = {check.quantity: check for check in row.checks}
        cells = (_cell(checks.get(quantity)) for quantity in LAYOUT_QUANTITIES)
        verdict = "[green]PASS[/]" if row.passed else "[bold red]FAIL[/]"
        rows.add_row(row.name, str(row.ranks), *cells, f"{row.seconds:.1f}", verdict)
    return rows


def _cell(check: Check | None) -> str:
    if check is None or check.error is None:
        return "-"
    text = "0" if check.error == 0 else f"{check.error:.1e}"
    return text if check.passed else f"[bold red]{text}[/]"


def explanations(report: Report) -> list[str]:
    """What is wrong: the site, and the entry of the sharding table that would explain it."""
    return [f"{row.name}: {line}" for row in report.rows for line in _explain(row)]


def _explain(row: Row) -> Iterator[str]:
    if row.failure:
        yield row.failure.splitlines()[0]  # --json has the traceback behind it
    wrong = [check for check in row.checks if not check.passed and check.error is not None]
    for check in wrong:
        if not check.faults:
            yield f"{check.quantity}: off by {check.error:.2g}, more than {check.tolerance:.0e}"
        for entry, faults in entries(check.faults):
            more = f" (and {len(faults) - SHOWN} more)" if len(faults) > SHOWN else ""
            names = ", ".join(f"{fault.name} by {fault.error:.2g}" for fault in faults[:SHOWN])
            yield f"{check.quantity}: off are {names}{more}; {entry}: {faults[0].rule}"
    computed = [check for check in wrong if check.quantity not in ("adapter", "checkpoint")]
    if computed and all((check.error or 0) < ROUNDING for check in computed) and not row.failure:
        yield (
            f"errors below {ROUNDING:.0e} are more likely the rounding of {row.name} than a sum "
            "that is left out; --tolerance sets what is allowed"
        )


def as_json(report: Report) -> dict[str, Any]:
    """All that the table says and every tensor that is wrong. A number that is not finite is
    null."""
    return {
        "model": report.model,
        "device": report.device,
        "dtype": report.dtype,
        "samples": report.samples,
        "seconds": round(report.seconds, 1),
        "passed": report.passed,
        "rows": [
            {
                "name": row.name,
                "ranks": row.ranks,
                "passed": row.passed,
                "seconds": round(row.seconds, 1),
                "failure": row.failure,
                "checks": {check.quantity: _check_json(check) for check in row.checks},
            }
            for row in report.rows
        ],
    }


def _check_json(check: Check) -> dict[str, Any]:
    return {
        "error": _finite(check.error),
        "tolerance": check.tolerance,
        "passed": check.passed,
        "faults": [
            {
                "name": fault.name,
                "error": _finite(fault.error),
                "entry": fault.entry,
                "summed_over": fault.axes,
                "cut_over": fault.split,
            }
            for fault in check.faults
        ],
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
