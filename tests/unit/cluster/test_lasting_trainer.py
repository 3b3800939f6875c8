"""Trainer ranks that die or hang are started anew: from what, how often, and what is no death."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import write_checkpoint
from mortal_ranks import MortalRanks, batch, broken_group, bug, death, hang
from published_configs import QWEN3_30B_A3B

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.lasting_trainer import BYTES_A_WEIGHT, LastingTrainer, fits
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ActorFailed, RefitError

LOST = {"death": death, "hang": hang, "broken group": broken_group}


def make(tmp_path, ranks, copied=True, **trainer) -> LastingTrainer:
    run_dir = SimpleNamespace(
        checkpoints=tmp_path / "checkpoints", log_path=lambda name: tmp_path / f"{name}.log"
    )
    return LastingTrainer(ranks, RunConfig(trainer=trainer), run_dir, copied)


def train(trainer, steps=4, each=lambda step: None) -> list[np.ndarray]:
    """The state after each step."""

    async def run():
        await trainer.hold(0)
        await trainer.send()
        states = []
        for step in range(1, steps + 1):
            await trainer.update(batch(step), [step, 0.5])
            each(step)
            states += await trainer.score([[1, 2]], None)
        return states

    return asyncio.run(run())


@pytest.fixture
def undisturbed(tmp_path):
    return train(make(tmp_path, MortalRanks()))


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
@pytest.mark.parametrize("where", ["update", "sent", "copy", "score"])
def test_whatever_a_rank_dies_over_the_run_comes_to_the_same_bits(
    tmp_path, undisturbed, lost, where
):
    ranks = MortalRanks(fates={where: [None, None, lost()]})
    trainer = make(tmp_path, ranks)
    np.testing.assert_array_equal(train(trainer), undisturbed)
    assert trainer.restarts == ranks.life == 1
    broken = ranks.events.index("end")
    assert ranks.events[broken : broken + 3] == ["end", "start_anew", "load_copy"]
    assert ("stacks" in ranks.events[:broken]) == (lost is hang)  # the others cannot answer


def test_the_metrics_of_a_step_count_restarts(tmp_path):
    trainer = make(tmp_path, MortalRanks(fates={"update": [None, death()]}))

    async def updates():
        await trainer.hold(0)
        return [(await trainer.update(batch(step), []))[0].metrics for step in (1, 2, 3)]

    assert [m["trainer/restarts"] for m in asyncio.run(updates())] == [0, 1, 1]


def test_ranks_that_die_while_they_start_count_again_up_to_the_bound(tmp_path, undisturbed):
    ranks = MortalRanks(fates={"update": [death()], "start_anew": [death()], "load_copy": [hang()]})
    trainer = make(tmp_path, ranks, max_restarts=3)
    np.testing.assert_array_equal(train(trainer), undisturbed)
    assert trainer.restarts == 3


@pytest.mark.parametrize("limit", [0, 2])
def test_beyond_the_bound_the_run_stops_and_names_the_rank(tmp_path, limit):
    trainer = make(tmp_path, MortalRanks(fates={"update": [death()] * 3}), max_restarts=limit)
    with pytest.raises(ActorFailed, match=f"trainer.max_restarts={limit} allows no more") as info:
        train(trainer)
    assert info.value.actor == "trainer-1" and info.value.log_tail == "its last words"
    assert "--resume" in str(info.value) and trainer.restarts == limit


def test_an_error_of_a_ranks_own_would_come_again_and_stops_the_run(tmp_path):
    ranks = MortalRanks(fates={"update": [bug()], "score": [RefitError("no")]})
    trainer = make(tmp_path, ranks)
    with pytest.raises(ActorFailed, match="shapes do not match"):
        train(trainer)
    with pytest.raises(RefitError, match="^no$"):
        asyncio.run(trainer.score([[1]], None))
    assert trainer.restarts == 0 and "end" not in ranks.events


def renewed(tmp_path, ranks) -> tuple[list, list]:
    """The parts of step 1 as they were sent, and as they are when a rank has died since."""
    trainer = make(tmp_path, ranks)

    async def run():
        await trainer.hold(0)
        _, parts = await trainer.update(batch(1), [])
        before = list(parts)
        assert not await trainer.renew()
        ranks.fates["check_alive"] = [death()]
        assert await trainer.renew()
        return before, parts

    return asyncio.run(run())


def test_who_keeps_the_parts_of_a_version_has_those_of_the_new_ranks(tmp_path):
    before, after = renewed(tmp_path, MortalRanks())
    assert [part.path for part in before] == ["memory of life 0"]
    assert [part.path for part in after] == ["memory of life 1"]
    assert after[0].checksums == before[0].checksums and after[0].version == 1


def test_parts_that_outlive_their_rank_are_not_sent_again(tmp_path):
    before, after = renewed(tmp_path, MortalRanks(parts_last=True))
    assert after == before


def test_ranks_that_come_back_with_another_adapter_stop_the_run(tmp_path):
    ranks = MortalRanks(fates={"score": [death()]}, forgets=True)
    with pytest.raises(RefitError, match="hold another adapter than those before had after step 1"):
        train(make(tmp_path, ranks))


def test_several_who_notice_one_death_start_the_ranks_once(tmp_path):
    ranks = MortalRanks()
    trainer = make(tmp_path, ranks)

    async def run():
        await trainer.hold(0)
        ranks.fates = {"score": [death()]}
        return await asyncio.gather(*(trainer.score([[1]], None) for _ in range(3)))

    asyncio.run(run())
    assert trainer.restarts == ranks.life == 1


def save(trainer, tmp_path, step):
    metadata = {"step": step}
    with write_checkpoint(tmp_path / "checkpoints", step, 2, metadata) as directory:
        metadata["trainer"] = trainer.save(directory).meta


def test_a_death_while_a_checkpoint_is_written_writes_it_again(tmp_path, undisturbed):
    ranks = MortalRanks(fates={"save": [death(), hang()]})
    trainer = make(tmp_path, ranks)
    found = train(trainer, 2, lambda step: save(trainer, tmp_path, step))
    np.testing.assert_array_equal(found, undisturbed[:2])
    assert trainer.restarts == 2


def test_without_a_copy_a_checkpoint_of_that_very_step_does(tmp_path, undisturbed):
    ranks = MortalRanks(fates={"update": [None, None, death()]})
    trainer = make(tmp_path, ranks, copied=False)
    found = train(trainer, each=lambda step: save(trainer, tmp_path, step))
    np.testing.assert_array_equal(found, undisturbed)
    assert trainer.restarts == 1 and "copy" not in ranks.events


@pytest.mark.parametrize("saved", [0, 1])
def test_without_a_copy_or_a_checkpoint_of_that_step_the_run_stops(tmp_path, saved):
    ranks = MortalRanks(fates={"update": [None, None, death()]})
    trainer = make(tmp_path, ranks, copied=False)
    with pytest.raises(ActorFailed, match="there is no checkpoint of step 2") as info:
        train(trainer, each=lambda step: save(trainer, tmp_path, step) if step == saved else None)
    assert "trainer.max_copy_gib=0.5" in str(info.value) and "--resume" in str(info.value)


def test_a_copy_is_held_when_weights_and_moments_fit():
    shape = ModelShape.from_hf_config(QWEN3_30B_A3B)
    spec = AdapterSpec.build(shape, RunConfig().adapter)
    bytes_held = BYTES_A_WEIGHT * sum(int(np.prod(s)) for s in spec.tensor_shapes.values())
    just = bytes_held / 2**30

    def held(algorithm="grpo", **trainer):
        return fits(RunConfig(trainer=trainer, algorithm={"name": algorithm}), spec)

    assert held(max_copy_gib=just) and not held(max_copy_gib=just * 0.999)
    assert not held("ppo", max_copy_gib=just * 1.5) and held("ppo", max_copy_gib=just * 2.1)
    assert not held(max_copy_gib=0) and not held(max_restarts=0)
