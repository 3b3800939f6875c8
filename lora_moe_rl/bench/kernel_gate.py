"""The correctness gate of `bench kernels`: every kernel, as it is about to be measured, against its
float64 reference."""

from __future__ import annotations

import numpy as np
import torch

from lora_moe_rl.bench.kernel_contenders import SHAPES, Layer, Shape
from lora_moe_rl.kernels import merge
from lora_moe_rl.kernels.grouped_lora import grouped_lora, naive
from lora_moe_rl.kernels.merge import formats
from lora_moe_rl.kernels.merge import naive as naive_merge
from lora_moe_rl.kernels.route_codec import RowLayout
from lora_moe_rl.kernels.route_codec import naive as naive_codec
from lora_moe_rl.kernels.route_codec.op import layer_ids

# Of the largest element of the reference.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
TOKENS, RANKS = 24, (8, 32, 128)
CPU_SHAPE = Shape("gate", 5, 160, 96, top_k=4)


def gate(device: str, dtype: torch.dtype) -> list[str]:
    """What is wrong, one line each; empty when all is right."""
    shapes = list(SHAPES.values()) if device == "cuda" else [CPU_SHAPE]
    wrong = []
    for shape in shapes:
        for rank in RANKS:
            for load in ("balanced", "zipf"):
                layer = Layer(shape, TOKENS, rank, load, device, dtype)
                label = f"adapters, {shape.name}, rank {rank}, {load}"
                wrong += [f"{label}: {line}" for line in _check_layer(layer)]
    return wrong + _check_merges(device) + _check_codec(device)


def _check_layer(layer: Layer) -> list[str]:
    lines = []
    for part in layer.parts:
        scales = [layer.scale] * len(part.Bs)
        got = _with_gradients(
            lambda x, A, *Bs, s=scales: grouped_lora(x, A, Bs, layer.counts_tensor, s),
            part.leaves,
            part.dy,
        )
        again = _with_gradients(
            lambda x, A, *Bs, s=scales: grouped_lora(x, A, Bs, layer.counts_tensor, s),
            part.leaves,
            part.dy,
        )
        exact = [t.detach().to(layer.dtype).double().requires_grad_() for t in part.leaves]
        expected = _with_gradients(
            lambda x, A, *Bs, s=scales: naive.grouped_lora(x, A, Bs, layer.counts, s),
            exact,
            part.dy.double(),
        )
        names = ("y", "dx", "dA", *(f"dB{i}" for i in range(len(part.Bs))))
        for name, ours, twice, reference in zip(names, got, again, expected, strict=True):
            error = (ours.double() - reference).abs().max().item()
            largest = reference.abs().max().item()
            if not error <= TOLERANCE[layer.dtype] * largest:
                lines.append(f"{name} is off by {error:.2e}, its largest element is {largest:.2e}")
            if not torch.equal(ours, twice):
                lines.append(f"{name} has other bits in a second run")
    return lines


def _with_gradients(call, leaves, dy):
    y = call(*leaves)
    return [y, *torch.autograd.grad(y, leaves, dy)]


def _check_merges(device: str) -> list[str]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    W, A, B = draw(3, 200, 288), draw(3, 17, 288), draw(3, 200, 17)
    lines = []
    exact = naive_merge.merged(W.bfloat16(), A, B, 0.5)
    got = merge.merge_delta_(W.bfloat16(), A, B, 0.5)
    lines += _off("bfloat16", got.double(), exact, 2.0**-8 * exact.abs() + 1e-5)

    fp8 = formats.quantise_fp8(W)
    exact = naive_merge.merged(formats.dequantise_fp8(*fp8, torch.float64), A, B, 0.5)
    merge.merge_delta_fp8_(*fp8, A, B, 0.5)
    smallest = formats._spread_blocks(fp8[1], W.shape) * 2.0**-9  # half a subnormal step
    got = formats.dequantise_fp8(*fp8, torch.float64)
    lines += _off("fp8", got, exact, 2.0**-4 * exact.abs() * 1.001 + smallest)

    int4 = formats.quantise_int4(W, torch.bfloat16)
    exact = naive_merge.merged(formats.dequantise_int4(*int4, torch.float64), A, B, 0.5)
    merge.merge_delta_int4_(*int4, A, B, 0.5)
    step = int4[1].double().repeat_interleave(formats.INT4_GROUP, dim=-1)
    got = formats.dequantise_int4(*int4, torch.float64)
    return lines + _off("int4", got, exact, 0.55 * step)


def _off(name, got, exact, allowed) -> list[str]:
    error = (got - exact).abs()
    if (error <= allowed).all():
        return []
    return [f"merge, {name}: off by {error.max().item():.2e}"]


def _check_codec(device: str) -> list[str]:
    lines = []
    for layout in (RowLayout(5, 3, 384), RowLayout(3, 8, 128)):
        shape = (7, layout.num_layers, layout.top_k)
        ids = np.random.default_rng(0).integers(0, layout.num_experts, shape)
        packed = torch.from_numpy(naive_codec.pack(ids, layout)).to(device)
        for layer in range(layout.num_layers):
            if not np.array_equal(layer_ids(packed, layer, layout).cpu().numpy(), ids[:, layer]):
                lines.append(
                    f"codec, {layout}: unpacks other ids of layer {layer} than were packed"
                )
    return lines
