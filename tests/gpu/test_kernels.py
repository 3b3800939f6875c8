"""The Triton kernels on a GPU at real sizes, against their float64 references. `make test-gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import Problem, check, differences, poison_empty

from lora_moe_rl.bench.kernel_contenders import loads
from lora_moe_rl.kernels import merge
from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.kernels.grouped_lora import grouped_lora
from lora_moe_rl.kernels.grouped_lora.naive import grouped_lora as naive_lora
from lora_moe_rl.kernels.merge import formats, naive
from lora_moe_rl.kernels.route_codec import RowLayout, pack_array
from lora_moe_rl.kernels.route_codec.op import layer_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ODD = [7, 0, 33, 1, 0, 700]
SMALL = {
    "rank 1": {"site_ranks": (1,)},
    "ranks 3 and 17": {"in_features": 70, "outs": (33, 130), "site_ranks": (3, 17)},
    "rank 128": {"site_ranks": (128,)},
    "shared A": {"site_ranks": (3,), "shared": "A"},
    "shared B": {"site_ranks": (17,), "shared": "B"},
    "into": {"into": True},
    "recompute": {"recompute": True},
    "mixed ranks": {"site_ranks": (8,), "ranks": [8, 1, 3, 5, 0, 8]},
}
REAL = {
    "qwen3-30b gate and up": (128, 2048, (768, 768), (32, 32)),
    "qwen3-30b down": (128, 768, (2048,), (8,)),
    "deepseek-v3 down, EP 32": (8, 2048, (7168,), (32,)),
    "kimi-k2 gate and up, EP 32": (12, 7168, (2048, 2048), (16, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", SMALL)
def test_odd_sizes_with_poisoned_buffers(monkeypatch, case, dtype):
    problem = Problem(ODD, device="cuda", dtype=dtype, **SMALL[case])
    expected = problem.reference()
    poison_empty(monkeypatch)
    assert differences(problem.run("triton"), expected) == {}


@pytest.mark.parametrize("load", ["balanced", "zipf"])
@pytest.mark.parametrize("shape", REAL)
def test_real_sizes(shape, load):
    experts, in_features, outs, ranks = REAL[shape]
    counts = loads(experts, 8192, load)
    problem = Problem(counts, in_features, outs, ranks, dtype=torch.bfloat16, device="cuda")
    first = check(problem, "triton")
    second = problem.run("triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_torch_path_on_a_gpu():
    check(Problem(ODD, 70, (33,), (3,), dtype=torch.bfloat16, device="cuda"), "torch")
    check(Problem(ODD, 70, (33,), (3,), device="cuda"), "torch")


@pytest.mark.parametrize("counts", [[20, 0, 3], [20, 900, 40000]], ids=["less", "more"])
def test_counts_that_do_not_sum_to_the_tokens(monkeypatch, counts):
    problem = Problem([20, 0, 21], 64, (32,), (8,), device="cuda")
    x, A, B = problem.leaves()
    meant = [20, 21, 0] if sum(counts) > 41 else counts
    expected = naive_lora(x[: sum(meant)].double(), A.double(), [B.double()], meant, [0.5])
    poison_empty(monkeypatch)
    y = grouped_lora(x, A, [B], torch.tensor(counts, device="cuda"), [0.5], "triton")
    assert (y[: sum(meant)] - expected).abs().max() < 1e-4
    assert not y[sum(meant) :].any()
    dx, dA, dB = torch.autograd.grad(y, [x, A, B], problem.dy)
    assert dA.isfinite().all() and dB.isfinite().all() and not dx[sum(meant) :].any()


def test_nothing_waits_for_the_device():
    problem = Problem(ODD, 64, (32, 32), (8, 8), ranks=[8] * 6, dtype=torch.bfloat16, device="cuda")
    x, A, *Bs = problem.leaves()
    counts = torch.tensor(ODD, device="cuda")
    ranks = torch.tensor(problem.ranks, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = grouped_lora(x, A, Bs, counts, problem.scales, "triton", ranks=ranks)
        torch.autograd.grad(y, [x, A, *Bs], problem.dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_the_host_knows_comes_without_a_wait():
    torch.cuda.set_sync_debug_mode("error")
    try:
        counts = on_device(ODD, torch.device("cuda"))
        mask = on_device(torch.tensor([[True, True], [False, True]])[:, 0], torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts.tolist() == ODD and mask.tolist() == [True, False]


def test_under_torch_compile():
    problem = Problem(ODD, 64, (32,), (8,), dtype=torch.bfloat16, device="cuda")
    x, A, *Bs = problem.leaves()
    counts = torch.tensor(ODD, device="cuda")

    def call(x, A, *Bs):
        return grouped_lora(2 * x, A, Bs, counts, problem.scales).relu()

    assert torch.equal(torch.compile(call, fullgraph=True)(x, A, *Bs), call(x, A, *Bs))


@pytest.mark.parametrize("rank", [3, 32, 128])
def test_merges(rank):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    W, A, B = draw(4, 700, 2048), draw(4, rank, 2048), draw(4, 700, rank)
    exact = naive.merged(W.bfloat16(), A, B, 0.3)
    got = merge.merge_delta_(W.bfloat16(), A, B, 0.3, kernel="triton")
    assert ((got.double() - exact).abs() <= 2.0**-8 * exact.abs() * 1.001 + 1e-4).all()

    fp8 = formats.quantise_fp8(W)
    expected, expected_scale = naive.merge_delta_fp8(*fp8, A, B, 0.3)
    merge.merge_delta_fp8_(*fp8, A, B, 0.3, kernel="triton")
    torch.testing.assert_close(fp8[1], expected_scale, rtol=1e-4, atol=0)
    assert (fp8[0].float() != expected.float()).float().mean() < 0.01

    int4 = formats.quantise_int4(W, torch.bfloat16)
    expected, expected_scale = naive.merge_delta_int4(*int4, A, B, 0.3)
    merge.merge_delta_int4_(*int4, A, B, 0.3, kernel="triton")
    assert (int4[1] != expected_scale).float().mean() < 0.01
    assert (int4[0] != expected).float().mean() < 0.05


@pytest.mark.parametrize("layout", [RowLayout(48, 8, 128), RowLayout(60, 8, 384)], ids=str)
def test_route_codec(layout):
    shape = (3000, layout.num_layers, layout.top_k)
    ids = np.random.default_rng(0).integers(0, layout.num_experts, shape)
    packed = torch.from_numpy(pack_array(ids, layout)).cuda()
    for layer in range(layout.num_layers):
        got = layer_ids(packed, layer, layout, "triton")
        assert np.array_equal(got.cpu().numpy(), ids[:, layer])
