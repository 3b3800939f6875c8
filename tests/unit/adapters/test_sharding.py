"""The table of how adapter tensors are cut and whose gradients are summed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_moe_rl.adapters import sharding
from lora_moe_rl.adapters.sharding import (
    RULES,
    Box,
    RankLayout,
    fused_with,
    grid_of,
    kind_of,
    pipeline_chunks,
    window,
)
from lora_moe_rl.adapters.spec import Site

SITES = [
    Site(0, "q_proj", 8, 16, 2, 1.0),
    Site(0, "o_proj", 16, 8, 2, 1.0),
    Site(0, "kv_a_proj", 8, 12, 2, 1.0),
    Site(0, "shared_expert.up", 8, 16, 2, 1.0),
    Site(0, "mlp.down", 16, 8, 2, 1.0),
    Site(0, "in_proj_qkv", 8, 16, 2, 1.0, blocks=(4, 4, 8)),
    Site(0, "experts.gate", 8, 16, 2, 1.0, num_experts=8),
    Site(0, "experts.down", 16, 8, 2, 1.0, num_experts=8),
    Site(0, "experts.up", 8, 16, 2, 1.0, num_experts=8, shared="A"),
    Site(0, "experts.down", 16, 8, 2, 1.0, num_experts=8, shared="B"),
]


def ranks_of_a_stage(tp: int, dp: int, ep: int, etp: int) -> list[RankLayout]:
    """Every rank of a stage of tp * dp ranks, in Megatron's order: tp fastest; etp fastest."""
    expert_dp = tp * dp // (ep * etp)
    return [
        RankLayout(
            tp=(n % tp, tp),
            dp=(n // tp, dp),
            etp=(n % etp, etp),
            ep=(n // etp % ep, ep),
            expert_dp=(n // (etp * ep), expert_dp),
        )
        for n in range(tp * dp)
    ]


def test_kinds():
    assert [kind_of(site) for site in SITES] == [
        "column", "row", "replicated", "column", "row", "column",
        "experts_column", "experts_row", "shared_column", "shared_row",
    ]  # fmt: skip


@given(
    tp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2, 4]),
    site=st.sampled_from(SITES),
    tensor=st.sampled_from("AB"),
)
def test_exported_parts_are_the_whole_once(tp, dp, ep, etp, site, tensor):
    if tp * dp % (ep * etp):
        return
    shape = site.shape_A if tensor == "A" else site.shape_B
    kind = kind_of(site)
    seen = np.zeros(shape, int)
    for rank in ranks_of_a_stage(tp, dp, ep, etp):
        if rank.exports(kind, tensor):
            for box in rank.boxes(site, tensor):
                seen[window(box.start, box.shape)] += 1
    assert (seen == 1).all()


def test_a_gradient_is_summed_over_every_axis_that_its_tensor_is_not_cut_over():
    for kind, rules in RULES.items():
        for tensor, rule in rules.items():
            cut = {axis for _, axis in rule.split}
            assert sorted([*cut, *rule.reduce]) == sorted(grid_of(kind)), (kind, tensor)


def test_a_reduction_is_left_out_of_another_table():
    entries = sharding.reductions()
    assert len(entries) == 24
    for kind, tensor, axis in entries:
        faulty = RankLayout(table=sharding.without([(kind, tensor, axis)])).table
        left = [a for a in RULES[kind][tensor].reduce if a != axis]
        assert list(faulty[kind][tensor].reduce) == left
        assert faulty != RULES
    assert sharding.reductions() == entries and RankLayout().table is RULES
    with pytest.raises(ValueError, match=r"row\.B is not summed over tp"):
        sharding.without([("row", "B", "tp"), ("row", "B", "tp")])


def test_sites_of_one_mcore_linear_are_trained_as_one():
    assert fused_with("k_proj") == ("q_proj", "k_proj", "v_proj", "query_key_value")
    assert fused_with("experts.up") == ("experts.gate", "experts.up")
    assert {site.module for site in SITES} <= {m for site in SITES for m in fused_with(site.module)}
    for site in SITES:
        kinds = {kind_of(replace(site, module=m)) for m in fused_with(site.module)}
        assert kinds == {kind_of(site)}


def test_rows_of_several_outputs_are_cut_one_by_one():
    """As Megatron-core cuts the base: a rank has queries, then keys, then values of its heads."""
    (site,) = (site for site in SITES if site.blocks)
    boxes = RankLayout(tp=(1, 2)).boxes(site, "B")
    assert [(box.start, box.shape) for box in boxes] == [
        ((2, 0), (2, 2)),
        ((6, 0), (2, 2)),
        ((12, 0), (4, 2)),
    ]
    assert RankLayout(tp=(1, 2)).boxes(site, "A") == [Box((0, 0), (2, 8))]


def test_sizes_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="tp=3 does not divide dimension 0"):
        RankLayout(tp=(0, 3)).local_range("column", "B", (16, 2))


@pytest.mark.parametrize(
    ("layers", "chunks", "expected"),
    [
        (48, 4, [12, 12, 12, 12]),
        (61, 8, [7, 8, 8, 8, 8, 8, 7, 7]),
        (5, 2, [2, 3]),
        (7, 4, [1, 2, 2, 2]),
    ],
)
def test_layers_that_pipeline_stages_do_not_divide(layers, chunks, expected):
    assert pipeline_chunks(layers, chunks) == expected
