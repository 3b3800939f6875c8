"""The command line of `lora-moe-rl verify refit`, its table and its JSON."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import verify_parser
from lora_moe_rl.config.overrides import override, with_settings
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.directory import check_model_dir, resolve_model
from lora_moe_rl.refit.plan import Plan
from lora_moe_rl.verify.command import progress
from lora_moe_rl.verify.layout import placed
from lora_moe_rl.verify.layouts import Layout, parse_layouts
from lora_moe_rl.verify.refit_plan import (
    TRANSPORTS,
    Engine,
    covering,
    parse_engine,
    parse_fault,
    parse_transports,
)
from lora_moe_rl.verify.refit_run import RefitVerification, Report, Row

ABOUT = """\
Puts a random adapter from real Megatron ranks into real vLLM engines, as a run does, and compares
vLLM's logprobs with the trainer's (with vLLM's routes replayed), with Hugging Face's forward of the
hand-merged weights, and with the base's, which must differ; and every adapter slot with what vLLM's
own loader puts into one. Every two of an engine, a trainer and a transport meet. With --mode merged
engines have no slots: what can be read back of their weights is compared with base + adapter. Exit
code 1 when anything is wrong, 2 when a layout does not fit the model. Settings are adapter.*,
trainer.device, trainer.dtype (by default float32), rollout.gpu_memory_utilization and seed.
"""
DEFAULT_ENGINES = {"adapter": "tp1,tp2,tp2ep,tp2fs", "merged": "tp1,tp2,tp2ep"}
DEFAULT_TRAINERS = "tp2,pp2,ep2,tp2ep2"
DEFAULT_TRANSPORTS = "shm,distributed,directory"
SETTINGS = (
    "adapter.", "trainer.device=", "trainer.dtype=", "rollout.gpu_memory_utilization=", "seed=",
)  # fmt: skip
# One slot for the adapter from files, and two as in a run.
BASE = {"model": {"max_length": 64}, "trainer": {"dtype": "float32"}}
REFIT = {"adapter": {"slots": 3}, "merged": {"mode": "merged"}}
TABLE_WIDTH = 110
SHOWN = 4  # faults of a row


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    verification, left_out = make_verification(options)
    phases = len(verification.combinations) + len(verification.engines) + 1
    with progress(phases, options.json) as say:
        verification.say = say
        report = verification.run()
    if options.json:
        print(json.dumps(as_json(report, left_out), indent=1))
    else:
        show(report, left_out)
    return 0 if report.all_passed else 1


def make_verification(options: argparse.Namespace) -> tuple[RefitVerification, list[str]]:
    """All that can be refused before anything starts; and why a default engine is left out."""
    config = make_config(options.model, options.settings, options.mode)
    model_dir = resolve_model(config.model.path)
    spec = _spec(config, model_dir)
    engines, left_out = _engines(options.engines, config, spec)
    trainers = placed(parse_layouts(_names(options.trainers), config, spec.shape))
    config = _with_device(config, trainers)
    transports = parse_transports(_names(options.transports))
    names = ([e.name for e in engines], [t.name for t in trainers], transports)
    fault = parse_fault(options.fault, spec) if options.fault else None
    for engine in engines:
        if fault is not None:
            fault(Plan((), 4), engine.layout(spec))  # refuses what it cannot be done to
    verification = RefitVerification(
        config,
        spec,
        model_dir,
        engines,
        trainers,
        covering(*names),
        options.samples,
        options.timeout,
        fault,
    )
    return verification, left_out


def make_config(model: str, settings: Sequence[str] = (), mode: str = "adapter") -> RunConfig:
    """Raises ConfigError for a setting that this command does not read."""
    for setting in settings:
        if not setting.startswith(SETTINGS):
            raise ConfigError(
                f"verify refit does not read {setting!r}; it reads adapter.*=VALUE, "
                + ", ".join(f"{name}VALUE" for name in SETTINGS[1:])
            )
    base = BASE | {"model": {**BASE["model"], "path": model}, "refit": REFIT[mode]}
    config = with_settings(RunConfig(), base)
    return override(config, settings)


def _spec(config: RunConfig, model_dir: Path) -> AdapterSpec:
    from lora_moe_rl.adapters.families import ModelShape

    shape = ModelShape.from_hf_config(check_model_dir(model_dir))
    return AdapterSpec.build(shape, config.adapter, servable=config.refit.mode == "adapter")


def _engines(
    names: str | None, config: RunConfig, spec: AdapterSpec
) -> tuple[list[Engine], list[str]]:
    """Those that were named, or those of the default that the model allows and why others are
    not."""
    if names is not None:
        return [parse_engine(name, config, spec) for name in _names(names)], []
    engines, left_out = [], []
    for name in _names(DEFAULT_ENGINES[config.refit.mode]):
        try:
            engines.append(parse_engine(name, config, spec))
        except ConfigError as error:
            left_out.append(str(error).removeprefix("--engines: "))
    return engines, left_out


def _with_device(config: RunConfig, trainers: list[Layout]) -> RunConfig:
    """Device and dtype are of all trainers."""
    device = trainers[0].config.trainer.device
    dtype = config.trainer.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return with_settings(config, {"trainer": {"device": device, "dtype": dtype}})


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _parser() -> argparse.ArgumentParser:
    parser = verify_parser("refit", ABOUT)
    parser.add_argument(
        "--engines",
        help="tp1, tp2, tp2ep (experts over the ranks), tp2fs (fully sharded adapters), with "
        f"commas (those of {DEFAULT_ENGINES['adapter']} that the model allows)",
    )
    parser.add_argument(
        "--mode",
        choices=tuple(REFIT),
        default="adapter",
        help="adapters in slots, or merged into the weights (adapter)",
    )
    parser.add_argument(
        "--trainers",
        default=DEFAULT_TRAINERS,
        help=f"layouts as in verify layout ({DEFAULT_TRAINERS})",
    )
    parser.add_argument(
        "--transports",
        default=DEFAULT_TRANSPORTS,
        help=f"of {', '.join(TRANSPORTS)} ({DEFAULT_TRANSPORTS})",
    )
    parser.add_argument("--samples", type=int, default=32, help="sequences (32)")
    parser.add_argument(
        "--timeout", type=int, default=600, help="longest life of a trainer layout, seconds (600)"
    )
    parser.add_argument(
        "--fault",
        metavar="KIND:TENSOR",
        help="leave a tensor's transfers out (left-out:layers.1.o_proj.A), or send them to the "
        "next engine rank (misplaced:layers.1.experts.up.B), to see it noticed",
    )
    return parser


def show(report: Report, left_out: Sequence[str] = ()) -> None:
    from rich.console import Console
    from rich.text import Text

    # Cut off by a narrow terminal, the figures would be worth nothing.
    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, TABLE_WIDTH))
    used, experts = report.experts
    console.print(
        f"{report.model}, {report.expert_layout}: {report.device}, {report.dtype}, "
        f"{report.seconds:.0f} s\n{report.sequences} sequences of {report.tokens} tokens in all, "
        f"{used} of {experts} experts used; a last bit changed everywhere moves "
        f"Hugging Face's logprobs by {report.noise:.1e}"
    )
    for line in left_out:
        console.print(Text(f"left out: {line}"))
    console.print(table(report))
    for line in explanations(report):
        console.print(Text(line, style="red"))
    console.print(Text("PASS" if report.all_passed else "FAIL", style="bold"))


def table(report: Report):
    """A row a refit: largest differences of logprobs, and slots that are not as they should be."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("engine", "trainer", "transport"):
        rows.add_column(name)
    for name in ("trainer's", "merged", "base's", "slots", "bytes", "publish s", "seconds"):
        rows.add_column(name, justify="right")
    rows.add_column("")
    limit = f"{report.tolerance:.0e}"
    rows.add_row("tolerance", "", "", limit, limit, "", "0", style="dim", end_section=True)
    for row in report.rows:
        verdict = "[green]PASS[/]" if report.passed(row) else "[bold red]FAIL[/]"
        cells = [_error(row.trainer_error), _error(row.merged_error), _error(row.effect)]
        cells.append("-" if row.unlike is None else str(len(row.unlike)))
        refit = (f"{row.nbytes:,}", f"{row.publish_seconds:.3f}") if row.nbytes else ("-", "-")
        rows.add_row(
            row.engine,
            row.trainer or "(base)",
            row.transport or "-",
            *cells,
            *refit,
            f"{row.seconds:.1f}",
            verdict,
        )
    return rows


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def explanations(report: Report) -> list[str]:
    """What is wrong, and whether the refit is to blame."""
    lines = []
    for row in report.rows:
        where = " ".join(name for name in (row.engine, row.trainer, row.transport) if name)
        if row.failure:
            lines.append(f"{where}: {row.failure.splitlines()[0]}")
        faults = report.faults(row)
        lines += [f"{where}: {fault}" for fault in faults[:SHOWN]]
        if len(faults) > SHOWN:
            lines.append(f"{where}: and {len(faults) - SHOWN} more")
        if faults and row.unlike == []:
            lines.append(
                f"{where}: all slots hold what vLLM's own loader puts there: what differs is not "
                "the refit but what an engine computes"
            )
    return lines


def as_json(report: Report, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """All that the table says and every slot that is wrong. A number that is not finite is null."""

    def one(row: Row) -> dict[str, Any]:
        passed, faults = report.passed(row), report.faults(row)
        numbers = {k: _finite(v) for k, v in asdict(replace(row, unlike=None)).items()}
        unlike = row.unlike and [{k: _finite(v) for k, v in one.items()} for one in row.unlike]
        return {"passed": passed, "faults": faults} | numbers | {"unlike": unlike}

    head = {k: v for k, v in vars(report).items() if k != "rows"}
    rows = [one(row) for row in report.rows]
    return head | {"left_out": list(left_out), "passed": report.all_passed, "rows": rows}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
