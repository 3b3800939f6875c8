"""Other ranks and sums of adapters, against SVDs of the whole B A."""

import numpy as np
import pytest
from published_configs import PUBLISHED, shrunk

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.resize import combine, fit, fresh, resize, squared_norms, truncate
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.errors import AdapterError

SHAPE = ModelShape.from_hf_config(shrunk(PUBLISHED["Moonlight-16B-A3B"]))


def make(seed=0, **adapter):
    spec = AdapterSpec.build(SHAPE, AdapterConfig(**adapter))
    generator = np.random.default_rng(seed)
    tensors = {
        name: generator.standard_normal(size, dtype=np.float32)
        for name, size in spec.tensor_shapes.items()
    }
    return spec, tensors


def deltas(spec, tensors):
    return {
        site.name: site.scale * (tensors[f"{site.name}.B"] @ tensors[f"{site.name}.A"])
        for site in spec
    }


def close(one, other, tolerance=1e-5):
    assert one.keys() == other.keys()
    for name in one:
        error = np.linalg.norm(one[name] - other[name]) / np.linalg.norm(one[name])
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("out, width, rank", [(9, 12, 3), (3, 12, 5), (9, 4, 2), (2, 2, 3)])
def test_a_lower_rank_is_the_best_one(out, width, rank):
    generator = np.random.default_rng(0)
    A = generator.standard_normal((4, 6, width))
    B = generator.standard_normal((4, out, 6))
    small_A, small_B, lost = truncate(A, B, rank)
    most = min(rank, out, width)
    assert small_A.shape == (4, most, width) and small_B.shape == (4, out, most)
    S = np.linalg.svd(B @ A, compute_uv=False)
    best = np.sqrt((S[:, rank:] ** 2).sum())
    np.testing.assert_allclose(np.linalg.norm(small_B @ small_A - B @ A), best, atol=2e-5)
    np.testing.assert_allclose(lost, best, atol=1e-9)
    np.testing.assert_allclose(squared_norms(A, B), np.square(B @ A).sum((1, 2)))


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_growing_is_exact_and_can_be_trained(layout):
    spec, tensors = make(rank=3, expert_layout=layout)
    grown, more, changes = resize(spec, tensors, lambda site: 8)
    assert grown.tensor_shapes == {name: array.shape for name, array in more.items()}
    assert all(change.lost == 0 for change in changes) and len(changes) == len(spec.sites)
    for name, delta in deltas(spec, tensors).items():
        np.testing.assert_array_equal(more[f"{name}.A"][..., :3, :], tensors[f"{name}.A"])
        assert not more[f"{name}.B"][..., 3:].any()
        rows = more[f"{name}.A"][..., 3:, :]
        assert (np.abs(rows).max(-1) > 0).all(), "rows of zeros would never be trained"
        np.testing.assert_allclose(deltas(grown, more)[name], delta, atol=1e-5)


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_what_grows_twice_has_rows_of_its_own_each_time(layout):
    spec, tensors = make(rank=2, expert_layout=layout)
    more, begun = tensors, {}
    for site in spec:
        begun |= fresh(site, seed=0)
    for added in (2, 2, 3):
        spec, more, _ = resize(spec, more, lambda site, added=added: site.rank + added)
    for site in spec:
        rows = more[f"{site.name}.A"]
        first = np.concatenate([begun[f"{site.name}.A"], rows], -2)
        wanted = min(11, site.in_features)
        assert (np.linalg.matrix_rank(first.astype(np.float64)) == wanted).all(), site.name


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_shrinking_says_what_is_lost(layout):
    spec, tensors = make(rank=6, expert_rank=4, expert_layout=layout, rslora=True)
    small, fewer, changes = resize(spec, tensors, lambda site: 2 if site.num_experts else 3)
    assert small.tensor_shapes == {name: array.shape for name, array in fewer.items()}
    before, after = deltas(spec, tensors), deltas(small, fewer)
    for change in changes:
        assert 0.05 < change.relative < 1
        lost = np.linalg.norm(before[change.site] - after[change.site])
        np.testing.assert_allclose([change.lost], lost, rtol=1e-4)
        np.testing.assert_allclose([change.norm], np.linalg.norm(before[change.site]), rtol=1e-4)
    back, same, _ = resize(small, fewer, lambda site: 6)
    close(deltas(back, same), after)


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_ranks_above_a_linears_width_can_be_trained_when_others_shrink(layout):
    spec, tensors = make(rank=24, expert_layout=layout)
    small, fewer, _ = resize(spec, tensors, lambda site: 20)
    narrow = [site.name for site in spec if min(site.in_features, site.out_features) < 20]
    assert 0 < len(narrow) < len(spec.sites)
    for name in narrow:
        assert (np.abs(fewer[f"{name}.A"]).max(-1) > 0).all()
    assert small.tensor_shapes == {name: array.shape for name, array in fewer.items()}


def test_fit_folds_scales_and_repeats_what_was_shared():
    spec, tensors = make(rank=4, alpha=8, expert_layout="shared_outer")
    target, _ = make(rank=4, alpha=2, rank_pattern={"layers.1.o_proj": 7})
    fitted, changes = fit(spec, tensors, target)
    assert [(change.site, change.after) for change in changes] == [("layers.1.o_proj", 7)]
    close(deltas(target, fitted), deltas(target, fitted) | deltas(spec, tensors))
    with pytest.raises(AdapterError, match="cannot become expert_layout=shared_outer"):
        fit(target, fitted, spec)


def test_a_sum_is_exact_and_compresses_to_what_it_needs():
    one, two = (
        make(rank=3, alpha=8),
        make(1, rank=2, expert_rank=4, alpha=1, targets=("experts.*",)),
    )
    spec, tensors = combine([(*one, 0.5), (*two, -2.0)])
    expected = {name: 0.5 * delta for name, delta in deltas(*one).items()}
    for name, delta in deltas(*two).items():
        expected[name] = expected[name] - 2.0 * delta
    close(expected, deltas(spec, tensors))
    assert {site.rank for site in spec} == {3, 7}
    shared = make(2, rank=2, expert_layout="shared_outer")
    spec, tensors = combine([(*shared, 1.0), (*shared, 1.0)])
    assert {site.shared for site in spec} == {None, "A", "B"}
    close({n: 2 * d for n, d in deltas(*shared).items()}, deltas(spec, tensors))
    small, fewer, changes = resize(spec, tensors, lambda site: 2)
    assert max(change.relative for change in changes) < 1e-6
    close(deltas(small, fewer), deltas(spec, tensors))
    mixed, tensors = combine([(*shared, 1.0), (*two, 1.0)])
    assert {site.shared for site in mixed} == {None}
