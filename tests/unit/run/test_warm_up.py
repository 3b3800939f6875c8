"""A run that goes on when its learning rate's schedule has nothing left."""

from __future__ import annotations

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.files.trainer_state import POLICY, Done
from lora_moe_rl.run import warm_up


@pytest.mark.parametrize(
    ("done", "schedule", "told"),
    [(19, "linear", False), (20, "linear", True), (20, "constant", False), (99, "cosine", True)],
)
def test_a_schedule_at_its_end_is_told(done, schedule, told):
    trainer = {"steps": 10, "lr_schedule": schedule, "min_lr": 1e-6}
    sampling = {"mini_batches": 2, "prompts_per_step": 4}
    config = RunConfig(trainer=trainer, algorithm={"name": "grpo", **sampling})
    said = warm_up.at_its_end(config, Done(done, done).as_meta(POLICY, 2))
    assert ("20 optimizer steps: the run goes on at trainer.min_lr=1e-06" in said) == told
    assert bool(said) == told
