"""Which part of a tensor is whose, and what a GPU holds: by numpy's own cuts, and by bytes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mapped_files import Files
from plain_checkpoint import save_plain
from published_configs import KIMI_K2, QWEN3_30B_A3B

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.sharding import Box, RankLayout, window
from lora_moe_rl.base.dense import EMBEDDING, HEAD, Dense, dense
from lora_moe_rl.base.held import Held
from lora_moe_rl.base.layout import ExpertCut, Stack, kind, rule, stacks
from lora_moe_rl.base.owner import owned
from lora_moe_rl.base.parts import engine_part, told, trainer_part
from lora_moe_rl.bench.model import save_random
from lora_moe_rl.config import RolloutConfig, TrainerConfig
from lora_moe_rl.errors import ConfigError, HeldBaseError
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.refit.plan import trainer_ranks
from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, build_model

SMALL = {"num_hidden_layers": 4, "hidden_size": 8, "moe_intermediate_size": 8}
QWEN = {
    **QWEN3_30B_A3B,
    **SMALL,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 2,
    "num_experts": 8,
    "vocab_size": 128,
}
DEEPSEEK = {
    **KIMI_K2,
    **SMALL,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 2,
    "v_head_dim": 2,
    "intermediate_size": 16,
    "n_routed_experts": 8,
    "vocab_size": 100,  # which vLLM pads to 128
}
SHAPES = [ModelShape.from_hf_config(one) for one in (QWEN, DEEPSEEK)]
SIZES = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw) -> tuple[ModelShape, TrainerConfig, RolloutConfig]:
    """A model, and a trainer on as many GPUs as some engines of one kind have together."""
    rollout = RolloutConfig(tp=draw(SIZES), ep=draw(st.booleans()))
    sizes = {key: draw(SIZES) for key in ("tp", "pp", "ep", "etp")}
    try:
        trainer = TrainerConfig(world_size=rollout.tp * draw(SIZES), **sizes)
    except (ConfigError, ValueError):
        assume(False)
        raise
    return draw(st.sampled_from(SHAPES)), trainer, rollout


def stored(shape: ModelShape, rollout: RolloutConfig) -> list[Stack | Dense]:
    return [*stacks(shape, ExpertCut.of_engine(rollout).pieces), *dense(shape, rollout.tp)]


def ids(one: Stack | Dense) -> np.ndarray:
    return np.arange(math.prod(one.shape)).reshape(one.shape)


def of_engine(one: Stack | Dense, rollout: RolloutConfig, rank: int) -> np.ndarray:
    """Elements that a rank of vLLM has, by numpy's cuts."""
    if isinstance(one, Stack):
        return np.array_split(ids(one), rollout.tp, axis=1 if rollout.ep else 0)[rank]
    axes = {"column": 0, "row": 1}
    if one.kind not in axes:
        return ids(one)
    return np.split(ids(one), rollout.tp, axis=axes[one.kind])[rank]


