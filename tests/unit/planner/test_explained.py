"""What is said of the best layouts of a search, and of those that do not fit: by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from lora_moe_rl import cli
from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.compute import Lengths, Seconds
from lora_moe_rl.planner.explained import explain
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.hardware import GIB, Hardware
from lora_moe_rl.planner.plan import Assumed, RunPlan, make
from lora_moe_rl.planner.refused import Refused, front, refused
from lora_moe_rl.planner.search import Search

FACTS = find("qwen3-30b-a3b")


def config_of(**sections) -> RunConfig:
    rollout = {"gpu_memory_utilization": 0.9, **sections.pop("rollout", {})}
    sections = {"model": {"max_length": 4096}, "rollout": rollout} | sections
    return RunConfig.model_validate(sections)


def assumed(gpus: int = 8, memory: float = 80.0) -> Assumed:
    return Assumed(Hardware(gpus, gpu_memory=memory), "bf16", "bf16", Lengths(512, 512))


def planned(seconds: Seconds, trainer_gib: float, sequences: int) -> RunPlan:
    """A plan with these figures: of the trainer's bytes one quarter is its base."""
    trainer = {"world_size": 4, "ep": 4, "recompute": "full"}
    plan = make(FACTS, config_of(trainer=trainer), assumed())
    held = int(trainer_gib * GIB)
    memory = dict.fromkeys(plan.heaviest.memory, 0)
    memory |= {"base": held // 4, "activations": held - held // 4}
    assert plan.engine is not None
    return replace(
        plan,
        classes=[replace(plan.heaviest, memory=memory)],
        engine=replace(plan.engine, sequences=sequences),
        seconds=seconds,
    )


def of_step(decode: float, compute: float) -> Seconds:
    parts = {"prefill": 1.0, "decode": decode, "compute": compute, "pipeline bubble": 0.5}
    parts |= {"communication": 1.2, "gradient sums": 0.3}
    return Seconds(1 + decode, compute + 2, 0.25, parts)


def test_a_sentence_says_what_bounds_a_layout_and_what_it_wins_and_loses():
    fast = planned(of_step(decode=60, compute=30), trainer_gib=64, sequences=100)
    slow = planned(of_step(decode=20, compute=90), trainer_gib=48, sequences=70)
    first, second = explain([fast, slow])
    received = fast.refits[0].received / 1e9
    assert first == (
        "rollout bounds a step, 61 of 93 s (decode 60); a GPU of the trainer has 16.0 GiB left, "
        "with activations of 48.0; an engine rank has room for 100 sequences; trainer ranks wait "
        f"1.5 s for each other's data, and a refit brings {received:.2f} GB to an engine rank"
    )
    assert second.startswith("train bounds a step, 92 of 113 s (compute 90); ")
    assert second.endswith(
        "against the one before: wins rollout 40 s and 16.0 GiB of a trainer rank, loses train 60 "
        "s and room for 30 sequences"
    )
    assert explain([fast, fast])[1].endswith("wins nothing, loses nothing")


def test_of_turns_the_one_with_least_memory_left_is_named():
    config = config_of(
        trainer={"world_size": 8, "tp": 2, "ep": 8, "recompute": "full"},
        rollout={"engines": 2, "tp": 4, "ep": True, "gpu_memory_utilization": 0.4},
        placement={"mode": "colocated"},
    )
    plan = make(FACTS, config, assumed())
    turn = max(plan.turns, key=lambda turn: turn.total)
    left = 80 - (turn.trainer + turn.engine) / GIB
    assert f"{left:.1f} GiB left in the turn of the {turn.name}" in explain([plan])[0]


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_refused_would_be_faster_and_is_as_far_over_as_its_plan_says(count):
    search = Search(FACTS, config_of(), assumed())
    best = search.best(count)
    found = [one for one in refused(search, best) if one.step is not None]
    faster = [one.step < best[-1].seconds.step for one in found if one.step]
    assert all(faster) or faster == [False]  # where none would be, the fastest
    for one in found:
        sections: dict[str, dict] = {"trainer": {}, "rollout": {}}
        for key, value in one.settings.items():
            section, _, name = key.partition(".")
            sections[section][name] = value
        plan = make(FACTS, config_of(**sections), assumed())
        assert one.over == math.ceil(plan.heaviest.total - 0.85 * 80 * GIB) > 0
        assert one.step == pytest.approx(plan.seconds.step - plan.seconds.refit)
        assert f"{one.over:,} bytes over" in one.why
        assert f"{plan.heaviest.total / GIB:.1f} GiB" in one.why


def test_as_many_bytes_more_are_enough_and_fewer_are_not():
    """Of a GPU a proposal uses 85 %. The engines keep their share in bytes."""
    search = Search(FACTS, config_of(), assumed())
    (nearest, *_) = refused(search, search.best(3))
    for more, fits in ((nearest.over + 2**20, True), (nearest.over - 2**20, False)):
        memory = 80 + more / 0.85 / GIB
        config = config_of(rollout={"gpu_memory_utilization": 0.9 * 80 / memory})
        larger = Search(FACTS, config, assumed(memory=memory))
        still = [one.settings for one in refused(larger, larger.best(3), count=100)]
        settings = nearest.settings | {"rollout.gpu_memory_utilization": 0.9 * 80 / memory}
        assert (settings not in still) == fits


def test_an_engine_without_room_lacks_what_a_sequence_takes_of_its_share():
    config = config_of(trainer={"recompute": "full"}, adapter={"rank": 16})
    search = Search(FACTS, config, assumed(gpus=4, memory=64.0))
    (one,) = [r for r in refused(search, search.best(3)) if r.settings == {"rollout.tp": 1}]
    engine = search.engine(config.rollout.model_copy(update={"tp": 1}))
    # 48 layers of 4 key and 4 value heads of 128 numbers in bf16, for 4,096 tokens.
    sequence = 48 * 2 * 4 * 128 * 2 * 4096
    share = int(0.9 * 64 * GIB)
    assert one.over == engine.weights + engine.slots + engine.working + sequence - share > 0
    assert one.step is None


@pytest.mark.parametrize("mode", ["split", "colocated"])
def test_where_trainer_and_engine_share_a_gpu_both_are_counted(mode):
    config = config_of(placement={"mode": mode}, trainer={"recompute": "full"})
    search = Search(FACTS, config, assumed(gpus=1, memory=140.0))
    (one, *_) = refused(search, search.best(3))
    trainer, of_engine = (float(part.split("'s ")[1][:4]) for part in one.why.split(" and an "))
    assert trainer + of_engine == pytest.approx(0.85 * 140 + one.over / GIB, abs=0.11)


def test_of_refused_layouts_each_is_faster_than_those_before():
    def layout(over: int, step: float) -> Refused:
        return Refused({}, step, over, "")

    found = [layout(1, 9.0), layout(2, 9.5), layout(3, 7.0), layout(4, 7.0), layout(5, 6.0)]
    assert [one.over for one in front(found)] == [1, 3, 5]


def test_the_command_says_it_and_json_has_it(capsys):
    words = ["plan", "--model", "qwen3-30b-a3b", "--gpus", "8", "--search"]
    assert cli.main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    whys = [proposal["why"] for proposal in found["proposals"]]
    assert all(whys[:3]) and not any(whys[3:])
    for place, why in enumerate(whys[:3], 1):
        assert f"{place}. {why}" in shown
    for one in found["refused"]:
        assert one["over"] > 0 and one["why"] in shown
