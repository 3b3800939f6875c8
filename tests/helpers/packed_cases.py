"""Random quantised weights."""

from __future__ import annotations

import torch

from lora_moe_rl.kernels.dequant import Form, Packed
from lora_moe_rl.kernels.dequant.formats import packed_shapes


def draw(form: Form, shape: tuple[int, ...], seed: int = 0) -> Packed:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    data, scales = packed_shapes(form, shape)

    def bits(size, dtype):
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, size, generator=generator, dtype=dtype)

    if form == "int4":
        values = torch.rand(scales, generator=generator) * 0.02 + 1e-3
        return Packed(form, bits(data, torch.int32), values.bfloat16())
    if form == "fp8":
        weight = torch.randn(data, generator=generator) * 100
        scale = torch.rand(scales, generator=generator) * 1e-3 + 1e-5
        return Packed(form, weight.to(torch.float8_e4m3fn), scale)
    exponents = torch.randint(100, 140, scales, generator=generator, dtype=torch.uint8)
    return Packed(form, bits(data, torch.uint8), exponents)
