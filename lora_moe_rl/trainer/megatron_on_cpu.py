"""Lets unmodified Megatron-core run on the CPU over gloo.

Megatron-core asks `torch.cuda` for devices, streams and RNG states wherever it goes. Patching
`torch` itself would reach Hugging Face and PEFT too (it silently corrupts `from_pretrained`), so
only the name `torch` inside `megatron.*` modules is changed: it becomes a proxy that answers those
questions for the CPU and passes everything else on. `install()` must run before the first import
of `megatron`; it is never called when the trainer runs on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
import types

import torch

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.upstream.checks import require_version

CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange")


class _Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 0.0


class _Stream:
    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, *args):
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, *args) -> _Event:
        return _Event()


class _CudaProxy(types.ModuleType):
    Stream, Event = _Stream, _Event

    def __getattr__(self, name):
        return getattr(torch.cuda, name)


class _TorchProxy(types.ModuleType):
    def __getattr__(self, name):
        return getattr(torch, name)


def _on_cpu(factory):
    """`factory` with device='cuda' read as the CPU."""

    def make(*args, **kwargs):
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _proxy() -> types.ModuleType:
    cuda = _CudaProxy("torch.cuda")
    stream = _Stream()
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda *a: None
    cuda.synchronize = lambda *a, **k: None
    cuda.empty_cache = lambda: None
    cuda.current_stream = lambda *a, **k: stream
    cuda.stream = lambda s: contextlib.nullcontext()
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.get_rng_state = lambda *a, **k: torch.default_generator.get_state()
    proxy = _TorchProxy("torch")
    proxy.cuda = cuda
    for name in _FACTORIES:
        setattr(proxy, name, _on_cpu(getattr(torch, name)))
    return proxy


def _patch(module: types.ModuleType, proxy: types.ModuleType) -> None:
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = proxy
    if module.__name__ == "megatron.core.tensor_parallel.random":
        generator = torch.default_generator
        module._get_cuda_rng_state = lambda *a, **k: generator.get_state()
        module._set_cuda_rng_state = lambda state, *a, **k: generator.set_state(state)
    if module.__name__ == "megatron.core.transformer.moe.token_dispatcher":
        module.maybe_move_tensor_to_cpu = _already_on_cpu


def _already_on_cpu(tensor, as_numpy=False, record_stream=False):
    return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor


class _PatchOnImport(importlib.abc.MetaPathFinder):
    """Patches each `megatron.*` module right after it has run."""

    def __init__(self, proxy):
        self.proxy = proxy

    def find_spec(self, name, path, target=None):
        if not name.startswith("megatron."):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _patch(module, self.proxy)

        with contextlib.suppress(AttributeError):  # a namespace package's loader is read-only
            spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    """Idempotent. Raises ConfigError for another Megatron-core or one already imported."""
    require_version("megatron-core", "lora_moe_rl/trainer/megatron_on_cpu.py")
    if any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
        return
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise ConfigError("megatron.core was imported before it was prepared for the CPU")
    sys.meta_path.insert(0, _PatchOnImport(_proxy()))
