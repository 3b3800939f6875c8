"""What `plan --build` notices, on ranks that are described instead of built."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_moe_rl.adapters.sharding import Box
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner import build, facts
from lora_moe_rl.planner.base import held_by
from lora_moe_rl.planner.build_rank import BuiltRank
from lora_moe_rl.planner.trainer import TrainerMemory
from lora_moe_rl.refit.plan import EngineLayout, make_plan, trainer_ranks
from lora_moe_rl.rollout.facts import slot_rank

CONFIG = RunConfig.model_validate(
    {
        "trainer": {"world_size": 8, "tp": 2, "pp": 2, "ep": 2},
        "rollout": {"tp": 2},
        "adapter": {"rank": 4},
    }
)
FACTS = facts.find("deepseek_v3")
SPEC = AdapterSpec.build(FACTS.shape, CONFIG.adapter)
PLACES = trainer_ranks(CONFIG.trainer, FACTS.shape.num_layers)
ENGINE = EngineLayout.of(CONFIG.rollout, slot_rank(SPEC))
CLASSES = TrainerMemory(FACTS, SPEC, "bf16").classes(CONFIG)
PLAN = make_plan(SPEC, CONFIG.trainer, ENGINE, 2)


def as_planned(rank: int) -> BuiltRank:
    tensors = held_by(FACTS, PLACES[rank])
    ways = {"tp": CONFIG.trainer.tp, "ep": CONFIG.trainer.ep, "etp": 1}
    cut = {}
    for tensor in tensors:
        cut[tensor.name] = 1
        for _, axis in tensor.split:
            cut[tensor.name] *= ways[axis]
    base = {t.name: box.shape for t, box in tensors.items()}
    boxes = build.adapter_boxes(SPEC, PLACES[rank]).items()
    return BuiltRank(rank, base, cut, [(name, box) for name, mine in boxes for box in mine])


def faults(rank: BuiltRank) -> list[str]:
    place = PLACES[rank.rank]
    base = {t.name: box.shape for t, box in held_by(FACTS, place).items()}
    boxes = build.adapter_boxes(SPEC, place)
    checks = (
        build.compare_base(rank, base),
        build.compare_counts(rank, next(c for c in CLASSES if rank.rank // 4 in c.stages)),
        build.compare_adapter(rank, boxes),
        build.compare_refit(rank, PLAN),
    )
    return [fault for check in checks for fault in check.wrong]


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_ranks_as_planned_pass(rank):
    assert faults(as_planned(rank)) == []


@pytest.mark.seconds
def test_the_tiny_model_is_built_as_it_is_planned():
    report = build.check(FACTS, SPEC, CONFIG, CLASSES, say=print)
    assert [row for row in report.rows if not row.passed] == []
    assert report.ranks == [0, 3, 4, 7] and report.unique_parameters == build.num_parameters(FACTS)


def test_another_shape_a_missing_tensor_and_one_too_many_are_named():
    rank = as_planned(0)
    rank.base["output_layer.weight"] = rank.base.pop("embedding.word_embeddings.weight")
    name = "decoder.layers.0.input_layernorm.weight"
    rank.base[name] = (rank.base[name][0] + 1,)
    found = faults(rank)
    assert len(found) == 4 and found[3].startswith("base: built")
    for name in ("embedding.word_embeddings", "output_layer", "layers.0.input_layernorm"):
        assert any(name in fault for fault in found)


def test_an_adapter_that_begins_elsewhere_is_named():
    rank = as_planned(3)
    moved = next(
        i for i, (name, box) in enumerate(rank.adapters) if "experts" in name and box.start[0]
    )
    name, box = rank.adapters[moved]
    rank.adapters[moved] = (name, replace(box, start=(0, *box.start[1:])))
    assert any(fault.startswith(f"{name}: built") for fault in faults(rank))


def test_parts_make_up_a_whole_only_without_gaps_and_overlaps():
    whole = Box((4, 0), (4, 6))
    halves = [Box((4, 0), (2, 6)), Box((6, 0), (2, 6))]
    assert build._make_up(halves, [whole])
    for parts in (halves[:1], [halves[0]] * 2, [Box((3, 0), (2, 6)), halves[1]]):
        assert not build._make_up(parts, [whole])


def test_every_element_counts_once_over_all_ranks():
    ranks = [as_planned(rank) for rank in (0, 3, 4, 7)]
    total = build.unique_parameters(ranks, CONFIG.trainer)
    assert build._total(FACTS, total).wrong == []
    ranks[1].ways["embedding.word_embeddings.weight"] = 1
    assert build._total(FACTS, build.unique_parameters(ranks, CONFIG.trainer)).wrong


def test_a_transfer_that_is_lost_is_named():
    assert build.completeness(PLAN, SPEC, ENGINE).wrong == []
    short = replace(PLAN, transfers=PLAN.transfers[1:])
    (fault,) = build.completeness(short, SPEC, ENGINE).wrong
    lost = PLAN.transfers[0]
    assert fault.startswith(f"{lost.site.name}.{lost.matrix}: engine rank {lost.target} gets")


@pytest.mark.parametrize("first", [0, 1])
def test_experts_that_vllm_has_elsewhere_are_named(first):
    """The tiny model's 8 experts on 3 ranks: vLLM gives what is left over to the first ranks."""
    engine = EngineLayout(slot_rank(SPEC), ep=True, dp=3)
    served = [[0, 1, 2], [3, 4, 5], [6, 7]]
    check = build.compare_experts(FACTS, SPEC, engine, served[first:] + served[:first])
    assert check.passed == (first == 0)
    # Three MoE layers of gate, up and down, [96 x 96] each: three experts of the base on the first
    # rank, and A and B of rank 4 of all eight.
    assert check.elements == 3 * 3 * (3 * 96 * 96 + 8 * 4 * (96 + 96))
    if first:
        assert all("vLLM has" in fault for fault in check.wrong)
    short = build.compare_experts(FACTS, SPEC, engine, [[0, 1], *served[1:]])
    assert any("vLLM has 2, planned 3" in fault for fault in short.wrong)
