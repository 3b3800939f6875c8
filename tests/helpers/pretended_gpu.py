"""A GPU that is pretended: tensors on `cuda:0` whose numbers lie in the host's memory.

    install()  torch.cuda answers as on a machine with one GPU, and the mode below is on

A tensor that is asked for on "cuda" is an `OnGpu`: torch sees a tensor of that device, and every
operator on it computes with the numbers that it holds. What a GPU refuses is refused: an operator
on tensors of both devices, numpy of a device's tensor, a collective of the host's tensors over NCCL.
Nothing can be seen of streams, of what waits and for how long, of CUDA's own kernels, or of sums in
another order. For a process of its own.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.distributed import distributed_c10d
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten
from triton.runtime.interpreter import InterpretedFunction

aten = torch.ops.aten
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
UNDERNEATH = torch.device("privateuseone", 0)  # what torch knows its device as, in C++
GIB = 2**30


class MixedDevices(RuntimeError):
    """What CUDA would refuse."""


class OnGpu(torch.Tensor):
    """`held`: the numbers, of the same shape and strides."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=UNDERNEATH,
        )
        made.held = held
        return made

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0

    def to(self, *args, **kwargs):
        args, kwargs = tree_map(_underneath, (args, kwargs))
        return torch.Tensor.to(self, *args, **kwargs)

    def cuda(self, *_, **__):
        return self

    def type(self, *args, **kwargs):
        if args or kwargs:
            return torch.Tensor.type(self, *args, **kwargs)
        return self.held.type().replace("torch.", "torch.cuda.")

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *_, **__):
        raise MixedDevices("numpy of a tensor on cuda:0: it has to be copied to the host first")

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    def pin_memory(self, *_):
        raise RuntimeError("cannot pin a tensor of a device")

    def __repr__(self, **_):
        return f"OnGpu({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "privateuseone", "pretended")


def _underneath(one: Any) -> Any:
    device = isinstance(one, torch.device) or (isinstance(one, str) and one.startswith("cuda"))
    return UNDERNEATH if device and _is_gpu(one) else one


# Operators that take tensors of both devices, as on a GPU.
BOTH = {aten.copy_.default, aten._to_copy.default}
# What is computed by other means than on the CPU.
INDEXING = {
    aten.index.Tensor, aten.index_put_.default, aten.index_put.default,
    aten._index_put_impl_.default, aten._unsafe_index.Tensor,
}  # fmt: skip