def of_trainer(
    one: Stack | Dense, shape: ModelShape, trainer: TrainerConfig, rank: int
) -> np.ndarray:
    """Elements that a rank of Megatron has, whose number has tp (of experts etp, then ep) fastest
    and pp slowest; none of a layer of another stage."""
    stages = np.arange(shape.num_layers).reshape(trainer.pp, -1)  # four layers divide
    layer = {EMBEDDING: 0, HEAD: shape.num_layers - 1}.get(one.name, one.layer)
    if layer not in stages[rank * trainer.pp // trainer.world_size]:
        return ids(one)[:0]
    if isinstance(one, Stack):
        pieces = np.array_split(ids(one), trainer.etp, axis=0)[rank % trainer.etp]
        return np.split(pieces, trainer.ep, axis=1)[rank // trainer.etp % trainer.ep]
    tp, place = trainer.tp, rank % trainer.tp
    if not one.modules:
        padded = np.concatenate([ids(one)[: shape.vocab_size], ids(one)[shape.vocab_size :]])
        rows = -(-shape.vocab_size // tp)
        return padded[place * rows : (place + 1) * rows]
    axes = {"column": 0, "row": 1}
    if one.kind not in axes:
        return ids(one)
    return np.split(ids(one), tp, axis=axes[one.kind])[place]


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_parts_are_numpys_and_together_everything(drawn):
    shape, trainer, rollout = drawn
    for one in stored(shape, rollout):
        counts = np.zeros(one.shape, int)
        for rank in range(rollout.tp):
            box = engine_part(one, rollout.tp, rollout.ep, rank)
            counts[window(box.start, box.shape)] += 1
            found = ids(one)[window(box.start, box.shape)]
            assert np.array_equal(found, of_engine(one, rollout, rank))
        copies = rollout.tp if one.kind == "replicated" else 1
        assert np.all(counts == copies), one.name
    if ExpertCut.of_trainer(trainer).pieces != ExpertCut.of_engine(rollout).pieces:
        return
    for one in stored(shape, rollout):
        for rank in trainer_ranks(trainer, shape.num_layers):
            wanted = of_trainer(one, shape, trainer, rank.rank)
            if wanted.size:
                box = trainer_part(one, shape, rank.layout)
                assert np.array_equal(ids(one)[window(box.start, box.shape)], wanted), one.name


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_what_is_shared_on_gpus_is_what_every_gpu_has_of_both(drawn):
    """By the sets of elements of each pair of ranks, and what is not shared on a CPU either is
    not on GPUs."""
    shape, trainer, rollout = drawn
    on_cpu = {one.name: one.reason for one in rule(shape, trainer, rollout)}
    on_gpus = {one.name: one.reason for one in rule(shape, trainer, rollout, on_gpus=True)}
    missing: dict[str, bool] = {}
    for one in stored(shape, rollout):
        name = "experts" if isinstance(one, Stack) else kind(one)
        reason = on_cpu[one.name if isinstance(one, Stack) else name]
        if reason:
            assert on_gpus[one.name if isinstance(one, Stack) else name] == reason
            continue
        lacks = not all(
            np.isin(
                of_trainer(one, shape, trainer, gpu), of_engine(one, rollout, gpu % rollout.tp)
            ).all()
            for gpu in range(trainer.world_size)
        )
        missing[name] = missing.get(name, False) or lacks
    for name, lacks in missing.items():
        reason = on_gpus[stacks(shape, 1)[0].name if name == "experts" else name]
        assert bool(reason) == lacks, (name, reason)


def reasons(shape: ModelShape, trainer: dict, rollout: dict) -> dict[str, str]:
    """Of experts, and of the rest by the last of its name."""
    found = rule(shape, TrainerConfig(**trainer), RolloutConfig(**rollout), on_gpus=True)
    return {one.name.split(".")[-2]: one.reason for one in found if "." in one.name} | {
        "experts": next(one.reason for one in found if ".experts." in one.name)
    }


def test_of_a_trainer_without_tp_beside_an_engine_with_it_experts_are_shared_and_mla_down():
    found = reasons(SHAPES[1], {"world_size": 4, "ep": 4}, {"tp": 4, "ep": True})
    shared = {name for name, reason in found.items() if not reason}
    assert shared - {"routed_experts"} == {"experts", "fused_qkv_a_proj"}
    assert found["o_proj"] == (
        "trainer rank 0 takes all, and rank 0 of the engine on its GPU has columns 0:2 of 8"
    )


@pytest.mark.parametrize(
    ("trainer", "rollout"),
    [
        ({"world_size": 4, "tp": 4, "ep": 4}, {"tp": 4, "ep": True}),
        ({"world_size": 4, "tp": 2, "ep": 2}, {"tp": 2, "ep": True}),  # two engines
        ({"world_size": 4, "tp": 2, "ep": 2, "pp": 2}, {"tp": 2, "ep": True}),
        ({"world_size": 4, "tp": 4, "etp": 4}, {"tp": 4}),
        ({"world_size": 4, "ep": 4}, {}),  # four engines, each with everything
    ],
)
def test_cut_alike_all_but_norms_and_routers_is_shared(trainer, rollout):
    found = reasons(SHAPES[0], trainer, rollout)
    assert not any(found.values()), found


@pytest.mark.parametrize(
    ("trainer", "rollout", "message"),
    [
        (
            {"world_size": 4, "tp": 4, "ep": 2},
            {"tp": 4, "ep": True},
            "trainer rank 0 takes experts 0:4 of 8, and rank 0 of the engine on its GPU has "
            "experts 0:2 of 8: set trainer.ep=4, as rollout.tp with rollout.ep",
        ),
        (
            {"world_size": 4, "ep": 4},
            {"tp": 2, "ep": True},
            "trainer rank 1 takes experts 2:4 of 8, and rank 1 of the engine on its GPU has "
            "experts 4:8 of 8: set trainer.ep=2, as rollout.tp with rollout.ep",
        ),
    ],
)
def test_experts_that_a_gpu_lacks_are_named_with_the_way_out(trainer, rollout, message):
    assert reasons(SHAPES[0], trainer, rollout)["experts"] == message


def test_a_vocabulary_that_vllm_pads_is_cut_otherwise():
    found = reasons(SHAPES[1], {"world_size": 4, "tp": 4, "ep": 4}, {"tp": 4, "ep": True})
    assert found["lm_head"] == (
        "trainer rank 1 takes rows 25:50 of 128, and rank 1 of the engine on its GPU has rows "
        "32:64 of 128"
    )


def test_a_part_in_words():
    assert told(Box((0, 2, 0, 0), (1, 2, 4, 4)), (1, 8, 4, 4)) == "experts 2:4 of 8"
    assert told(Box((1, 0, 0, 0), (1, 8, 4, 4)), (2, 8, 4, 4)) == "pieces 1:2 of 2"
    assert told(Box((0, 0), (3, 4)), (3, 4)) == "all"


@pytest.fixture(scope="module", params=["plain", "qwen3_moe", "deepseek_v3"])
def model(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    if request.param == "plain":
        return save_plain(folder)
    folder.mkdir()
    save_random(folder, lambda: build_model(request.param), EXTRA_CONFIG[request.param])
    return folder


def held_by_gpus(folder: Path, model: Path, tp: int, ep: bool):
    """An engine's view, and the stores that its ranks share, each on a GPU of its own."""
    (folder / "memory").mkdir()
    held = Held(str(folder), str(model), "float32", tp, ep, True, True)
    ports = [Files(folder / "memory", f"GPU-{rank}") for rank in range(tp)]
    return held, ports, [held.share(port, rank) for rank, port in enumerate(ports)]


@pytest.mark.seconds
@pytest.mark.parametrize(("tp", "ep"), [(1, False), (2, True), (2, False)])
def test_each_gpu_holds_its_part_of_the_bytes_that_a_file_has(model, tp, ep, tmp_path):
    held, ports, owners = held_by_gpus(tmp_path, model, tp, ep)
    with owned(str(tmp_path)) as folder:
        store = Held(folder, str(model), "float32", tp, ep, True).open()
        for name in store.contents.tensors:
            counts = torch.zeros(store[name].shape, dtype=torch.int)
            for owner in owners:
                box = owner.boxes[name]
                assert torch.equal(owner[name], store.part(name, box)), name
                counts[window(box.start, box.shape)] += 1
            assert counts.min() >= 1
    for port, owner in zip(ports, owners, strict=True):
        mapped = held.map(port)
        mapped.check()
        assert mapped.boxes == owner.boxes
        owner.close()


@pytest.mark.seconds
def test_a_trainer_rank_takes_views_of_what_is_on_its_gpu(model, tmp_path):
    held, ports, owners = held_by_gpus(tmp_path, model, 2, True)
    shape = ModelShape.from_hf_config(held._config)
    everything = [*held.stacks(), *held.dense(Base(str(model))).values()]
    reason = {
        one.name: one.reason
        for one in rule(
            shape, TrainerConfig(world_size=2, tp=2), RolloutConfig(tp=2, ep=True), None, True
        )
    }
    for rank, port in enumerate(ports):
        mapped, at = held.map(port), RankLayout(tp=(rank, 2), ep=(0, 1))
        for one in everything:
            if not isinstance(one, Stack) and not reason[kind(one)]:
                box = trainer_part(one, shape, at)
                found = mapped.part(one.name, box)
                whole = torch.empty(one.shape)
                held.filler(Base(str(model)))(one.name, whole)
                assert torch.equal(found, whole[window(box.start, box.shape)])
                assert found.untyped_storage().data_ptr() == (
                    mapped[one.name].untyped_storage().data_ptr()
                )
    for owner in owners:
        owner.close()


def test_a_rank_on_another_gpu_than_planned_is_refused_by_name(tmp_path):
    held, ports, owners = held_by_gpus(tmp_path, save_plain(tmp_path / "model"), 2, True)
    shape = ModelShape.from_hf_config(held._config)
    stack = held.stacks()[0]
    box = trainer_part(stack, shape, RankLayout(ep=(0, 3)))
    held.map(ports[0]).part(stack.name, box)
    message = (
        rf"{stack.name}: this rank takes experts 0:1 of 3, and GPU GPU-1, on which it is, has "
        r"experts 2:3 of 3\. .* GPUs in one order, cut them alike .*, or set model.held_once=off"
    )
    with pytest.raises(HeldBaseError, match=message):
        held.map(ports[1]).part(stack.name, box)
    with pytest.raises(HeldBaseError, match=r"GPU-7: no engine .* \(GPUs .*: GPU-0, GPU-1\)"):
        held.map(Files(tmp_path / "memory", "GPU-7"))
    for owner in owners:
        owner.close()


def test_a_second_engine_on_a_gpu_is_refused_and_one_on_another_is_not(tmp_path):
    held, ports, owners = held_by_gpus(tmp_path, save_plain(tmp_path / "model"), 1, False)
    with pytest.raises(HeldBaseError, match="GPU-0: another engine holds the base on this GPU"):
        held.share(ports[0], 0)
    other = held.share(Files(tmp_path / "memory", "GPU-1"), 0)
    held.map(ports[0]).check()
    for owner in (*owners, other):
        owner.close()


def test_a_store_under_another_gpus_name_is_refused(tmp_path):
    held, ports, owners = held_by_gpus(tmp_path, save_plain(tmp_path / "model"), 1, False)
    (tmp_path / "GPU-0").rename(tmp_path / "GPU-1")
    with pytest.raises(HeldBaseError, match="it is on GPU-0 there and on GPU-1 here"):
        held.map(Files(ports[0].directory, "GPU-1"))
    owners[0].close()


def test_a_folder_that_is_gone_is_said(tmp_path):
    model = save_plain(tmp_path / "model")
    held = Held(str(tmp_path / "gone"), str(model), "float32", 1, False, True, True)
    with pytest.raises(HeldBaseError, match="the run that was to hold its base there has ended"):
        held.share(Files(tmp_path), 0)
