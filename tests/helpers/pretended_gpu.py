"""A GPU that is pretended: tensors on `cuda:0` whose numbers lie in the host's memory.

    install()  torch.cuda answers as on a machine with one GPU, and the mode below is on

A tensor that is asked for on "cuda" is an `OnGpu`: torch sees a tensor of that device, and every
operator on it computes with the numbers that it holds. What a GPU refuses is refused: an operator
on tensors of both devices, numpy of a device's tensor, Triton's kernels and NCCL's collectives of
the host's tensors. Nothing can be seen of streams, of what waits and for how long, of CUDA's own
kernels, or of sums in another order. For a process of its own.

torch's C++ takes an `OnGpu` for one of a device "privateuseone", its own door for devices that are
written in Python: of a tensor that it takes for CUDA's, autograd asks the driver for a stream.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from triton.runtime.interpreter import InterpretedFunction

from lora_moe_rl.trainer import megatron_on_cpu

aten = torch.ops.aten
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
UNDERNEATH = torch.device("privateuseone", 0)  # what torch knows its device as, in C++
KINDS = ("cuda", "privateuseone", "pretended")
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

    def untyped_storage(self):
        return self.held.untyped_storage()

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
    return device is not None and torch.device(device).type in KINDS


def _underneath(one: Any) -> Any:
    device = isinstance(one, torch.device) or (isinstance(one, str) and one.startswith("cuda"))
    return UNDERNEATH if device and _is_gpu(one) else one


# Operators that take tensors of both devices, as on a GPU.
BOTH = {aten.copy_.default, aten._to_copy.default}
# Those that take indices of the host, too, but no values.
INDEXING = {
    aten.index.Tensor, aten.index_put_.default, aten.index_put.default,
    aten._index_put_impl_.default, aten._unsafe_index.Tensor,
}  # fmt: skip


def run(func, args, kwargs):
    """`func` as a GPU would: of numbers in the host's memory, with its refusals."""
    if func.namespace == "lora_moe_rl":  # opaque to torch; what is inside is looked at
        with Pretended():
            return OPDEFS[func.name()]._init_fn(*args, **kwargs)
    if func is aten.is_pinned.default:
        return False
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    gpu = [one for one in tensors if isinstance(one, OnGpu)]
    if gpu and len(gpu) < len(tensors):
        _check(func, args, tensors)
    if func.namespace == "c10d" and tensors and not gpu and not _of_hosts(leaves):
        raise MixedDevices(f"{func}: NCCL takes no tensors of the host")
    asked = kwargs.get("device")
    there = bool(gpu) if asked is None else _is_gpu(asked)
    if func is aten._to_copy.default and asked is None:
        there = isinstance(args[0], OnGpu)
    args, kwargs = tree_unflatten([_plain(one) for one in leaves], spec)
    kwargs.pop("pin_memory", None)
    if _is_gpu(asked):
        kwargs["device"] = CPU
    out = func(*args, **kwargs)
    return _wrapped(func, out, gpu) if there else out


_HOST_GROUPS: set[str] = set()  # by name


def _of_hosts(leaves) -> bool:
    """Whether a collective's group was made for the host's tensors."""
    groups = [one for one in leaves if isinstance(one, torch.ScriptObject)]
    boxed = [g for g in groups if "ProcessGroup" in str(g._type())]
    names = {torch.distributed.ProcessGroup.unbox(group).group_name for group in boxed}
    return bool(names & _HOST_GROUPS)


def _new_group(make):
    def new_group(ranks=None, *args, backend=None, **kwargs):
        made = make(ranks, *args, backend=backend, **kwargs)
        if backend == "gloo" and isinstance(made, torch.distributed.ProcessGroup):
            _HOST_GROUPS.add(made.group_name)
        return made

    return new_group


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


def _wrapped(func, out, gpu):
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


class _Stream(megatron_on_cpu._Stream):
    device, cuda_stream = GPU, 0

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass


def _without_modes(function):
    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _nothing(*args, **kwargs):
    return None


def _answers() -> dict[str, Any]:
    """Of torch.cuda."""
    stream, generator = _Stream(), torch.Generator()
    properties = types.SimpleNamespace(
        name="pretended", major=9, minor=0, total_memory=80 * GIB, multi_processor_count=132
    )
    yes = ("is_available", "is_initialized")
    ones = ("device_count",)
    zeros = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved")
    nothing = ("set_device", "synchronize", "empty_cache", "_lazy_init", "reset_peak_memory_stats")
    return {
        **dict.fromkeys(yes, lambda: True),
        **dict.fromkeys(ones, lambda: 1),
        **dict.fromkeys(zeros, lambda *_: 0),
        **dict.fromkeys(nothing, _nothing),
        "_lazy_call": lambda call, **_: call(),
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: properties.name,
        "mem_get_info": lambda *_: (70 * GIB, 80 * GIB),
        "current_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": megatron_on_cpu._Event,
        "manual_seed": generator.manual_seed,
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "set_rng_state": lambda state, *_, **__: generator.set_state(state),
        "default_generators": (generator,),
    }


def install() -> None:
    """For the rest of the process's life."""
    import torch._dynamo  # which wants torch.cuda's own functions when it is imported

    for name, answer in _answers().items():
        if not hasattr(torch.cuda, name):
            raise RuntimeError(f"torch.cuda has no {name} any more")
        setattr(torch.cuda, name, answer)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, answer)
    InterpretedFunction.run = launch
    join = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **given: join("gloo", **given)
    torch.distributed.get_backend = lambda *_: "nccl"
    torch.distributed.new_group = _new_group(torch.distributed.new_group)
    for name in ("all_gather_object", "broadcast_object_list"):  # bytes, on NCCL's device
        setattr(torch.distributed, name, _without_modes(getattr(torch.distributed, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self.to(GPU)
    torch.Tensor.pin_memory = lambda self, *_: self.clone()
    torch.Tensor.record_stream = _nothing
    _setup_privateuseone_for_python_backend("pretended", hook=_HOOKS)
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    Pretended().__enter__()
