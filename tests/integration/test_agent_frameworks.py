"""Agents of packages, each in an environment of its own, are trained as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_run import ROOT, CliRun
from test_oracles import NO_INDEX

from lora_moe_rl.files.jsonl import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, PROMPTS, GROUP = 2, 2, 4
SAMPLES = PROMPTS * GROUP
AGENTS = ROOT / "recipes/agents"


def python_of(name: str, folder: Path) -> Path:
    """`make agents-NAME`. What the project's own environment is made of is taken as it stands."""
    own = [word for kind in ("cpu", "gpu") for word in ("-o", f".venv/.setup-{kind}")]
    where = [f"AGENTS={folder / 'agents'}", f"PYTHON={sys.executable}"]
    where.append(f"BIN={Path(sys.executable).parent}")
    made = subprocess.run(
        ["make", *own, f"agents-{name}", *where], cwd=ROOT, capture_output=True, text=True
    )
    said = made.stdout + made.stderr
    if made.returncode and any(words in said for words in NO_INDEX):
        pytest.skip(f"no package index can be reached: {said.strip().splitlines()[-1]}")
    assert made.returncode == 0, said
    return folder / f"agents-{name}/bin/python"


def trained(folder: Path, command: str, *more: str) -> tuple[list[dict], list[dict]]:
    """The steps and the samples of a run with this agent, of which nothing has failed."""
    settings = (
        f"environment.command={command}", f"trainer.steps={STEPS}", "environment.timeout_s=600",
        "environment.processes=2", f"algorithm.prompts_per_step={PROMPTS}", "replay.audit=1",
        f"algorithm.group_size={GROUP}", f"logging.samples_per_step={SAMPLES}", *more,
    )  # fmt: skip
    recipe, run_dir = ROOT / "recipes/tiny_agent.py", folder / "run"
    output = folder / "out"
    run = CliRun("train", recipe, *settings, f"logging.run_dir={run_dir}", output=output)
    try:
        assert run.finish(1500) == 0, run.output
        assert not run.leftovers()
    finally:
        run.end()
    records = list(read_jsonl(run_dir / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["environment/done"] == SAMPLES and record["reward/failed"] == 0, run.output
        assert record["environment/forks"] == record["environment/retried"] == 0
        assert record["mismatch/kl"] <= 1e-6 and record["replay/coverage"] == 1
        assert record["replay/disagreement"] == 0 and record["replay/audited"] > 0
    return records, list(read_jsonl(run_dir / "samples.jsonl"))


def test_an_agent_of_openais_agents_sdk_calls_its_tool_and_is_trained(tmp_path):
    agent = f"{python_of('openai', tmp_path)} {AGENTS / 'with_openai_agents.py'}"
    calls = f"environment.calls={ROOT / 'recipes/tiny_tools.py'}:number"
    records, samples = trained(tmp_path, agent, calls)
    assert any(record["environment/turns"] > SAMPLES for record in records)
    several = [one["segments"] for one in samples if "segments" in one]
    assert several and all(
        [part["author"] for part in one] == ["policy", "tool", "policy"] for one in several
    )
    told = [one["messages"][1] for one in samples if "messages" in one]
    assert all(one["role"] == "tool" and one["content"].endswith("+7=") for one in told)


def test_a_taskset_of_verifiers_is_played_by_verifiers_and_trained_on(tmp_path):
    agent = f"{python_of('verifiers', tmp_path)} {AGENTS / 'with_verifiers.py'} sums_taskset"
    numbered = "data.generator=lora_moe_rl.data.generators:numbered"
    records, samples = trained(tmp_path, agent, numbered, "data.args.tasks=20")
    assert {record["environment/turns"] for record in records} == {SAMPLES}
    assert len({str(one["prompt"]) for one in samples}) > 1
    assert any(one["reward"] > 0 for one in samples)
