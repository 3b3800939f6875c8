"""What every process with such a GPU begins with."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType

# vLLM's kernels for adapters, and of gated DeltaNet, are asked for float32 too, in which rounding
# hides nothing.
REWRITTEN = {
    f"vllm.lora.ops.triton_ops.{name}": (
        "dtype in [torch.float16, torch.bfloat16]",
        "dtype in [torch.float16, torch.bfloat16, torch.float32]",
    )
    for name in ("lora_shrink_op", "lora_expand_op")
} | {
    "vllm.third_party.flash_linear_attention.ops.chunk": (
        "assert q.dtype != torch.float32", "assert True"
    )
}  # fmt: skip


def _torch(module: ModuleType) -> None:
    from host_cuda import operators

    operators.install()


def _groups(module: ModuleType) -> None:
    from host_cuda import nccl

    nccl.install(module)


def _interpreter(module: ModuleType) -> None:
    from host_cuda import interpreter

    interpreter.install()


def _operators(module: ModuleType) -> None:
    from host_cuda import vllm_ops

    vllm_ops.install()


def _flash_attention(module: ModuleType) -> None:
    from host_cuda import flash_attention

    flash_attention.install(module)


def _triton_attention(module: ModuleType) -> None:
    from host_cuda import flash_attention

    flash_attention.install_triton(module)


def _top_k_top_p(module: ModuleType) -> None:
    """Its kernel is none that the interpreter takes."""

    def plain(logits, k, p, **_):
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

        return apply_top_k_top_p_pytorch(logits, k, p)

    module.apply_top_k_top_p_triton = plain  # type: ignore[attr-defined]


def _shrink(module: ModuleType) -> None:
    """A GPU has 64 programs add up one sum, of which the interpreter would take each by itself."""
    module.is_batch_invariant = True  # type: ignore[attr-defined]


def _router(module: ModuleType) -> None:
    module.is_available = lambda: False  # type: ignore[attr-defined]  # compiled for a GPU at its first use


def _runtime(module: ModuleType) -> None:
    """What it opens by its path is CUDA's own."""
    module.find_loaded_library = (  # type: ignore[attr-defined]
        lambda _: os.environ["LD_PRELOAD"]
    )


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "torch": _torch,
    "torch.distributed.distributed_c10d": _groups,
    "triton.runtime.interpreter": _interpreter,
    "vllm._custom_ops": _operators,
    "vllm.lora.ops.triton_ops.utils": _shrink,
    "vllm.vllm_flash_attn.flash_attn_interface": _flash_attention,
    "vllm.v1.sample.ops.topk_topp_triton": _top_k_top_p,
    "vllm.v1.attention.ops.triton_unified_attention": _triton_attention,
    "vllm.model_executor.kernels.linear.cute_dsl.ll_bf16": _router,
    "vllm.distributed.device_communicators.cuda_wrapper": _runtime,
}


class Finder(importlib.abc.MetaPathFinder):
    """Changes some modules as they are imported."""

    def find_spec(self, fullname, path, target=None):
        if fullname not in AFTER and fullname not in REWRITTEN:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        spec.loader = Loader(fullname, spec.loader.path)
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        if self.name not in REWRITTEN:
            return data
        old, new = (one.encode() for one in REWRITTEN[self.name])
        assert old in data, f"{self.name} has changed"
        return data.replace(old, new)

    def get_code(self, fullname: str):
        if self.name not in REWRITTEN:
            return super().get_code(fullname)
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # what is cached is of another one

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if self.name in AFTER:
            AFTER[self.name](module)


def begin() -> None:
    """Nothing is imported for it: there are processes without torch."""
    warnings.filterwarnings("ignore", message=".*verriding a previously registered kernel.*")
    sys.meta_path.insert(0, Finder())
