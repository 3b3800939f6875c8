"""After a step no rank holds a graph, and with it the activations of a micro-batch: what looks at
memory between steps, as engines on the same GPU that wake up, finds them gone."""

from __future__ import annotations

import gc

import pytest
import tiny_families
import torch
from ranks import random_adapter, random_batch, run_ranks

from lora_moe_rl.config import RunConfig

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")


def held(worker, spec) -> list[str]:
    worker.set_adapter(random_adapter(spec))
    worker.update(*random_batch(spec))
    gc.collect()
    tensors = (one for one in gc.get_objects() if isinstance(one, torch.Tensor))
    return [f"{tuple(one.shape)} of {one.grad_fn}" for one in tensors if one.grad_fn is not None]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_graph_outlives_its_step(family, recompute, tmp_path):
    tiny_families.save(family, tmp_path)
    trainer = {"micro_batch_tokens": 40, "recompute": recompute}
    config = RunConfig(model=str(tmp_path), trainer=trainer)
    assert run_ranks(config, tmp_path, held) == [[]]
