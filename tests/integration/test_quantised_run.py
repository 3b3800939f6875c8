"""Whole runs on quantised bases, with real engines that hold them as the trainer does."""

from __future__ import annotations

import numpy as np
import pytest
from cli_run import RECIPE, trained
from safetensors.numpy import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("qwen3_moe-int4", marks=pytest.mark.whole),
        "deepseek_v3-int4",
        "qwen3_moe-mxfp4",
    ],
)
def test_trainer_and_engine_compute_the_same(model, tmp_path):
    folder = tmp_path / "run"
    records = trained(folder, RECIPE, f"model={model}", "checkpoint.every=1", "trainer.steps=2")
    check(records, 2)
    # It goes on from what is left, and what is left can be used elsewhere.
    resumed = trained(folder, folder / "config.yaml", "--resume", "trainer.steps=3")
    check(resumed, 3)
    assert resumed[:2] == records
    exported = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert any(np.any(values) for name, values in exported.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("model", "forward"),
    [
        ("qwen3_moe-fp8", "dequantise"),
        ("qwen3_moe-fp8", "engine"),
        ("deepseek_v3-fp8", "dequantise"),
        ("deepseek_v3-fp8", "engine"),
    ],
)
def test_fp8_by_both_forwards(model, forward, tmp_path):
    """In 8 bits, rounding of the last bit of a float32 becomes now and then a step of e4m3."""
    settings = f"model={model}", f"trainer.fp8_forward={forward}", "trainer.steps=2"
    bounds = (1e-6, 1e-4) if forward == "dequantise" else (1e-5, 0.1)
    check(trained(tmp_path / "run", RECIPE, *settings), 2, *bounds)


def check(records, num_steps, most_kl=1e-6, largest=1e-4):
    assert [record["step"] for record in records] == list(range(1, num_steps + 1))
    for record in records:
        assert record["mismatch/kl"] <= most_kl
        assert record["mismatch/max_abs_logprob_diff"] <= largest
        assert record["replay/coverage"] == 1 and record["refit/max_diff"] <= largest
        assert record["optim/grad_norm"] > 0
