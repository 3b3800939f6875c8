"""Launches of every Triton kernel at the sizes of published models, as far as that goes without a
GPU: what a launch is given is compiled for sm_90, and its grid and shared memory are what that can
have. Tensors are on the device meta, which holds no memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

if not torch.version.cuda:
    pytest.skip("this torch has no CUDA, and its Triton no PTX assembler", allow_module_level=True)

triton = pytest.importorskip("triton")

from lora_moe_rl.kernels import merge  # noqa: E402
from lora_moe_rl.kernels.dequant import Packed, dequantise  # noqa: E402
from lora_moe_rl.kernels.dequant.formats import DATA_DTYPES, packed_shapes  # noqa: E402
from lora_moe_rl.kernels.grouped_lora import triton_path  # noqa: E402
from lora_moe_rl.kernels.route_codec import RowLayout  # noqa: E402
from lora_moe_rl.kernels.route_codec import triton_path as codec  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
SHARED, MOST_X, MOST_YZ = 227 * 1024, 2**31 - 1, 65535  # of sm_90, in bytes and programs
# (experts, width in, widths out): one rank's gate and up, or down.
LINEARS = {
    "qwen3-30b": (128, 2048, (768, 768)),
    "qwen3-30b down, EP 8": (16, 768, (2048,)),
    "deepseek-v3": (256, 7168, (2048, 2048)),
    "kimi-k2 down, EP 32": (12, 2048, (7168,)),
    "mixtral": (8, 4096, (14336, 14336)),
}


@dataclass
class Launch:
    name: str
    grid: tuple[int, ...]
    shared: int


@pytest.fixture
def launches(monkeypatch):
    """The launches of a test, each of them compiled."""
    found: list[Launch] = []

    class Driver:
        def get_current_target(self):
            return triton.backends.compiler.GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return "sm_90"

        def get_current_stream(self, device):
            return 0

    stock = triton.runtime.JITFunction.run

    def compiled(self, *args, grid, warmup, **kwargs):
        kernel = stock(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(Launch(self.fn.__name__, grid, kernel.metadata.shared))

    monkeypatch.setattr(triton.runtime.JITFunction, "run", compiled)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    return found


def check(launches: list[Launch], *names: str) -> None:
    assert {one.name for one in launches} == set(names)
    for one in launches:
        x, y, z = (*one.grid, 1, 1)[:3]
        assert 0 < x <= MOST_X and 0 < y <= MOST_YZ and 0 < z <= MOST_YZ, one
        assert one.shared <= SHARED, one


def meta(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 16, 128])
@pytest.mark.parametrize("tokens", [40, 8192, 524288])
@pytest.mark.parametrize(
    "linear", ["qwen3-30b", pytest.param("deepseek-v3", marks=pytest.mark.whole), "mixtral"]
)
def test_adapters_of_experts(launches, linear, tokens, rank):
    experts, width, outs = LINEARS[linear]
    for dtype in (BF16, FP32) if tokens == 8192 else (BF16,):
        x, y = meta(tokens, width, dtype=dtype), meta(tokens, sum(outs), dtype=dtype)
        counts = meta(experts, dtype=torch.int64)
        A = meta(experts, rank * len(outs), width)
        Bs = [meta(experts, out, rank) for out in outs]
        ranks = meta(experts, dtype=torch.int32) if rank == 16 else None
        scales = [2.0] * len(outs)
        xa = triton_path.forward(y, True, x, A, Bs, counts, scales, ranks)
        triton_path.backward(y, x, A, Bs, counts, scales, ranks, xa, (True, True, True))
    several = {"outer_reduce"} if tokens > 512 else set()
    check(launches, "schedule", "matmul", "outer", *several)


@pytest.mark.seconds
@pytest.mark.parametrize("shared", ["A", "B"])
def test_adapters_that_experts_share(launches, shared):
    experts, width, (out, _), rank = 16, 2048, (768, 768), 16
    x, y = meta(4096, width, dtype=BF16), meta(4096, out, dtype=BF16)
    A = meta(rank, width) if shared == "A" else meta(experts, rank, width)
    B = meta(out, rank) if shared == "B" else meta(experts, out, rank)
    counts = meta(experts, dtype=torch.int64)
    xa = triton_path.forward(y, False, x, A, [B], counts, [0.5], None)
    triton_path.backward(y, x, A, [B], counts, [0.5], None, xa, (True, True, True))
    check(launches, "schedule", "matmul", "outer", "outer_reduce")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 16, 128])
@pytest.mark.parametrize(
    "linear", ["qwen3-30b", pytest.param("kimi-k2 down, EP 32", marks=pytest.mark.whole)]
)
def test_merges(launches, linear, rank):
    experts, width, outs = LINEARS[linear]
    out = sum(outs)
    A, B = meta(experts, rank, width), meta(experts, out, rank)
    for dtype in (BF16, FP32):
        merge.merge_delta_(meta(experts, out, width, dtype=dtype), A, B, 2.0, kernel="triton")
    W = meta(experts, out, width, dtype=BF16)
    merge.merge_delta_(W, A.bfloat16(), B.bfloat16(), 2.0, kernel="triton")
    fp8 = meta(experts, out, width, dtype=torch.float8_e4m3fn)
    of_blocks = meta(experts, -(-out // 128), -(-width // 128))
    merge.merge_delta_fp8_(fp8, of_blocks, A, B, 2.0, kernel="triton")
    words = meta(experts, out, width // 8, dtype=torch.int32)
    of_groups = meta(experts, out, width // 32, dtype=BF16)
    merge.merge_delta_int4_(words, of_groups, A, B, 2.0, kernel="triton")
    check(launches, "merge_delta", "merge_delta_fp8", "merge_delta_int4")


@pytest.mark.seconds
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_dequantised_weights(launches, dtype):
    of_scales = {"int4": BF16, "int4_marlin": BF16, "fp8": FP32}
    for experts, width, outs in [(1, 7168, (2112,)), *LINEARS.values()]:
        shape = experts, sum(outs), width
        for form, of_data in DATA_DTYPES.items():
            data, scales = packed_shapes(form, shape)
            scales = meta(*scales, dtype=of_scales.get(form, torch.uint8))
            packed = Packed(form, meta(*data, dtype=of_data), scales)
            assert dequantise(packed, dtype, "triton").shape == shape
    check(launches, *DATA_DTYPES)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "layout", [RowLayout(48, 8, 128), RowLayout(58, 8, 256), RowLayout(60, 8, 384)], ids=str
)
def test_routes(launches, layout):
    for tokens in (1, 1 << 18):
        packed = meta(tokens, layout.row_bytes, dtype=torch.uint8)
        ids = codec.layer_ids(packed, layout.num_layers - 1, layout)
        assert ids.shape == (tokens, layout.top_k)
    check(launches, "layer_ids")


@pytest.mark.seconds
def test_a_grid_that_no_gpu_has_is_found(launches):
    """Of more experts than a grid has places for."""
    experts = 2**16
    merge.merge_delta_(
        meta(experts, 32, 32, dtype=BF16), meta(experts, 8, 32), meta(experts, 32, 8), 1.0,
        kernel="triton",
    )  # fmt: skip
    with pytest.raises(AssertionError):
        check(launches, "merge_delta")
