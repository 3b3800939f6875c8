"""Routed experts as vLLM lays them out for its Marlin kernels, by vLLM's own functions: its CPU
build lacks one of them, the repacking in CUDA, for which vLLM's reference in torch stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
from vllm.model_executor.layers.quantization.utils.marlin_utils_test import (
    get_weight_perm,
    marlin_weights,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_cols

from lora_moe_rl.base.held import Held
from lora_moe_rl.base.parts import engine_part
from lora_moe_rl.base.store import Fill
from lora_moe_rl.kernels.dequant import Packed
from lora_moe_rl.kernels.dequant.formats import MARLIN
from lora_moe_rl.models.quantised_weights import read_linear
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.trainer.packed_experts import part_of

PERMUTATION = get_weight_perm(4)


def gptq_marlin_repack(
    b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    """int32 `[K / 8, N]`, eight values along K in each, to `[K / 16, N * 2]`."""
    assert num_bits == 4 and not is_a_8bit and b_q_weight.is_contiguous()
    q = unpack_cols(b_q_weight.T.contiguous(), num_bits, size_n, size_k).T
    return marlin_weights(q, size_k, size_n, num_bits, PERMUTATION)


@contextmanager
def repacking_on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "gptq_marlin_repack", gptq_marlin_repack)
        moe = ops.gptq_marlin_moe_repack

        def each(b_q_weight, *sizes, **others):
            return torch.stack([gptq_marlin_repack(one, *sizes, **others) for one in b_q_weight])

        assert moe.__module__ == ops.__name__
        patch.setattr(ops, "gptq_marlin_moe_repack", each)
        yield


def laid_out(w13: Packed, w2: Packed, dtype: torch.dtype = torch.bfloat16) -> tuple[Packed, Packed]:
    """What vLLM has of experts `[E, 2I, H]` and `[E, H, I]` after its processing."""
    make = {"int4": _int4, "mxfp4": _mxfp4}[w13.form]
    with repacking_on_the_cpu():
        data13, data2, scales13, scales2 = make(w13, w2, dtype)
    form = MARLIN[w13.form]
    if w13.form == "mxfp4":
        scales13, scales2 = (one.view(torch.uint8) for one in (scales13, scales2))
    return Packed(form, data13, scales13), Packed(form, data2, scales2)


def _int4(w13: Packed, w2: Packed, dtype: torch.dtype):
    layer = SimpleNamespace(intermediate_size_per_partition=w2.shape[-1])
    scales = w13.scales.to(dtype), w2.scales.to(dtype)  # parameters of this dtype
    return int_wna16._process_weights_marlin(layer, None, 4, 8, 32, w13.data, w2.data, *scales)[:4]


def _mxfp4(w13: Packed, w2: Packed, dtype: torch.dtype):
    E, rows, hidden = w13.shape
    sizes = {"num_local_experts": E, "hidden_dim": hidden}
    layer = SimpleNamespace(
        w13_weight=w13.data.flatten(-2),
        w2_weight=w2.data.flatten(-2),
        w13_weight_scale=w13.scales,
        w2_weight_scale=w2.scales,
        moe_config=SimpleNamespace(**sizes, intermediate_size_per_partition=rows // 2),
        params_dtype=dtype,
    )
    marlin_utils_fp4.prepare_moe_fp4_layer_for_marlin(layer)
    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
    return tuple(getattr(layer, name).data for name in names)


def engine_rank(held: Held, rank: int) -> Fill:
    """What writes routed experts as rank `rank` of an engine lays them out, for `Held.share`."""
    found = {one.name: one for one in held.stacks()}
    base, dtype = Base(held.model_dir), getattr(torch, held.dtype)

    def write(name: str, out: torch.Tensor) -> None:
        stack = found[name]
        (piece, first, *_), (_, count, *_) = (
            getattr(engine_part(stack, held.tp, held.ep, rank), one) for one in ("start", "shape")
        )
        experts = [_expert(base, held, stack.layer, first + e, piece) for e in range(count)]
        pair = (_stacked([expert[i] for expert in experts]) for i in (0, 1))
        of = laid_out(*pair, dtype)[name.rpartition(".")[2].startswith("w2")]
        out[0].copy_(of.scales if stack.scales else of.data)

    return write


def _expert(base: Base, held: Held, layer: int, expert: int, piece: int) -> tuple[Packed, Packed]:
    """(gate and up, down) of a piece of an expert, as the checkpoint has them."""
    form, pieces = held.form, held.cut.pieces
    assert form is not None
    paths = [base.name(layer, f"experts.{one}", expert) for one in ("gate", "up", "down")]
    gate, up, down = (read_linear(base.weights, path, form) for path in paths)
    both = [part_of(one, 0, piece, pieces) for one in (gate, up)]
    w13 = Packed(form, *(torch.cat([getattr(o, n) for o in both]) for n in ("data", "scales")))
    return w13, part_of(down, 1, piece, pieces)


def _stacked(parts: list[Packed]) -> Packed:
    return Packed(
        parts[0].form, *(torch.stack([getattr(p, n) for p in parts]) for n in ("data", "scales"))
    )
