"""`lora-moe-rl chaos RECIPE`: a supervised run with planned faults, a table of what became of each,
and what has to hold at the end."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lora_moe_rl.chaos import checks, kinds, recipe
from lora_moe_rl.chaos.checks import Check
from lora_moe_rl.chaos.child import Child
from lora_moe_rl.chaos.drive import Drive
from lora_moe_rl.chaos.plan import Fault, plan, rate_of
from lora_moe_rl.chaos.report import Row, as_json, passed, table
from lora_moe_rl.config import RunConfig, recipes
from lora_moe_rl.config.keys import value_of
from lora_moe_rl.config.options import natural, positive
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run.signals import interrupts
from lora_moe_rl.telemetry.metrics import read_steps

FAILED = 1
# Kinds that count towards a bound on restarts of the run. A run with more of them than that ends,
# as it should: the bound is raised to what is planned.
BOUNDS = {
    "trainer.max_restarts": ("rank.kill", "rank.hang"),
    "rollout.max_restarts": ("engine.kill",),
    "rollout.max_silences": ("engine.hang",),
}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    chosen = kinds.chosen(options.faults)
    faults = plan(chosen, rate_of(options.rate), options.steps, options.seed)
    out = Path(options.out or f"runs/chaos/{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    _check(options, chosen)
    settings = [*options.settings, f"trainer.steps={options.steps}"]
    here = f"logging.run_dir={out / 'run'}"
    config = recipes.resolved(options.recipe, [*settings, here])
    kinds.check(chosen, config)
    raised = _raised(config, faults)
    for fault in faults:
        print(f"planned: step {fault.step}: {fault.kind}")
    if options.plan:
        return 0
    _make(out)
    with interrupts():
        words = [*settings, *raised, here]
        rows, found = _run(options.recipe, words, override(config, raised), out, faults)
        if options.compare and found[0].passed:
            found += _compared(options, settings, out)
    print(table(rows, found))
    told = {"faults": [as_json(row) for row in rows], "checks": [vars(one) for one in found]}
    (out / "report.json").write_text(json.dumps(told, indent=1))
    print(f"\nall of it: {out}")
    return 0 if passed(rows, found) else FAILED


def _parser() -> argparse.ArgumentParser:
    rows = "\n".join(f"  {name:<16} {kind.does}" for name, kind in kinds.KINDS.items())
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl chaos",
        description="Train under --supervise, bring faults about, and see that what becomes of "
        "each is what docs/faults.md promises. Exit code 1 when it is not.",
        epilog=f"faults:\n{rows}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the run's config")
    parser.add_argument("--faults", default="all", help="kinds, separated by commas; or all")
    parser.add_argument("--rate", default="1/20", help="faults a step")
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--seed", type=natural, default=0, help="of the plan, not of the run")
    parser.add_argument("--out", metavar="DIR", help="a new directory; by default in runs/chaos")
    parser.add_argument(
        "--compare",
        choices=("reward", "bits"),
        help="train once more without faults: the reward in the end, or every bit, is the same",
    )
    parser.add_argument("--plan", action="store_true", help="print the plan, and end")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser


def _raised(config: RunConfig, faults: Sequence[Fault]) -> list[str]:
    """Settings of the bounds that the plan goes beyond."""
    planned = Counter(fault.kind for fault in faults)
    wanted = {key: sum(planned[kind] for kind in of) for key, of in BOUNDS.items()}
    return [f"{key}={count}" for key, count in wanted.items() if count > value_of(config, key)]


def _check(options: argparse.Namespace, chosen: Sequence[str]) -> None:
    """Raises ConfigError for what cannot be done or compared."""
    for key, option in {"trainer.steps": "--steps", "logging.run_dir": "--out"}.items():
        if any(word.partition("=")[0].lstrip("-") == key for word in options.settings):
            raise ConfigError(f"{key} is set by {option}; leave it out")
    if "RAY_ADDRESS" in os.environ:
        raise ConfigError(
            "RAY_ADDRESS is set: faults are brought about in processes of this machine alone; "
            "unset it, and the run starts Ray itself"
        )
    traces = [name for name in chosen if not kinds.KINDS[name].traceless]
    if options.compare == "bits" and traces:
        raise ConfigError(
            f"--compare bits with --faults {','.join(traces)}: these leave samples or steps out of "
            "what is learned; use --compare reward, or leave them out"
        )


def _make(out: Path) -> None:
    try:
        (out / "asked").mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be made, or was used before ({error.strerror}); name a new one"
        ) from error


def _run(
    target: str, words: Sequence[str], config: RunConfig, out: Path, faults: Sequence[Fault]
) -> tuple[list[Row], list[Check]]:
    """The run with its faults, and what is found at its end."""
    hooks = any(kinds.KINDS[fault.kind].inside for fault in faults)
    env = {recipe.RECIPE: os.path.abspath(target)}
    if hooks:
        from lora_moe_rl.chaos.hooks import FOLDER

        env |= {recipe.HOOKED: "1", FOLDER: str(out / "asked")}

    def start(resume: bool) -> Child:
        again = ["--resume"] if resume else []
        arguments = [recipe.__file__, *words, "--supervise", *again]
        return Child(arguments, out / "console.txt", env)

    memory = checks.shared_memory()
    drive = Drive(start, config, out / "asked", lambda text: print(text, flush=True))
    rows, code = drive.run(faults)
    ended = Check("the run came to its end", code == 0, f"exit code {code}")
    found = [ended, checks.no_processes(drive.left), checks.no_shared_memory(memory)]
    happened = [row.fault.kind for row in rows if row.happened]
    metrics = RunDir(config, resume=True).metrics_file
    records = read_steps(metrics) if metrics.exists() else []
    return rows, found + checks.files(config) + checks.restarts(happened, records)


def _compared(options: argparse.Namespace, settings: Sequence[str], out: Path) -> list[Check]:
    """The same training without faults, and how it differs."""
    run, plain = out / "run", out / "plain"
    child = Child(
        [os.path.abspath(options.recipe), *settings, f"logging.run_dir={plain}"],
        out / "plain.txt",
        {},
    )
    try:
        code = child.process.wait()
    finally:
        child.end()
    if code:
        return [Check("a run without faults", False, f"exit code {code}, see {out / 'plain.txt'}")]
    if options.compare == "bits":
        return checks.same_bits(run, plain)
    return [checks.rewards(checks.rewards_of(run), checks.rewards_of(plain))]
