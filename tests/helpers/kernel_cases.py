"""Problems and comparisons that the kernel tests on the CPU, in Triton's interpreter and on a GPU
share."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from lora_moe_rl.kernels.grouped_lora import grouped_lora, naive

# tests/unit/kernels/test_interpreter.py runs the same tests again with Triton's interpreter on.
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL = "triton" if INTERPRETER else "torch"
DEVICE = "cpu"

# Of the largest element of the float64 reference, which starts from the same rounded inputs. The
# interpreter cuts bfloat16 off where a GPU rounds it.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NAMES = ("y", "dx", "dA")


@dataclass
class Problem:
    """Random operands; B is not zero. `shared`: "A", "B" or None."""

    counts: list[int]
    in_features: int = 40
    outs: tuple[int, ...] = (24,)
    site_ranks: tuple[int, ...] = (4,)
    shared: str | None = None
    ranks: list[int] | None = None
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    device: str = DEVICE
    into: bool = False
    recompute: bool = False
    scales: tuple[float, ...] = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(len(self.counts) * 1000 + sum(self.counts))
        E, T, R = len(self.counts), sum(self.counts), sum(self.site_ranks)

        def draw(*shape, dtype):
            value = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return value.to(dtype).to(self.device)

        def stack(name):
            return () if self.shared == name else (E,)

        self.scales = tuple(0.5 + i for i in range(len(self.outs)))
        self.x = draw(T, self.in_features, dtype=self.dtype)
        self.A = draw(*stack("A"), R, self.in_features, dtype=self.weight_dtype)
        self.Bs = [
            draw(*stack("B"), out, rank, dtype=self.weight_dtype)
            for out, rank in zip(self.outs, self.site_ranks, strict=True)
        ]
        self.base = draw(T, sum(self.outs), dtype=self.dtype) if self.into else None
        self.dy = draw(T, sum(self.outs), dtype=self.dtype)

    def leaves(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """x, A, Bs as leaves that want gradients; in `dtype` the weights are rounded to x's first,
        as a kernel multiplies them."""
        tensors = [self.x, self.A, *self.Bs]
        if dtype is not None:
            tensors = [t.to(self.dtype).to(dtype) for t in tensors]
        return [t.detach().clone().requires_grad_() for t in tensors]

    def reference(self) -> dict[str, torch.Tensor]:
        x, A, *Bs = self.leaves(torch.float64)
        base = None if self.base is None else self.base.double()
        y = naive.grouped_lora(x, A, Bs, self.counts, self.scales, self.ranks, base)
        return self._named(y, torch.autograd.grad(y, [x, A, *Bs], self.dy.double()))

    def run(self, kernel: str = KERNEL) -> dict[str, torch.Tensor]:
        x, A, *Bs = self.leaves()
        counts = torch.tensor(self.counts, device=self.device)
        base = None if self.base is None else self.base.clone()
        ranks = None if self.ranks is None else torch.tensor(self.ranks, device=self.device)
        y = grouped_lora(x, A, Bs, counts, self.scales, kernel, base, self.recompute, ranks)
        if base is not None:
            assert y.data_ptr() == base.data_ptr()
        return self._named(y, torch.autograd.grad(y, [x, A, *Bs], self.dy))

    @staticmethod
    def _named(y, grads):
        names = [*NAMES, *(f"dB{i}" for i in range(len(grads) - 2))]
        return dict(zip(names, (y.detach(), *grads), strict=True))


def differences(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, str]:
    """What differs by more than the tolerance of its dtype, by name; empty when all is right."""
    wrong = {}
    dtype = got["dx"].dtype
    for name, reference in expected.items():
        value = got[name]
        if value.shape != reference.shape:
            wrong[name] = f"shape {tuple(value.shape)}, not {tuple(reference.shape)}"
        elif value.numel():
            error = (value.double() - reference).abs().max().item()
            largest = reference.abs().max().item()
            if not error <= TOLERANCE[dtype] * max(largest, 1.0):
                wrong[name] = f"off by {error:.2e} of {largest:.2e}"
    return wrong


def check(problem: Problem, kernel: str = KERNEL) -> dict[str, torch.Tensor]:
    got = problem.run(kernel)
    assert differences(got, problem.reference()) == {}
    assert got["dA"].dtype == problem.weight_dtype
    return got


def poison_empty(monkeypatch) -> None:
    """Every buffer that torch hands out without values holds NaN (integers: a large number)."""

    def poisoned(make):
        def wrapper(*args, **kwargs):
            value = make(*args, **kwargs)
            if value.dtype == torch.bool:
                return value.fill_(True)
            floating = value.is_floating_point()
            return value.fill_(float("nan") if floating else torch.iinfo(value.dtype).max // 4)

        return wrapper

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def break_dequantisation(monkeypatch, path: str, before: str, after: str, folder: Path) -> None:
    """Puts `after` for `before` in the source of `path`. Skips a path that does not run here."""
    if (path == "triton_kernels") != INTERPRETER:
        pytest.skip("of the other path")
    name = f"lora_moe_rl.kernels.dequant.{path}"
    source = Path(importlib.import_module(name).__file__).read_text()
    assert before in source
    broken = folder / f"{path}.py"
    broken.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location(name, broken)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    caller, its = ("op", path) if path == "torch_path" else ("triton_path", "kernels")
    monkeypatch.setattr(
        importlib.import_module(f"lora_moe_rl.kernels.dequant.{caller}"), its, changed
    )
