"""What an update reports does not depend on the layout: real Megatron-core ranks over gloo.

That the function, its gradients and its checkpoints do not is for `test_verify_layout.py`.
"""

from __future__ import annotations

import pytest
import tiny_families
from ranks import random_adapter, random_batch, run_ranks

from lora_moe_rl.config import RunConfig

LAYOUTS = {
    "tp2ep2dp2": {"world_size": 4, "tp": 2, "ep": 2},
    "pp2vpp2": {"world_size": 2, "pp": 2, "vpp": 2},
}


def make_config(folder, **trainer) -> RunConfig:
    """Small micro-batches, so that every rank has several of uneven size."""
    return RunConfig(
        model=str(folder),
        adapter={"rank": 5, "expert_rank": 3},
        trainer={"lr": 1e-3, "micro_batch_tokens": 40, "clip_grad": 0.1, **trainer},
        algorithm={"kl_coef": 0.1},
    )


def train(worker, spec):
    worker.set_adapter(random_adapter(spec))
    return [worker.update(*random_batch(spec)).metrics for _ in range(2)]


def test_metrics_do_not_depend_on_the_layout(tmp_path):
    tiny_families.save("deepseek_v3", tmp_path, num_hidden_layers=4)
    (expected,) = run_ranks(make_config(tmp_path), tmp_path, train)
    for name, layout in LAYOUTS.items():
        everyone = run_ranks(make_config(tmp_path, **layout), tmp_path, train)
        assert all(metrics == everyone[0] for metrics in everyone)
        for got, one in zip(everyone[0], expected, strict=True):
            assert got == pytest.approx(one, rel=1e-4, abs=1e-5), name
            assert one["replay/coverage"] == 1 and one["loss/kl"] > 1e-4
