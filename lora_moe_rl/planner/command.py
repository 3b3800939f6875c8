"""The command line of `lora-moe-rl plan`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.planner import plan as plans
from lora_moe_rl.planner.changes import Change, reasons, search_of, what_would_fit
from lora_moe_rl.planner.explained import BEST, explain
from lora_moe_rl.planner.options import parser
from lora_moe_rl.planner.plan import RunPlan
from lora_moe_rl.planner.proposal import Proposal
from lora_moe_rl.planner.refused import Refused, refused
from lora_moe_rl.planner.request import Request, read
from lora_moe_rl.planner.search import Search

if TYPE_CHECKING:
    from lora_moe_rl.planner.build import BuildReport


def main(argv: Sequence[str]) -> int:
    options = parser().parse_intermixed_args(argv)
    for alone in ("published", "run"):
        if getattr(options, alone):
            _require_alone(options, alone)
    if options.published:
        from lora_moe_rl.planner.published import Published, rows

        return Published(rows()).conclude(options.json)
    if options.run is not None:
        from lora_moe_rl.planner.ahead import show

        return show(options.run, options.json)
    request, proposals = read(argv), list[Proposal]()
    search, config = search_of(request), request.config
    if options.search or not request.has_layout:
        proposals = search.best(options.top)
    if not request.has_layout:
        if not proposals:
            return _nothing_fits(argv, request, search)
        config = proposals[0].config
    result = plans.make(request.facts, config, request.assumed)
    refused_itself = bool(result.problems) and not config.offline
    changes = what_would_fit(argv) if refused_itself else []
    report = _built(result) if options.build else None
    searched = _searched(search, proposals) if options.search else Searched()
    _show(request, result, searched, changes, report)
    if options.write is not None:
        from lora_moe_rl.planner.written import write

        write(result, options.write, argv)
        print(f"written: {options.write}", file=sys.stderr)
    return 1 if result.problems or (report is not None and not report.passed) else 0


def _require_alone(options: argparse.Namespace, name: str) -> None:
    """Raises ConfigError where something is given beside an option that looks at what is there."""
    plain = parser().parse_args([])
    for key, value in vars(options).items():
        if key not in (name, "json", "traceback") and value != getattr(plain, key):
            given = " ".join(value) if key == "words" else f"--{key.replace('_', '-')}"
            raise ConfigError(f"plan --{name} takes no {given}: it plans nothing of its own")


def _nothing_fits(argv: Sequence[str], request: Request, search: Search) -> int:
    why, changes = reasons(search), what_would_fit(argv)
    if request.options.json:
        print(json.dumps({"problems": why, "changes": [asdict(c) for c in changes]}, indent=1))
        return 1
    from lora_moe_rl.planner import tables

    tables.show_nothing(request, why)
    tables.show_changes(changes)
    return 1


def _built(result: RunPlan) -> BuildReport:
    """Progress goes to stderr, so that --json stays clean."""
    from lora_moe_rl.planner.build import check

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    return check(result.facts, result.spec, result.config, result.classes, say)


@dataclass(frozen=True)
class Searched:
    """What `--search` shows: `whys` of the first proposals, a sentence each."""

    proposals: list[Proposal] = field(default_factory=list)
    whys: list[str] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def _searched(search: Search, proposals: list[Proposal]) -> Searched:
    best = proposals[:BEST]
    planned = [plans.make(search.facts, p.config, search.assumed) for p in best]
    return Searched(proposals, explain(planned), refused(search, best))


def _show(
    request: Request,
    result: RunPlan,
    searched: Searched,
    changes: list[Change],
    report: BuildReport | None,
) -> None:
    options = request.options
    if options.png:
        from lora_moe_rl.planner.chart import draw

        draw(result, options.png)
    if options.json:
        from lora_moe_rl.planner.as_json import as_json

        more = {"changes": [asdict(change) for change in changes]}
        more |= {} if report is None else {"build": report.as_json()}
        more |= {"refused": [asdict(one) for one in searched.refused]}
        print(json.dumps(as_json(result, searched.proposals, searched.whys) | more, indent=1))
        return
    from lora_moe_rl.planner import tables

    tables.show(result, chosen=not request.has_layout)
    if result.problems and not request.config.offline:
        tables.show_changes(changes)
    if options.search:
        tables.show_proposals(searched.proposals, request.assumed)
        tables.show_whys(searched.whys, searched.refused)
        if request.has_layout:
            tables.show_choice(result, searched.proposals)
    if report is not None:
        report.show()
    if options.png:
        print(f"drawn: {options.png}")
