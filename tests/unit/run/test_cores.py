"""What `check` says of a machine's cores: settings that are valid, and no more than there are."""

from __future__ import annotations

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.run.cores import used


def said(cores: int, *settings: str) -> str:
    config = RunConfig(model="m", algorithm={"prompts_per_step": 6, "group_size": 8})
    return used(override(config, settings), cores)


@pytest.mark.parametrize(
    ("cores", "settings", "expected"),
    [
        (1, (), "of 1 cores an update computes on 1 and a rollout on 1"),
        (2, ("trainer.world_size=2", "rollout.engines=2"),
         "of 2 cores an update computes on 2 and a rollout on 2"),
        (2, (), "of 2 cores an update computes on 1 and a rollout on 1 "
         "(trainer.world_size=2 rollout.engines=2 would use more)"),
        (4, ("schedule.lag=1", "algorithm.correction=tis", "refit.slots=3"),
         "of 4 cores updates and rollouts compute on 2 (rollout.engines=3 would use more)"),
        (2, ("schedule.lag=1", "algorithm.correction=tis", "refit.slots=3"),
         "of 2 cores updates and rollouts compute on 2"),
    ],
)  # fmt: skip
def test_it_names_settings_that_use_the_cores_that_are_idle(cores, settings, expected):
    assert said(cores, *settings) == expected


@pytest.mark.parametrize("layout", [
    ("trainer.tp=2", "trainer.world_size=2"),
    ("trainer.ep=2", "trainer.world_size=2"),
    ("trainer.tp=2", "trainer.pp=2", "trainer.ep=4", "trainer.world_size=8"),
    ("trainer.cp=2", "trainer.pp=2", "trainer.ep=4", "trainer.world_size=8"),
])  # fmt: skip
def test_more_ranks_are_a_layout_that_the_run_takes(layout):
    text = said(9, *layout, "rollout.engines=6")
    words = [word for word in text.replace("(", " ").split() if "=" in word]
    bigger = override(RunConfig(model="m"), [*layout, *words])
    assert words == (["trainer.world_size=8"] if "trainer.pp=2" not in layout else [])
    assert bigger.trainer.world_size <= 9


def test_an_engine_is_to_have_a_steps_samples_at_once():
    text = said(2, "rollout.max_num_seqs=20", "trainer.world_size=2", "rollout.engines=2")
    assert text.endswith("; engines take 20 of 24 samples at once (rollout.max_num_seqs=24: all)")
    assert "max_num_seqs" not in said(2, "rollout.max_num_seqs=48")


def test_an_algorithm_without_engines_has_updates_alone():
    config = RunConfig(model="m", algorithm={"name": "sft", "prompts_per_step": 6})
    assert used(config, 2) == (
        "of 2 cores an update computes on 1 (trainer.world_size=2 would use more)"
    )
