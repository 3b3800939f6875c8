"""What `bench kernels` measures beside our kernels: one MoE layer's expert adapters, forward and
backward, as others compute them.

A contender is made for a `Layer` and returns a function that does one forward and one backward of
both linears. Raises Unavailable, with the reason, where it does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_moe_rl.kernels.grouped_lora import grouped_lora, naive

Step = Callable[[], object]


class Unavailable(Exception):
    """A contender that does not run here, and why."""


@dataclass(frozen=True)
class Shape:
    """One rank's experts of one layer; `scaled`: by what the sides are divided."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int = 8
    scaled: int = 1


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b", 128, 2048, 768),
        Shape("deepseek-v3", 8, 7168, 2048),  # of 256, EP 32
        Shape("kimi-k2", 12, 7168, 2048),  # of 384, EP 32
    )
}
CPU_SCALE = 8


def on_cpu(shape: Shape) -> Shape:
    """Sides divided by 8, and at most 16 experts."""
    return Shape(
        shape.name,
        min(shape.experts, 16),
        shape.hidden // CPU_SCALE,
        shape.intermediate // CPU_SCALE,
        shape.top_k,
        CPU_SCALE,
    )


@dataclass
class Part:
    """One base linear: x `[T, in]`, W `[E, out, in]`, A `[E, R, in]`, Bs `[E, out_i, r]`, dy."""

    x: Tensor
    W: Tensor
    A: Tensor
    Bs: list[Tensor]
    dy: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.A, *self.Bs]


class Layer:
    """Operands of one layer: tokens times top-k rows, gate and up as one linear, and down."""

    scale = 2.0

    def __init__(self, shape: Shape, tokens: int, rank: int, load: str, device, dtype):
        self.shape, self.rank, self.device, self.dtype = shape, rank, torch.device(device), dtype
        self.counts = loads(shape.experts, tokens * shape.top_k, load)
        self.counts_tensor = torch.tensor(self.counts, device=device)
        self.offsets = self.counts_tensor.cumsum(0).to(torch.int32)
        hidden, inner = shape.hidden, shape.intermediate
        self.generator = torch.Generator(device).manual_seed(0)
        self.parts = [self._part(hidden, (inner, inner)), self._part(inner, (hidden,))]

    def _part(self, in_features: int, outs: tuple[int, ...]) -> Part:
        E, T, r = self.shape.experts, sum(self.counts), self.rank

        def draw(*shape, dtype=torch.float32, grad=False):
            value = torch.randn(*shape, generator=self.generator, device=self.device, dtype=dtype)
            return value.div_(shape[-1] ** 0.5).requires_grad_(grad)

        return Part(
            draw(T, in_features, dtype=self.dtype, grad=True),
            draw(E, sum(outs), in_features, dtype=self.dtype),
            draw(E, r * len(outs), in_features, grad=True),
            [draw(E, out, r, grad=True) for out in outs],
            draw(T, sum(outs), dtype=self.dtype),
        )

    def adapter_bytes(self) -> int:
        """What an adapter apart from its base moves at least: x twice (forward, dA), y once, dy
        twice (x A's gradient, dB), dx once; parameters and their gradients once more each."""
        total = 0
        for part in self.parts:
            size = part.x.element_size()
            total += size * (3 * part.x.numel() + 3 * part.dy.numel())
            total += 3 * sum(t.numel() * t.element_size() for t in (part.A, *part.Bs))
        return total

    def adapter_flops(self) -> int:
        """Multiplications and additions, forward and backward."""
        return 6 * sum(
            len(part.x) * (part.A.shape[1] * part.x.shape[1] + self.rank * part.dy.shape[1])
            for part in self.parts
        )


def loads(experts: int, rows: int, load: str) -> list[int]:
    """Rows of each expert: `balanced`, or `zipf` (expert i has a share of 1 / (i + 1))."""
    weights = [1.0 if load == "balanced" else 1 / (i + 1) for i in range(experts)]
    counts = [int(rows * weight / sum(weights)) for weight in weights]
    counts[0] += rows - sum(counts)
    return counts


def ours(layer: Layer, kernel: str = "auto") -> Step:
    def step():
        for part in layer.parts:
            scales = [layer.scale] * len(part.Bs)
            y = grouped_lora(part.x, part.A, part.Bs, layer.counts_tensor, scales, kernel)
            torch.autograd.grad(y, part.leaves, part.dy)

    return step


