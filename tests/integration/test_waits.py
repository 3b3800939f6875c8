"""While a trainer's device is given a step's work, nothing of ours waits for it. Seen on the CPU by
the calls that would wait on a GPU; tests/gpu/test_no_sync.py asks a GPU itself."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
import tiny_families
import torch
from device_waits import Places, on_cuda
from ranks import random_adapter, random_batch, run_ranks

from lora_moe_rl.config import RunConfig
from lora_moe_rl.models.directory import resolve_model

ALGORITHMS = {
    "grpo": {},
    "several updates, reference": {"mini_batches": 2, "prompts_per_step": 2, "kl_coef": 0.1},
}


def step(worker, spec, planted: bool):
    """(What waits, by place; micro-batches of the update.)"""
    from device_waits import AsIf, watch

    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec)
    parts = np.arange(len(batch.token_ids)) % worker.config.algorithm.mini_batches
    batch = dataclasses.replace(batch, mini_batch=parts)
    if planted:
        loss = worker.engine.algorithm.loss

        def waiting(tokens):
            assert math.isfinite(float(tokens.logprobs.sum()))
            return loss(tokens)

        worker.engine.algorithm.loss = waiting
    places = watch(worker.engine, AsIf)
    worker.update(batch, table)
    return places.ours(), worker.engine.trained[0]


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.seconds
def test_nothing_of_ours_waits_between_the_micro_batches(model, algorithm):
    config = RunConfig(
        model=model,
        trainer={"micro_batch_tokens": 60, "device": "cpu"},
        algorithm=ALGORITHMS[algorithm],
        replay={"audit": 0},
    )
    ((places, micro_batches),) = run_ranks(config, resolve_model(model), step, False)
    assert micro_batches > 1
    assert places == {}


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
@pytest.mark.seconds
def test_nothing_of_ours_waits_in_what_other_families_have(family, tmp_path):
    """Biases of experts, sinks, windows; linear attention, shared experts with a gate."""
    tiny_families.save(family, tmp_path)
    trainer = {"micro_batch_tokens": 60, "device": "cpu"}
    config = RunConfig(model=str(tmp_path), trainer=trainer, replay={"audit": 0})
    ((places, micro_batches),) = run_ranks(config, tmp_path, step, False)
    assert micro_batches > 1
    assert places == {}


@pytest.mark.seconds
def test_nothing_of_ours_waits_where_experts_are_on_several_ranks():
    trainer = {"world_size": 2, "ep": 2, "micro_batch_tokens": 60, "device": "cpu"}
    config = RunConfig(model="qwen3_moe", trainer=trainer, replay={"audit": 0})
    for places, micro_batches in run_ranks(config, resolve_model("qwen3_moe"), step, False):
        assert micro_batches and places == {}


@pytest.mark.seconds
def test_a_wait_that_is_planted_is_found():
    config = RunConfig(model="qwen3_moe", trainer={"micro_batch_tokens": 60, "device": "cpu"})
    ((places, micro_batches),) = run_ranks(config, resolve_model("qwen3_moe"), step, True)
    (times,) = [n for place, n in places.items() if "test_waits.py" in place]
    assert times == micro_batches


def test_what_torch_reports_is_booked_to_who_waited(monkeypatch):
    """As torch warns of it, without a GPU."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    places = Places()
    with on_cuda(places):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    (place,) = places.ours()
    assert place.startswith("tests/integration/test_waits.py:")
    assert places.others() == {}
