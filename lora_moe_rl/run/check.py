"""`lora-moe-rl check`: all that is looked at before a run starts, and three prompts as rendered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run import adapter_start, goes_on
from lora_moe_rl.run.preflight import Finding, Preflight

PROMPTS_SHOWN = 3
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}


def check(config: RunConfig) -> int:
    """Prints a line for each finding, then the first prompts as the model will get them, special
    tokens included. Returns 2 when a run would be refused, else 0. Fetches nothing."""
    console = Console(highlight=False, soft_wrap=True)
    states = []
    with Preflight(config, fetch=False) as preflight:
        for finding in _findings(config, preflight):
            states.append(finding.state)
            state = Text(finding.state.ljust(8), style=STYLES[finding.state])
            console.print(state, Text(f"{finding.step:<8}{finding.text}"), sep="")
        if "prompts" not in preflight.missing:
            _show_prompts(console, preflight)
    return 2 if "error" in states else 0


def require(config: RunConfig, resume: bool, fork: Path | None, say: Callable[[str], None]) -> None:
    """Looks at the same for a dry run: `say` gets warnings; raises the first error. `resume`: the
    run directory is to hold a run; `fork`: the checkpoint to go on from."""
    goes_on.steps_done(config, resume, fork)
    if resume:
        goes_on.check_places(config, resume)
    with Preflight(config, fetch=False) as preflight:
        preflight.require(say)
        found = [_adapter(config, preflight), None if resume else _run_dir(config)]
        for finding in found:
            if finding is not None and finding.state == "warning":
                say(f"{finding.step}: {finding.text}")


def _findings(config: RunConfig, preflight: Preflight) -> Iterator[Finding]:
    """One after the other, so that each is seen while the next is looked for."""
    yield from preflight.findings()
    last = {"adapter": lambda: _adapter(config, preflight), "run dir": lambda: _run_dir(config)}
    for name, look in last.items():
        try:
            finding = look()
        except LoraMoeRlError as error:
            finding = Finding(name, "error", str(error))
        if finding is not None:
            yield finding


def _adapter(config: RunConfig, preflight: Preflight) -> Finding | None:
    """Whether the adapter that a new run starts from can be had and fits, or raises why not; one
    that goes on has its own."""
    missing = {"model", "layout"} & preflight.missing
    if config.adapter.init_from is None or missing or RunDir(config, resume=False).has_steps:
        return None
    start = adapter_start.init_from(config, preflight.spec, preflight.model_dir)
    if "prompts" not in preflight.missing:
        in_use = preflight.tokenizer.chat_template
        if warning := adapter_start.other_template(start, config, preflight.model_dir, in_use):
            return Finding("adapter", "warning", warning)
    return Finding("adapter", "ok", "; ".join(start.notes))


def _run_dir(config: RunConfig) -> Finding:
    """Raises RunDirError for one that no run can have."""
    run_dir = RunDir(config, resume=False)
    if not run_dir.has_steps:
        run_dir.check_usable()
        return Finding("run dir", "ok", str(run_dir.path))
    told = f"{run_dir.path} holds a run: go on with it by --resume, or set logging.run_dir"
    return Finding("run dir", "warning", told)


def _show_prompts(console: Console, preflight: Preflight) -> None:
    for prompt in preflight.source.examples(PROMPTS_SHOWN):
        whose = f"{prompt.data_set}, prompt" if prompt.data_set else "prompt"
        title = f"\n{whose} {prompt.number}, {len(prompt.token_ids)} tokens"
        console.print(Text(title, style="bold"))
        console.print(Text(preflight.tokenizer.decode(prompt.token_ids)))
        for answer in prompt.answers:
            console.print(Text(f"answer, {len(answer.token_ids)} tokens", style="bold"))
            console.print(Text(preflight.tokenizer.decode(answer.token_ids)))
        if prompt.columns:
            console.print(Text(f"columns: {prompt.columns}", style="dim"))
