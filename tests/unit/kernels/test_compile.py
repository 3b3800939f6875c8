"""Every Triton kernel compiles for an H200 (sm_90), which takes no GPU; the products of bfloat16
run on its tensor cores."""

import importlib

import pytest
import torch

if not torch.version.cuda:
    pytest.skip("this torch has no CUDA, and its Triton no PTX assembler", allow_module_level=True)

triton = pytest.importorskip("triton")

INTS = {
    *("E", "num_tiles", "N", "K", "M", "R", "out_features", "in_features"),
    *("stride_xt", "stride_we", "stride_wk", "stride_wn", "stride_yt"),
    *("stride_ut", "stride_vt", "stride_de", "stride_dm", "stride_dn"),
    *("stride_ae", "stride_ar", "stride_ai", "stride_be", "stride_bo", "stride_br"),
    *("stride_pe", "stride_se"),
    *("T", "num_ids", "first_bit"),
}
POINTERS = {
    "counts": "i64",
    "tiles": "i32",
    "slots": "i32",
    "ranks": "i64",
    "row_in_site": "i32",
    "partial": "fp32",
    "scale_inv": "fp32",
    "packed": "i32",
    "words": "i32",
}
LORA = "grouped_lora"
MATMUL = {"HAS_RANKS": True, "UPCAST": False}
MERGE = {"UPCAST": False, "PRECISION": "tf32x3", "BLOCK_R": 32}
TILE = {"BLOCK_O": 64, "BLOCK_I": 128}
BF16 = {"x": "bf16", "y": "bf16", "u": "bf16", "v": "bf16", "w": "fp32", "d": "fp32"}
FP32 = dict.fromkeys(("x", "y", "u", "v", "w", "d"), "fp32")
FP32_W = dict.fromkeys(("W", "out"), "fp32")
SMALL = {"BLOCK_T": 64, "BLOCK_M": 64, "BLOCK_N": 64}
DEQUANT, FP8 = {"BLOCK_O": 16, "BLOCK_I": 256}, {"BLOCK_O": 32, "BLOCK_I": 128}
ROW = {"TOP_K": 8, "WIDTH": 540, "BITS": 9, "BLOCK": 1024}
CASES = [
    (LORA, "schedule", {}, {"E_POW2": 512, "SIZE": 128, "EMPTY": 1}),
    (LORA, "matmul", BF16, MATMUL | {"ADD": 0, "BLOCK_T": 128, "BLOCK_N": 32, "BLOCK_K": 64}),
    (LORA, "matmul", BF16, MATMUL | {"ADD": 1, "BLOCK_T": 16, "BLOCK_N": 128, "BLOCK_K": 16}),
    (LORA, "matmul", FP32, MATMUL | {"ADD": 1, "BLOCK_T": 64, "BLOCK_N": 64, "BLOCK_K": 32}),
    (LORA, "outer", BF16, SMALL | {"UPCAST": False}),
    (LORA, "outer", FP32, SMALL | {"UPCAST": False}),
    (LORA, "outer_reduce", BF16, {"BLOCK_M": 64, "BLOCK_N": 128}),
    ("merge", "merge_delta", dict.fromkeys(("W", "out"), "bf16"), MERGE | TILE),
    ("merge", "merge_delta", {"W": "bf16", "out": "bf16", "A": "bf16", "B": "bf16"}, MERGE | TILE),
    ("merge", "merge_delta", FP32_W, MERGE | TILE | {"PRECISION": "ieee"}),
    ("merge", "merge_delta_fp8", {"W": "fp8e4nv"}, MERGE),
    ("merge", "merge_delta_int4", {"scales": "bf16"}, MERGE | TILE),
    ("dequant", "int4", {"scales": "bf16", "out": "bf16"}, DEQUANT),
    ("dequant", "int4", {"scales": "bf16", "out": "fp32"}, DEQUANT),
    ("dequant", "fp8", {"weight": "fp8e4nv", "scales": "fp32", "out": "bf16"}, FP8),
    ("dequant", "mxfp4", {"blocks": "u8", "scales": "u8", "out": "bf16"}, DEQUANT),
    ("dequant", "int4_marlin", {"scales": "bf16", "out": "bf16"}, TILE),
    ("dequant", "int4_marlin", {"scales": "bf16", "out": "fp32"}, TILE),
    ("dequant", "mxfp4_marlin", {"scales": "u8", "out": "bf16"}, TILE),
    ("route_codec", "layer_ids", {"ids": "i64", "packed": "u8"}, ROW),
]


@pytest.mark.parametrize(("package", "name", "dtypes", "constants"), CASES)
def test_compiles_for_sm_90(package, name, dtypes, constants):
    module = importlib.import_module(f"lora_moe_rl.kernels.{package}.triton_kernels")
    kernel = getattr(module, name)
    pointers = POINTERS | {"A": "fp32", "B": "fp32"} | dtypes

    def type_of(argument):
        if argument in constants:
            return "constexpr"
        if argument in INTS:
            return "i32"
        return "fp32" if argument == "scale" else "*" + pointers[argument]

    source = triton.compiler.ASTSource(
        kernel,
        {argument: type_of(argument) for argument in kernel.arg_names},
        constexprs={(kernel.arg_names.index(key),): value for key, value in constants.items()},
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 8})
    assert compiled.metadata.shared <= 227 * 1024
    if dtypes is BF16 and name in ("matmul", "outer"):
        assert "wgmma.mma_async" in compiled.asm["ptx"] or "mma.sync" in compiled.asm["ptx"]