def python_loop(layer: Layer) -> Step:
    def step():
        for part in layer.parts:
            A, Bs = part.A.to(layer.dtype), [B.to(layer.dtype) for B in part.Bs]
            y = naive.grouped_lora(part.x, A, Bs, layer.counts, [layer.scale] * len(Bs))
            torch.autograd.grad(y, part.leaves, part.dy)

    return step


def composed(layer: Layer) -> Step:
    """`torch._grouped_mm` after `torch._grouped_mm`, with autograd's own backward."""

    def step():
        for part in layer.parts:
            A = part.A.to(layer.dtype)
            xa = torch._grouped_mm(part.x, A.mT, offs=layer.offsets)
            outs = []
            for B, xa_i in zip(part.Bs, xa.chunk(len(part.Bs), dim=1), strict=True):
                scaled = (layer.scale * B).to(layer.dtype)
                outs.append(torch._grouped_mm(xa_i.contiguous(), scaled.mT, offs=layer.offsets))
            torch.autograd.grad(torch.cat(outs, dim=1), part.leaves, part.dy)

    return step


def bridge(layer: Layer) -> Step:
    """Megatron-Bridge's GroupedExpertLinearAdapter; its gate and up share one A."""
    try:
        _load_bridge(layer.device)
        from megatron.bridge.peft.utils import GroupedExpertLinearAdapter
        from megatron.core.model_parallel_config import ModelParallelConfig
    except ImportError as error:
        raise Unavailable(f"Megatron-Bridge cannot be imported: {error}") from error
    config = ModelParallelConfig(use_cpu_initialization=True, params_dtype=layer.dtype)
    adapters = []
    for part in layer.parts:
        adapter = GroupedExpertLinearAdapter(
            part.x.shape[1], part.dy.shape[1], layer.rank,
            num_local_experts=layer.shape.experts, base_linear_name="experts",
            activation="identity", column_init_method="xavier", row_init_method="xavier",
            alpha=layer.scale * layer.rank, model_parallel_config=config,
        )  # fmt: skip
        adapters.append(adapter.to(layer.device))

    def step():
        for part, adapter in zip(layer.parts, adapters, strict=True):
            y = adapter(part.x, layer.counts)
            torch.autograd.grad(y, [part.x, *adapter.parameters()], part.dy)

    return step


def _load_bridge(device: torch.device) -> None:
    import contextlib
    import logging
    import sys
    import warnings

    with contextlib.suppress(ImportError):  # it does not import beside a stub of a package
        import peft  # noqa: F401

    from lora_moe_rl.trainer import bridge as our_bridge
    from lora_moe_rl.trainer import megatron_on_cpu

    if device.type == "cpu" and "megatron.core" not in sys.modules:
        megatron_on_cpu.install()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            our_bridge.load()
    finally:
        logging.disable(before)


def peft(layer: Layer) -> Step:
    """PEFT's `target_parameters`: W plus the delta of all experts, and the base linear with it. The
    base's own time is in it."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise Unavailable(f"PEFT cannot be imported: {error}") from error
    models = []
    for part in layer.parts:
        config = LoraConfig(
            r=layer.rank,
            lora_alpha=layer.scale * layer.rank,
            target_modules=[],
            target_parameters=["experts.weight"],
        )
        model = get_peft_model(_Holder(part.W), config, autocast_adapter_dtype=False)
        models.append(model.to(layer.device))

    def step():
        for part, model in zip(layer.parts, models, strict=True):
            trained = [p for p in model.parameters() if p.requires_grad]
            y = model(part.x, layer.offsets)
            torch.autograd.grad(y, [part.x, *trained], part.dy)

    return step


class _Experts(torch.nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.mT, offs=offsets)


class _Holder(torch.nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.experts = _Experts(weight)

    def forward(self, *args: Tensor) -> Tensor:
        return self.experts(*args)


def base(layer: Layer) -> Step:
    """The yardstick: the frozen linears' forward and the gradient of their input."""

    def step():
        for part in layer.parts:
            y = torch._grouped_mm(part.x, part.W.mT, offs=layer.offsets)
            torch.autograd.grad(y, part.x, part.dy)

    return step


CONTENDERS: dict[str, Callable[[Layer], Step]] = {
    "ours": ours,
    "loop over experts": python_loop,
    "torch._grouped_mm": composed,
    "Megatron-Bridge": bridge,
    "PEFT, with the base": peft,
    "base layer": base,
}
OWN = ("ours", "base layer")  # without which there is nothing to compare