def run(func, args, kwargs):
    """`func` as a GPU would: of numbers in the host's memory, with its refusals."""
    if func.namespace == "lora_moe_rl":  # opaque to torch alone: all that it is made of is looked at
        with Pretended():
            return OPDEFS[func.name()]._init_fn(*args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    gpu = [one for one in tensors if isinstance(one, OnGpu)]
    asked = kwargs.get("device")
    if gpu and len(gpu) < len(tensors):
        _check(func, args, tensors)
    there = bool(gpu) if asked is None else _is_gpu(asked)
    if func is aten._to_copy.default and asked is None:
        there = isinstance(args[0], OnGpu)
    if func is aten._pin_memory.default:
        return args[0].clone()
    if func is aten.is_pinned.default:
        return False
    if func is aten._fused_sdp_choice.default and gpu:
        return 0  # by plain operators
    if func.namespace == "c10d" and not gpu and tensors:
        raise MixedDevices(f"{func}: NCCL takes no tensors of the host")
    plain = [_plain(one) for one in leaves]
    new_args, new_kwargs = tree_unflatten(plain, spec)
    for key in ("pin_memory",):
        new_kwargs.pop(key, None)
    if _is_gpu(asked):
        new_kwargs["device"] = CPU
    out = func(*new_args, **new_kwargs)
    if not there:
        return out
    return _wrapped(func, out, args, kwargs, gpu)


def _plain(one):
    return one.held if isinstance(one, OnGpu) else one


def _check(func, args, tensors) -> None:
    if func in BOTH:
        return
    host = [one for one in tensors if not isinstance(one, OnGpu)]
    if func in INDEXING:
        if not isinstance(args[0], OnGpu):
            raise MixedDevices(f"{func}: of a tensor of the host, with a device's tensor")
        values = args[2:3]
        if not any(one is value and one.dim() for one in host for value in values):
            return
    elif func.namespace == "aten" and not any(one.dim() for one in host):
        return  # numbers of the host are numbers
    shapes = ", ".join(f"{tuple(one.shape)} {one.dtype} on {one.device}" for one in tensors)
    raise MixedDevices(f"{func}: tensors of both devices ({shapes})")


def _wrapped(func, out, args, kwargs, gpu):
    """Results on the device: those that are arguments, written in place, are the same objects."""
    known = {id(one.held): one for one in gpu}

    def wrap(one: torch.Tensor):
        found = known.get(id(one))
        if found is None:
            return OnGpu(one)
        if found.shape != one.shape or found.stride() != one.stride():
            raise NotImplementedError(f"{func} changes the shape of what it is given")
        return found

    return tree_map_only(torch.Tensor, wrap, out)


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    is_built = is_available

    def has_primary_context(self, dev_id) -> bool:
        return True


_HOOKS = _Hooks()


class Pretended(TorchDispatchMode):
    """On, `device="cuda"` makes an `OnGpu`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def launch(kernel, *args, grid, warmup, **kwargs):
    """A Triton kernel, in Triton's interpreter."""
    values = [*args, *kwargs.values()]
    if any(isinstance(one, torch.Tensor) and not isinstance(one, OnGpu) for one in values):
        raise MixedDevices(f"{kernel.__name__}: Triton cannot read a tensor of the host")
    args, kwargs = tree_map(_plain, (args, kwargs))
    with _disable_current_modes():
        return _launch(kernel, *args, grid=grid, warmup=warmup, **kwargs)


_launch = InterpretedFunction.run


class _Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 1.0


class _Stream:
    device, cuda_stream = GPU, 0

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, *args):
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, *args):
        return _Event()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass


def _nothing(*args, **kwargs):
    return None


def _zero(*args, **kwargs) -> int:
    return 0


def install() -> None:
    """For the rest of the process's life."""
    import torch._dynamo  # which wants torch.cuda's own functions when it is imported

    cuda, stream = torch.cuda, _Stream()
    properties = types.SimpleNamespace(
        name="pretended", major=9, minor=0, total_memory=80 * GIB, multi_processor_count=132
    )
    generator = torch.Generator()
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": _zero,
        "set_device": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "_lazy_init": _nothing,
        "_lazy_call": lambda call, **_: call(),
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: properties.name,
        "mem_get_info": lambda *_: (70 * GIB, 80 * GIB),
        "memory_allocated": _zero,
        "max_memory_allocated": _zero,
        "memory_reserved": _zero,
        "max_memory_reserved": _zero,
        "reset_peak_memory_stats": _nothing,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "manual_seed": generator.manual_seed,
        "get_rng_state": lambda *_: generator.get_state(),
        "set_rng_state": lambda state, *_: generator.set_state(state),
        "default_generators": (generator,),
    }
    for name, answer in answers.items():
        if not hasattr(cuda, name):
            raise RuntimeError(f"torch.cuda has no {name} any more")
        setattr(cuda, name, answer)
    InterpretedFunction.run = launch
    distributed_c10d._get_object_coll_device = lambda *_: "cuda"  # NCCL's
    torch.Tensor.cuda = lambda self, *_, **__: self.to(GPU)
    torch.Tensor.pin_memory = lambda self, *_: self.clone()
    torch.Tensor.record_stream = _nothing
    _setup_privateuseone_for_python_backend("pretended", hook=_HOOKS)
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    Pretended().__enter__()
