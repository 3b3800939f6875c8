"""`lora-moe-rl check`: all that is looked at before a run starts, and three prompts as rendered."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import LoraMoeRlError, RunDirError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run import adapter_start
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


def _findings(config: RunConfig, preflight: Preflight) -> Iterator[Finding]:
    """One after the other, so that each is seen while the next is looked for."""
    yield from preflight.findings()
    yield from _adapter(config, preflight)
    yield from _run_dir(config)


def _adapter(config: RunConfig, preflight: Preflight) -> list[Finding]:
    """Whether the adapter that a new run starts from can be had and fits; one that goes on has its
    own."""
    missing = {"model", "layout"} & preflight.missing
    if config.adapter.init_from is None or missing or RunDir(config, resume=False).has_steps:
        return []
    try:
        start = adapter_start.init_from(config, preflight.spec, preflight.model_dir)
    except LoraMoeRlError as error:
        return [Finding("adapter", "error", str(error))]
    return [Finding("adapter", "ok", "; ".join(start.notes))]


def _run_dir(config: RunConfig) -> list[Finding]:
    run_dir = RunDir(config, resume=False)
    if not run_dir.has_steps:
        try:
            run_dir.check_usable()
        except RunDirError as error:
            return [Finding("run dir", "error", str(error))]
        return [Finding("run dir", "ok", str(run_dir.path))]
    told = f"{run_dir.path} holds a run: go on with it by --resume, or set logging.run_dir"
    return [Finding("run dir", "warning", told)]


def _show_prompts(console: Console, preflight: Preflight) -> None:
    for prompt in preflight.source.examples(PROMPTS_SHOWN):
        whose = f"{prompt.data_set}, prompt" if prompt.data_set else "prompt"
        title = f"\n{whose} {prompt.row}, {len(prompt.token_ids)} tokens"
        console.print(Text(title, style="bold"))
        console.print(Text(preflight.tokenizer.decode(prompt.token_ids)))
        for answer in prompt.answers:
            console.print(Text(f"answer, {len(answer.token_ids)} tokens", style="bold"))
            console.print(Text(preflight.tokenizer.decode(answer.token_ids)))
        if prompt.columns:
            console.print(Text(f"columns: {prompt.columns}", style="dim"))
