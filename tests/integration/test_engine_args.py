"""rollout.engine_args in a run: an argument that makes the engine another function than the trainer
does not pass the proof, and one that vLLM refuses ends the start with its own word."""

from __future__ import annotations

import pytest
from cli_run import RECIPE, CliRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def failed(folder, *arguments: str) -> str:
    """What a run says that has to fail."""
    settings = ("trainer.steps=1", f"logging.run_dir={folder / 'run'}")
    run = CliRun("train", RECIPE, *settings, *arguments, output=folder / "out")
    try:
        assert run.finish() not in (0, None), run.output
        return " ".join(run.output.split())
    finally:
        run.end()


def test_an_argument_that_changes_the_numbers_fails_the_proof(tmp_path):
    said = failed(tmp_path, 'rollout.engine_args.hf_overrides={"rms_norm_eps": 0.5}')
    assert "adapter version 0: engine and trainer differ by" in said


def test_a_value_that_vllm_refuses_is_told_of(tmp_path):
    said = failed(tmp_path, "rollout.engine_args.scheduling_policy=whatever")
    assert 'does not start with rollout.engine_args={"scheduling_policy": "whatever"}' in said
    assert "'fcfs'" in said
