"""torch's operators of CUDA tensors: each has the CPU's kernel, on the same memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

# What makes and describes tensors, and launches nothing.
KEPT = {
    "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "unfold",
    "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor",
    "resize_", "record_stream", "is_set_to", "view_as_real", "view_as_complex", "_pin_memory",
    "is_pinned",
}  # fmt: skip
# Operators that take indices of the host, too, for a tensor of the device.
INDEXING = {"index.Tensor", "index_put_", "_index_put_impl_"}
ELSE = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
_libraries: list[torch.library.Library] = []
_generators: dict[int, torch.Generator] = {}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor of the host."""
    storage = tensor.untyped_storage()
    at, size = storage.data_ptr(), storage.nbytes()
    if at == 0 or size == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * size).from_address(at)
    held = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(held, tensor.storage_offset(), tensor.size(), tensor.stride())
    return made.conj() if tensor.is_conj() else made


def on_device(tensor: torch.Tensor, device: torch.device | str = "cuda") -> torch.Tensor:
    """A copy, with the same strides."""
    size, stride = tensor.size(), tensor.stride()
    made = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
    if tensor.numel():
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        ctypes.memmove(made.data_ptr(), tensor.data_ptr(), span * tensor.element_size())
    return made


class Computed:
    """An operator of CUDA tensors."""

    def __init__(self, name: str):
        packet, _, overload = name.partition(".")
        self.name, self.mixed = name, name in INDEXING or name == "_copy_from"
        self.packet = getattr(torch.ops.aten, packet)
        self.op = getattr(self.packet, overload or "default")
        schema = self.op._schema
        kinds = [str(argument.type) for argument in schema.arguments]
        self.tensors = [i for i, kind in enumerate(kinds) if kind == "Tensor"]
        self.returns = bool(schema.returns)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.name in INDEXING:
            _check_indexing(self.name, *args[:3])
        args = tuple(self._host(one, seen) for one in args)
        asked = kwargs.get("device")
        kwargs = {key: self._host(one, seen) for key, one in kwargs.items()}
        device = seen[0][1].device if seen else asked or "cuda"
        # A number in the place of a tensor: torch's own choice of the overload.
        number = any(isinstance(args[i], int | float) for i in self.tensors if i < len(args))
        result = (self.packet if number else self.op)(*args, **kwargs)
        return self._device(result, seen, device) if self.returns else None

    def _host(self, value: Any, seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cuda":
                elsewhere = seen and value.device != seen[0][1].device
                if elsewhere and value.dim() and not self.mixed:
                    raise RuntimeError(f"{self.name}: tensors of two devices")
                seen.append((on_host(value), value))
                return seen[-1][0]
            if value.device.type == "cpu" and value.dim() and not self.mixed:
                raise RuntimeError(f"{self.name}: a tensor of the host among those of a device")
        if isinstance(value, torch.Generator):
            return _generator(value)
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        if type(value) in (list, tuple):
            return type(value)(self._host(one, seen) for one in value)
        return value

    def _device(
        self, value: Any, seen: list[tuple[torch.Tensor, torch.Tensor]], device: Any
    ) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._device(one, seen, device) for one in value)
        if not isinstance(value, torch.Tensor):
            return value
        for host, original in seen:
            if value is host:
                if value.size() != original.size():  # an `out` that has grown
                    original.resize_(value.size())
                    on_host(original).copy_(value)
                return original
        return on_device(value, device)


def _check_indexing(
    name: str, tensor: torch.Tensor, indices: Any, values: torch.Tensor | None = None
) -> None:
    if tensor.device.type != "cuda":
        raise RuntimeError(f"{name}: of a tensor of the host, by indices of a device")
    if values is not None and values.device.type != "cuda" and values.dim():
        raise RuntimeError(f"{name}: values of the host for a tensor of a device")


def _generator(of: torch.Generator) -> torch.Generator:
    if of.device.type != "cuda":
        return of
    return _generators.setdefault(id(of), torch.Generator().manual_seed(of.initial_seed()))


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    of = on_host(source) if source.device.type == "cuda" else source
    (on_host(to) if to.device.type == "cuda" else to).copy_(of)
    return to


def _rms_norm_backward(grad, input, normalized_shape, rstd, weight, mask):
    """Of CUDA alone; the CPU's autograd takes its forward apart."""
    dims = tuple(range(-len(normalized_shape), 0))
    grad, x, r = (on_host(one).float() for one in (grad, input, rstd))
    scaled = grad if weight is None else grad * on_host(weight).float()
    dx = r * (scaled - x * r * r * (scaled * x).mean(dims, keepdim=True))
    dw = None
    if mask[1]:
        dw = (grad * x * r).flatten(0, -1 - len(normalized_shape)).sum(0)
        dw = on_device(dw.to(weight.dtype))
    return on_device(dx.to(input.dtype)) if mask[0] else None, dw


OWN = {
    "copy_": _copy,
    "_local_scalar_dense": lambda tensor: on_host(tensor).item(),
    "_fused_rms_norm_backward": _rms_norm_backward,
}


def install() -> None:
    library = torch.library.Library("aten", "IMPL")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        if space != "aten" or name in KEPT or not has(full, "CUDA"):
            continue
        if any(has(full, key) for key in ELSE):
            library.impl(name, Computed(name), "CUDA", allow_override=True)
    for name, function in OWN.items():
        library.impl(name, function, "CUDA", allow_override=True)
    for kind in ("flash", "mem_efficient", "cudnn"):  # attention of operators that are here
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    _libraries.append(library)  # its operators go with it
