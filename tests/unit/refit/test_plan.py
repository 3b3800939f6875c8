"""The plan of a refit: every element that an engine rank holds arrives there exactly once."""

from __future__ import annotations

import dataclasses
import re
import time
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_configs import KIMI_K2, LING_MINI_2_0, QWEN3_5_35B_A3B, QWEN3_30B_A3B

from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.parts import _twice, check_complete, part_layouts
from lora_moe_rl.refit.plan import (
    Box,
    EngineLayout,
    held,
    lacking,
    make_plan,
    received,
    trainer_ranks,
)
from lora_moe_rl.rollout.facts import slot_rank

QWEN = {
    **QWEN3_30B_A3B,
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
SEPARATE = {  # gated DeltaNet with linears of its own
    **QWEN3_5_35B_A3B,
    "text_config": QWEN3_5_35B_A3B["text_config"]
    | {key: value for key, value in QWEN.items() if key in QWEN3_5_35B_A3B["text_config"]}
    | {
        "model_type": "qwen3_5_moe_text",
        "full_attention_interval": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "shared_expert_intermediate_size": 12,
    },
}
LING = LING_MINI_2_0 | {key: value for key, value in QWEN.items() if key in LING_MINI_2_0}
LING |= {"architectures": LING_MINI_2_0["architectures"], "model_type": "bailing_moe_v2"}
DEEPSEEK = {
    **KIMI_K2,
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


def spec_of(config: dict, **adapter) -> AdapterSpec:
    return AdapterSpec.build(ModelShape.from_hf_config(config), AdapterConfig(**adapter))


@st.composite
def trainers(draw) -> TrainerConfig:
    tp, cp, dp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2], [1, 2], [1, 2, 4]))
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1)]))
    etp = draw(st.sampled_from([1, tp]))
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if tp * cp * dp % (n * etp) == 0]))
    return TrainerConfig(world_size=tp * cp * dp * pp, tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp)


@st.composite
def engines(draw) -> EngineLayout:
    size = draw(st.sampled_from([1, 2, 4]))
    how = draw(st.sampled_from(["plain", "ep", "sharded", "spread", "both"]))
    if how in ("spread", "both"):
        return EngineLayout(slot_rank=8, tp=2 if how == "both" else 1, ep=True, dp=size)
    return EngineLayout(slot_rank=8, tp=size, ep=how == "ep", fully_sharded=how == "sharded")


@settings(max_examples=60, deadline=None)
@given(
    trainer=trainers(),
    engine=engines(),
    config=st.sampled_from([QWEN, DEEPSEEK, SEPARATE, LING]),
    layout=st.sampled_from(["per_expert", "shared_outer"]),
    rank=st.sampled_from([3, 8]),
)
def test_every_element_arrives_exactly_once(trainer, engine, config, layout, rank):
    """Moves real arrays along the plan, from what each trainer rank holds to what vLLM's own
    slicing would leave on each engine rank."""
    spec = spec_of(config, rank=rank, expert_layout=layout)
    rng = np.random.default_rng(0)
    tensors = {name: rng.random(shape) for name, shape in spec.tensor_shapes.items()}
    kv_heads = spec.shape.dims.get("kv_heads", 0)
    ranks = trainer_ranks(trainer, spec.shape.num_layers)
    arrived: dict[tuple[int, str], np.ndarray] = {}
    for t in make_plan(spec, trainer, engine, 4).transfers:
        name = f"{t.site.name}.{t.matrix}"
        source = ranks[t.source]
        assert t.site.layer in source.layers
        box = _around(t.box, source.layout.boxes(t.site, t.matrix))
        local = tensors[name][box.within(_whole(tensors[name].shape))]
        boxes = held(t.site, t.matrix, engine, t.target, kv_heads)
        target = _around(t.box, boxes)
        first = sum(one.shape[0] for one in boxes[: boxes.index(target)])
        rows = sum(one.shape[0] for one in boxes)  # a rank's blocks stand one behind the other
        buffer = arrived.setdefault((t.target, name), np.full((rows, *target.shape[1:]), np.nan))
        place = buffer[first : first + target.shape[0]][t.box.within(target)]
        assert np.isnan(place).all(), f"{name} arrives twice"
        place[...] = local[t.box.within(box)]
    for rank_number in range(engine.ranks):
        for site in spec:
            for matrix in "AB":
                name = f"{site.name}.{matrix}"
                expected = sliced_by_vllm(site, matrix, tensors[name], engine, rank_number)
                got = arrived.get((rank_number, name), np.zeros(expected.shape))
                np.testing.assert_array_equal(got, expected, err_msg=name)


