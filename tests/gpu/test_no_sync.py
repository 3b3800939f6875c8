"""What in a trainer's step waits for the GPU, as torch itself reports it: nothing of ours while the
step's work is being given out. Where others' code waits is kept in the test's report.

tests/integration/test_waits.py looks for the same calls without a GPU.
"""

from __future__ import annotations

import json

import pytest
import tiny_families
import torch
from ranks import random_adapter, random_batch, run_ranks

from lora_moe_rl.config import RunConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def step(worker, spec):
    from device_waits import on_cuda, watch

    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec)
    worker.update(batch, table)  # compiles kernels
    places = watch(worker.engine, on_cuda)
    worker.update(batch, table)
    return places.ours(), places.others(), worker.engine.trained[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_nothing_of_ours_waits_for_the_device(family, recompute, record_property, tmp_path):
    tiny_families.save(family, tmp_path)
    trainer = {"device": "cuda", "micro_batch_tokens": 60, "recompute": recompute}
    config = RunConfig(model=str(tmp_path), trainer=trainer, replay={"audit": 0})
    ((ours, others, micro_batches),) = run_ranks(config, tmp_path, step)
    record_property("micro_batches", micro_batches)
    record_property("others", json.dumps(others))
    assert ours == {}
