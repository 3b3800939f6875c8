"""`lora-moe-rl check`: all that is looked at before a run starts, and three prompts as rendered."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from lora_moe_rl.config import RunConfig
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run.preflight import Finding, Preflight

PROMPTS_SHOWN = 3
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}


def check(config: RunConfig) -> int:
    """Prints a line for each finding, then the first prompts as the model will get them, special
    tokens included. Returns 2 when a run would be refused, else 0. Fetches nothing."""
    console = Console(highlight=False, soft_wrap=True)
    states = []
    with Preflight(config, fetch=False) as preflight:
        for finding in [*preflight.findings(), *_run_dir(config)]:
            states.append(finding.state)
            state = Text(finding.state.ljust(8), style=STYLES[finding.state])
            console.print(state, Text(f"{finding.step:<8}{finding.text}"), sep="")
        if "prompts" not in preflight.missing:
            _show_prompts(console, preflight)
    return 2 if "error" in states else 0


def _run_dir(config: RunConfig) -> list[Finding]:
    run_dir = RunDir(config, resume=False)
    if not run_dir.has_steps:
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