def _around(box: Box, boxes: list[Box]) -> Box:
    (one,) = (one for one in boxes if box.common(one) == box)
    return one


def _whole(shape) -> Box:
    return Box((0,) * len(shape), shape)


def sliced_by_vllm(site, matrix, tensor, engine, rank):
    """As `slice_lora_a` and `slice_lora_b` of vLLM's layers (vllm/lora/layers) cut it."""
    tp = engine.tp
    if engine.ep and site.num_experts is not None:  # _slice_moe_lora_ep: over all ranks
        return np.split(tensor, engine.ranks)[rank] if tensor.ndim == 3 else tensor
    rank %= tp
    part = lambda x, dim: np.split(x, tp, axis=dim)[rank]  # noqa: E731
    slot = engine.slot_rank // tp
    ranks = slice(rank * slot, (rank + 1) * slot)
    if site.num_experts is not None:
        if site.module == "experts.down":
            if matrix == "A":
                return part(tensor, -1)
            return part(tensor, -2) if engine.fully_sharded else tensor
        if matrix == "B":
            return part(tensor, -2)
        return tensor[..., ranks, :] if engine.fully_sharded else tensor
    if site.module in ("q_a_proj", "kv_a_proj"):
        return tensor
    if site.module.endswith(("o_proj", "out_proj", "down")):
        if matrix == "A":
            return part(tensor, 1)
        return part(tensor, 0) if engine.fully_sharded else tensor
    if matrix == "A":
        return tensor[ranks] if engine.fully_sharded else tensor
    repeated = lambda x: np.split(x, 2)[rank // (tp // 2)] if tp > 2 else part(x, 0)  # noqa: E731
    if site.module in ("k_proj", "v_proj"):  # 2 key/value heads
        return repeated(tensor)
    if site.module == "query_key_value":
        query, key, value = np.split(tensor, np.cumsum(site.blocks)[:-1])
        return np.concatenate([part(query, 0), repeated(key), repeated(value)])
    if site.blocks:  # one of vLLM's slices each
        return np.concatenate([part(x, 0) for x in np.split(tensor, np.cumsum(site.blocks)[:-1])])
    return part(tensor, 0)


def test_at_most_one_transfer_a_tensor_and_pair_of_ranks():
    """Of a layer of Qwen3-30B-A3B: 14 tensors, experts stacked."""
    spec = spec_of(QWEN3_30B_A3B, rank=16)
    plan = make_plan(spec, TrainerConfig(), EngineLayout(slot_rank=16), 2)
    assert len(plan.transfers) == 14 * 48
    assert plan.link_bytes == {(0, 0): spec.num_parameters * 2}


def test_equal_copies_take_turns_in_sending():
    spec = spec_of(QWEN3_30B_A3B, rank=16)
    plan = make_plan(spec, TrainerConfig(world_size=4), EngineLayout(slot_rank=16, tp=4), 2)
    sent = plan.sent_bytes()
    assert sorted(sent) == [0, 1, 2, 3] and len(set(sent.values())) == 1


def test_kimi_k2_on_512_ranks_is_planned_in_seconds():
    spec = spec_of(KIMI_K2, rank=32)
    trainer = TrainerConfig(world_size=512, tp=8, pp=8, ep=32)
    started = time.perf_counter()
    plan = make_plan(spec, trainer, EngineLayout(slot_rank=32, tp=16, ep=True), 2)
    seconds = time.perf_counter() - started
    print(f"{len(plan.transfers)} transfers in {seconds:.2f} s")
    whole = sum(plan.received_bytes().values())
    experts = sum(
        2 * np.prod(shape) for name, shape in spec.tensor_shapes.items() if ".experts." in name
    )
    assert whole > experts > 0.9 * whole  # dense tensors are small, though some go to all 16


def test_engines_shard_adapters_in_one_way_only():
    with pytest.raises(RefitError, match="by experts .* or by rank"):
        EngineLayout(slot_rank=8, tp=2, ep=True, fully_sharded=True)


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("change", ["lost", "short", "twice"])
def test_parts_that_are_not_all_of_the_adapter_are_refused(change, target):
    spec = AdapterSpec.build(ModelShape.from_hf_config(QWEN), AdapterConfig(rank=4))
    engine = EngineLayout(slot_rank(spec), tp=2)
    plan = make_plan(spec, TrainerConfig(world_size=2, ep=2), engine, 4)
    check_complete(part_layouts(plan, spec, "float32"), spec, engine)
    first = next(t for t in plan.transfers if t.target == target)
    others = [t for t in plan.transfers if t is not first]
    half = (first.box.shape[0] // 2, *first.box.shape[1:])
    shorter = dataclasses.replace(first, box=dataclasses.replace(first.box, shape=half))
    broken = {"lost": others, "short": [shorter, *others], "twice": [first, first, *others]}[change]
    wrong = dataclasses.replace(plan, transfers=tuple(broken))
    message = rf"{first.site.name}.{first.matrix}: engine rank {target} gets \d+ of"
    (fault,) = lacking(received(wrong), spec, engine)
    assert re.match(message, fault)
    if change != "twice":  # equal boxes are one entry
        with pytest.raises(RefitError, match=message):
            check_complete(part_layouts(wrong, spec, "float32"), spec, engine)


@pytest.mark.parametrize("change", ["other rank", "twice"])
def test_elements_of_another_rank_or_twice_in_the_place_of_others_are_refused(change):
    """As many elements as wanted, and not those."""
    spec = AdapterSpec.build(ModelShape.from_hf_config(QWEN), AdapterConfig(rank=4))
    engine = EngineLayout(slot_rank(spec), tp=2)
    plan = make_plan(spec, TrainerConfig(world_size=2, tp=2), engine, 4)
    tensor = ("layers.1.o_proj", "A") if change == "other rank" else ("layers.1.q_proj", "A")
    wrong = []
    for t in plan.transfers:
        if (t.site.name, t.matrix) != tensor:
            wrong.append(t)
        elif change == "other rank":
            wrong.append(dataclasses.replace(t, target=1 - t.target))
        else:  # all but the last row, and the one before it once more
            rows, columns = t.box.shape
            most = dataclasses.replace(t.box, shape=(rows - 1, columns))
            again = dataclasses.replace(t.box, start=(rows - 2, 0), shape=(1, columns))
            wrong += [dataclasses.replace(t, box=box) for box in (most, again)]
    broken = dataclasses.replace(plan, transfers=tuple(wrong))
    assert lacking(received(broken), spec, engine) == []
    how = "beside" if change == "other rank" else "twice of"
    with pytest.raises(RefitError, match=rf"{'.'.join(tensor)}: engine rank 0 gets .* {how} what"):
        check_complete(part_layouts(broken, spec, "float32"), spec, engine)


@pytest.mark.parametrize("seed", range(40))
def test_boxes_with_elements_in_common_are_found_wherever_they_begin(seed):
    draw = np.random.default_rng(seed)
    boxes = []
    for _ in range(int(draw.integers(0, 9))):
        start, shape = draw.integers(0, 6, 3), draw.integers(1, 4, 3)
        boxes.append(Box(tuple(start.tolist()), tuple(shape.tolist())))
    elements = [set(product(*(range(a, a + n) for a, n in zip(b.start, b.shape)))) for b in boxes]
    pairs = combinations(range(len(boxes)), 2)
    shared = sum(bool(elements[a] & elements[b]) for a, b in pairs)
    assert len(_twice(boxes)) == shared
