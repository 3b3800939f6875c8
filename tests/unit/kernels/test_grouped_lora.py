"""Grouped LoRA against its float64 reference, forward and every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import INTERPRETER, KERNEL, Problem, check, differences, poison_empty

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.kernels.grouped_linear import grouped_linear
from lora_moe_rl.kernels.grouped_lora import grouped_lora, naive, torch_path

ODD = [7, 0, 33, 1, 0]
plain_only = pytest.mark.skipif(INTERPRETER, reason="of the plain torch path")
CASES = {
    "rank 1": Problem([5, 2], site_ranks=(1,)),
    "rank 3, odd sizes": Problem(ODD, 37, (19,), (3,)),
    "gate and up, ranks 3 and 17": Problem(ODD, 70, (33, 130), (3, 17)),
    "aligned": Problem(ODD, 64, (32, 32), (8, 8)),
    "rank 128": Problem([3, 20], 32, (24,), (128,)),
    "shared A": Problem(ODD, 37, (19, 19), (3, 3), shared="A"),
    "shared B": Problem(ODD, 37, (19,), (17,), shared="B"),
    "into": Problem(ODD, 37, (19, 9), (3, 4), into=True),
    "recompute": Problem(ODD, 37, (19, 9), (3, 4), recompute=True),
    "mixed ranks": Problem(ODD, 37, (19, 9), (8, 5), ranks=[8, 1, 3, 5, 0]),
    "mixed ranks, shared A": Problem(ODD, 37, (19,), (8,), ranks=[8, 1, 3, 5, 0], shared="A"),
    "no tokens": Problem([0, 0, 0], 16, (8,), (4,)),
    "one expert": Problem([65], 16, (8,), (4,)),
    "bfloat16": Problem(ODD, 70, (33, 24), (3, 17), dtype=torch.bfloat16),
    "bfloat16, aligned, into": Problem(ODD, 64, (32,), (16,), dtype=torch.bfloat16, into=True),
    "bfloat16 weights": Problem(
        ODD, 37, (19,), (3,), dtype=torch.bfloat16, weight_dtype=torch.bfloat16
    ),
    "float16": Problem(ODD, 37, (19,), (3,), dtype=torch.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_with_poisoned_buffers(monkeypatch, name):
    problem = CASES[name]
    expected = problem.reference()
    poison_empty(monkeypatch)
    assert differences(problem.run(), expected) == {}


def test_equal_inputs_give_equal_bits():
    problem = Problem(ODD, 70, (33, 24), (3, 17))
    first, second = problem.run(), problem.run()
    assert all(torch.equal(first[name], second[name]) for name in first)


@settings(max_examples=5 if INTERPRETER else 40, deadline=None, derandomize=True)
@given(counts=st.lists(st.sampled_from([0, 1, 2, 7, 16, 33]), min_size=1, max_size=5))
def test_any_counts(counts):
    check(Problem(counts, 17, (9,), (3,)))


def test_strided_operands():
    """Views of wider buffers, as of a fused gradient."""
    problem = Problem([4, 9], 24, (16,), (4,))
    expected = problem.reference()
    problem.x = torch.cat([problem.x, problem.x], dim=1)[:, :24]
    problem.dy = torch.cat([problem.dy, problem.dy], dim=1)[:, :16]
    assert differences(problem.run(), expected) == {}


@pytest.mark.parametrize("which", ["counts", "ranks"])
def test_counts_and_ranks_of_a_wider_table(which):
    problem = Problem(ODD, 37, (19, 9), (8, 5), ranks=[8, 1, 3, 5, 0])
    x, A, *Bs = problem.leaves()
    columns = {name: torch.tensor(getattr(problem, name)) for name in ("counts", "ranks")}
    columns[which] = torch.stack([columns[which], torch.ones(5, dtype=torch.int64)], 1)[:, 0]
    y = grouped_lora(x, A, Bs, columns["counts"], problem.scales, KERNEL, ranks=columns["ranks"])
    got = Problem._named(y, torch.autograd.grad(y, [x, A, *Bs], problem.dy))
    assert differences(got, problem.reference()) == {}


def test_into_rows_of_a_wider_buffer():
    problem = Problem(ODD, 37, (19, 9), (3, 4), into=True)
    expected = problem.reference()["y"]
    wide = torch.cat([problem.base, problem.base], dim=1)
    y = grouped_lora(
        problem.x, problem.A, problem.Bs, problem.counts, problem.scales, KERNEL, wide[:, 28:]
    )
    assert (y - expected).abs().max() < 1e-4
    assert torch.equal(wide[:, :28], problem.base)


@pytest.mark.skipif(not INTERPRETER, reason="of the Triton path")
@pytest.mark.parametrize("sums_to", ["less", "more"])
@pytest.mark.parametrize("shared", [None, "A", "B"])
def test_counts_of_a_device_that_do_not_sum_to_the_tokens(monkeypatch, shared, sums_to):
    """Tokens of no expert get zeros, and no expert has tokens beyond the last."""
    from lora_moe_rl.kernels.grouped_lora import triton_path

    monkeypatch.setattr(triton_path, "_CHUNK", 16)
    monkeypatch.setattr(triton_path, "_CHUNK_FACTOR", 0)
    given, meant = {
        "less": ([20, 0, 3], [20, 0, 3]),
        "more": ([20, 900, 40000], [20, 21, 0]),
    }[sums_to]
    T = 41
    problem = Problem([20, 0, 21], 24, (18,), (5,), shared=shared)
    problem.counts = meant
    here = sum(meant)
    x, A, B = problem.leaves(torch.float64)
    part = naive.grouped_lora(x[:here], A, [B], meant, problem.scales)
    y = torch.cat([part, part.new_zeros(T - here, 18)])
    expected = Problem._named(y, torch.autograd.grad(y, [x, A, B], problem.dy.double()))

    poison_empty(monkeypatch)
    counts, (x, A, B) = torch.tensor(given), problem.leaves()
    with torch.no_grad():
        y = torch.empty(T, 18)
        xa = triton_path.forward(y, False, x, A, [B], counts, [0.5], None)
        grads = triton_path.backward(problem.dy, x, A, [B], counts, [0.5], None, xa, [True] * 3)
    assert differences(Problem._named(y, grads), expected) == {}


@pytest.mark.skipif(not INTERPRETER, reason="of the Triton path")
@pytest.mark.parametrize("shared", [None, "A", "B"])
def test_an_expert_whose_tokens_are_summed_in_chunks(monkeypatch, shared):
    from lora_moe_rl.kernels.grouped_lora import triton_path

    monkeypatch.setattr(triton_path, "_CHUNK", 16)
    monkeypatch.setattr(triton_path, "_CHUNK_FACTOR", 0)
    problem = Problem([16, 50, 0, 17, 1], 37, (19,), (3,), shared=shared)
    expected = problem.reference()
    poison_empty(monkeypatch)
    assert differences(problem.run(), expected) == {}


def _drop_last_tile(launches):
    """The tiles lose their last tokens."""
    made = launches._schedule

    def schedule(counts, *args, **kwargs):
        tiles, slots = made(counts, *args, **kwargs)
        last = (tiles[:, 0] >= 0).nonzero()[-1]
        tiles[last, 2] = tiles[last, 1]
        return tiles, slots

    return "_schedule", schedule


def _wrong_expert(launches):
    """Every tile takes the weights of the next expert."""
    made = launches._schedule

    def schedule(counts, *args, **kwargs):
        tiles, slots = made(counts, *args, **kwargs)
        shifted = (tiles[:, 0] + 1) % counts.shape[0]
        tiles[:, 0] = torch.where(tiles[:, 0] >= 0, shifted, tiles[:, 0])
        return tiles, slots

    return "_schedule", schedule


def _no_scale(launches):
    made = launches._matmul
    return "_matmul", lambda x, w, y, tiles, size, scale=1.0, **rest: made(
        x, w, y, tiles, size, **rest
    )


def _no_scale_of_dB(launches):
    made = launches._outer
    return "_outer", lambda u, v, like, chunks, scale=1.0, **rest: made(u, v, like, chunks, **rest)


def _short_k(launches):
    """The last block of K is skipped."""
    made = launches._matmul

    def matmul(x, w, y, *args, **kwargs):
        keep = (x.shape[1] - 1) // 16 * 16
        made(x[:, :keep], w[:, :keep], y, *args, **kwargs)

    return "_matmul", matmul


MUTATIONS = (_drop_last_tile, _wrong_expert, _no_scale, _no_scale_of_dB, _short_k)


@pytest.mark.skipif(not INTERPRETER, reason="of the Triton path")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_kernel_is_noticed(monkeypatch, mutation):
    from lora_moe_rl.kernels.grouped_lora import triton_path

    problem = Problem(ODD, 37, (19, 20), (17, 17))
    expected = problem.reference()
    monkeypatch.setattr(triton_path, *mutation(triton_path))
    assert differences(problem.run(), expected) != {}


@plain_only
@pytest.mark.parametrize(
    "broken",
    [
        lambda x, w, counts: right(x, w, counts.roll(1)),
        lambda x, w, counts: right(x, w.roll(1, 0), counts),
        lambda x, w, counts: right(x, w, counts) * (torch.arange(x.shape[0]) < 32)[:, None],
    ],
    ids=["wrong offsets", "wrong expert", "last tokens skipped"],
)
def test_a_broken_torch_path_is_noticed(monkeypatch, broken):
    problem = Problem(ODD, 37, (19, 20), (17, 17))
    expected = problem.reference()
    monkeypatch.setattr(torch_path, "grouped", broken)
    assert differences(problem.run(), expected) != {}


right = torch_path.grouped


@plain_only
@pytest.mark.parametrize("shared", [None, "A", "B"])
def test_gradcheck(shared):
    problem = Problem([2, 0, 1], 3, (2, 3), (1, 2), shared=shared, ranks=[1, 2, 2])
    leaves = problem.leaves(torch.float64)

    def call(x, A, *Bs):
        return grouped_lora(x, A, Bs, problem.counts, problem.scales, ranks=problem.ranks)

    assert torch.autograd.gradcheck(call, leaves)


@plain_only
def test_gradients_that_nobody_wants_are_not_computed(monkeypatch):
    problem = Problem([4, 9])
    monkeypatch.setattr(torch_path, "outer", None)
    x = problem.x.requires_grad_()
    grouped_lora(x, problem.A, problem.Bs, problem.counts, problem.scales).sum().backward()
    assert x.grad.abs().sum() > 0


@plain_only
def test_torchs_grouped_matmul_gives_the_bits_of_a_loop(monkeypatch):
    problem = Problem(ODD, 64, (32, 32), (8, 8))
    grouped = problem.run()
    monkeypatch.setattr(torch_path, "_aligned", lambda _: False)
    loop = problem.run()
    assert all(torch.equal(grouped[name], loop[name]) for name in loop)


@plain_only
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_meta_tensors_have_the_shapes(kernel):
    problem = Problem([3, 5], 16, (8, 6), (4, 2))
    x, A, *Bs = (t.detach().to("meta").requires_grad_() for t in problem.leaves())
    y = grouped_lora(x, A, Bs, problem.counts, problem.scales, kernel)
    assert y.shape == (8, 14) and y.device.type == "meta"
    y.sum().backward()
    assert A.grad.shape == A.shape and x.grad.shape == x.shape


@plain_only
def test_under_torch_compile():
    problem = Problem(ODD, 16, (8, 8), (4, 4))
    x, A, *Bs = problem.leaves()
    counts = torch.tensor(problem.counts)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(x, A, *Bs):
        return grouped_lora(2 * x, A, Bs, counts, problem.scales).relu()

    y = call(x, A, *Bs)
    eager = grouped_lora(2 * x, A, Bs, counts, problem.scales).relu()
    assert torch.equal(y, eager)
    got = torch.autograd.grad(y, [x, A, *Bs], problem.dy)
    expected = torch.autograd.grad(eager, [x, A, *Bs], problem.dy)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@plain_only
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": [4, 8]}, "counts sum to 12, and x has 13 tokens"),
        ({"counts": torch.tensor([4, 10])}, "counts sum to 14, and x has 13 tokens"),
        ({"into": torch.zeros(24, 13).t()}, r"into has the strides \(1, 13\)"),
        ({"into": torch.zeros(13, 48)[:, ::2]}, r"into has the strides \(48, 2\)"),
        ({"into": torch.zeros(1, 24).expand(13, 24)}, r"into has the strides \(0, 1\)"),
        ({"scales": (1.0, 2.0)}, "1 sites have 2 scales"),
        ({"A": torch.zeros(3, 4, 40)}, r"A has the shape \(3, 4, 40\); it is \(2, 4, 40\), or"),
        ({"A": torch.zeros(2, 4, 40).half()}, r"A is torch.float16; it is float32, or"),
        ({"into": torch.zeros(13, 23)}, r"the result is torch.float32 \(13, 24\)"),
        ({"kernel": "cuda"}, "kernel='cuda' is none of auto, triton, torch"),
        ({"kernel": "triton"}, "cannot run on tensors on the device cpu: use kernel='torch'"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    problem = Problem([4, 9])
    arguments = {
        "x": problem.x,
        "A": problem.A,
        "Bs": problem.Bs,
        "counts": problem.counts,
        "scales": problem.scales,
    }
    with pytest.raises((ValueError, ConfigError), match=message):
        grouped_lora(**(arguments | change))


@plain_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_kernel_is_asked_for_the_linear_of_no_tokens(monkeypatch, dtype):
    """Of a rank whose experts no token has chosen."""
    monkeypatch.setattr(torch, "_grouped_mm", None)
    x = torch.zeros(0, 64, dtype=dtype, requires_grad=True)
    weight = torch.zeros(3, 32, 64, dtype=dtype, requires_grad=True)
    y = grouped_linear(x, weight, [0, 0, 0])
    assert y.shape == (0, 32)
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.shape == x.shape and dw.shape == weight.shape and not dw.any()
