"""What autograd keeps of the transformer layers, in the host's memory until the backward wants it.

forward     layer 0 | layer 1   | layer 2   |                      compute
                    | 0 to host | 1 to host |                      copies, on a stream of their own
backward                                    | layer 2   | layer 1   | layer 0
                                            | 1 to here | 0 to here |

So the device holds of two layers at once, whatever their number. A storage moves once, however many
saved tensors are views of it. Copies change no bits.

Of torch's own means these are `saved_tensors_hooks`. `save_on_cpu` would move the frozen base too,
whose weights are saved tensors as others are, and copies on the stream that computes. The
fine-grained offloading of megatron-core 0.19 moves the inputs of some modules of Transformer
Engine's, not what adapters keep beside them, and has CUDA streams alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

LEAST_BYTES = 2**18  # of a storage that is moved: smaller ones are not worth a copy


@dataclass
class _Stored:
    """One storage, on the device or the host or both. `uses`: saved tensors not read yet."""

    device: torch.UntypedStorage | None
    host: torch.Tensor | None = None
    uses: int = 0


@dataclass
class _Layer:
    """What is kept of one layer and micro-batch. `previous`: the layer before it."""

    previous: _Layer | None = None
    stored: dict[int, _Stored] = field(default_factory=dict)
    copied: Any = None  # an event: behind the copies to the host, later behind those from it
    called_back: bool = False


@dataclass(frozen=True)
class _Saved:
    """Stands for a saved tensor."""

    layer: _Layer
    stored: _Stored
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostActivations:
    """The activations that all layers of a rank's chunks keep on the host. `seconds`: of this
    process, in copies or, beside a GPU, in starting them; `moved`: bytes that went to the host."""

    def __init__(self, chunks: Sequence[torch.nn.Module], device: torch.device):
        """`chunks`: Megatron's models, which have `decoder.layers`."""
        self.chunks, self.device = chunks, device
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.last: _Layer | None = None
        self.open: list[tuple[_Layer, saved_tensors_hooks, set[int]]] = []
        self.stays: set[int] = set()
        self.seconds, self.moved = 0.0, 0
        for chunk in chunks:
            for number, layer in enumerate(chunk.decoder.layers):
                self._watch(layer, first=number == 0)

    @contextmanager
    def step(self):
        """Around forwards and their backwards: the base and adapters, which stay, are where they
        are."""
        self.stays = set()
        for chunk in self.chunks:
            self.stays |= set(_addresses([*chunk.parameters(), *chunk.buffers()]))
        try:
            yield
        finally:
            self.last = None
            if self.stream is not None:  # what was called back and never read is given back as well
                torch.cuda.current_stream().wait_stream(self.stream)

    def taken(self) -> tuple[float, int]:
        """(seconds, moved) since it was asked."""
        found = self.seconds, self.moved
        self.seconds, self.moved = 0.0, 0
        return found

    def _watch(self, layer: torch.nn.Module, first: bool) -> None:
        def enter(module, args, kwargs) -> None:
            if torch.is_grad_enabled():
                self._enter(first, [args[1:], {**kwargs, "hidden_states": None}])

        def leave(module, args, output) -> None:
            if self.open:
                self._leave()

        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave, always_call=True)

    def _enter(self, first: bool, inputs: list) -> None:
        """`inputs`: what is not the layer's own: masks and positions that all layers share."""
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        layer = _Layer(None if first else self.last)
        self.open.append((layer, hooks, self.stays | set(_addresses(_tensors(inputs)))))
        hooks.__enter__()

    def _leave(self) -> None:
        started = time.perf_counter()
        layer, hooks, _ = self.open.pop()
        hooks.__exit__(None, None, None)
        with self._aside():
            for one in layer.stored.values():
                one.host = self._to_host(one.device)
            layer.copied = self._event()
        if self.last is not None:
            self._wait(self.last.copied)  # so that no more than two layers' are here
            for one in self.last.stored.values():
                one.device = None
        self.last = layer
        self.seconds += time.perf_counter() - started

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        layer, _, stays = self.open[-1]
        storage = tensor.untyped_storage()
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if (
            not plain
            or tensor.device.type != self.device.type
            or storage.nbytes() < LEAST_BYTES
            or storage.data_ptr() in stays
        ):
            return tensor
        # Held until the layer is left, so that no other storage has its address.
        one = layer.stored.setdefault(storage.data_ptr(), _Stored(storage))
        one.uses += 1
        return _Saved(
            layer, one, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        )

    def _unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        started = time.perf_counter()
        layer, one = saved.layer, saved.stored
        self._call_back(layer)
        self._wait(layer.copied)
        if layer.previous is not None:
            self._call_back(layer.previous)  # while this one's backward computes
            layer.previous = None
        if one.device is None:  # read once more than it was saved
            one.device = self._to_device(one.host)
        storage = one.device
        one.uses -= 1
        if one.uses <= 0:
            one.device = None
        tensor = torch.empty(0, dtype=saved.dtype, device=self.device)
        tensor.set_(storage, saved.offset, saved.shape, saved.stride)
        self.seconds += time.perf_counter() - started
        return tensor

    def _call_back(self, layer: _Layer) -> None:
        if layer.called_back:
            return
        layer.called_back = True
        missing = [one for one in layer.stored.values() if one.device is None]
        # Memory of the stream that computes, which reads it and gives it back.
        for one in missing:
            one.device = _bytes(one.host.nbytes, self.device).untyped_storage()
        with self._aside():
            for one in missing:
                _view(one.device).copy_(one.host, non_blocking=True)
            layer.copied = self._event()

    def _to_host(self, storage: torch.UntypedStorage) -> torch.Tensor:
        self.moved += storage.nbytes()
        host = _bytes(storage.nbytes(), torch.device("cpu"), pinned=self.stream is not None)
        return host.copy_(_view(storage), non_blocking=True)

    def _to_device(self, host: torch.Tensor) -> torch.UntypedStorage:
        return _bytes(host.nbytes, self.device).copy_(host).untyped_storage()

    def _aside(self):
        """On the stream of the copies, behind what computes until now."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def _event(self) -> Any:
        return None if self.stream is None else self.stream.record_event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _bytes(count: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device, pin_memory=pinned)


def _view(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _addresses(tensors) -> Iterator[int]:
    return (tensor.untyped_storage().data_ptr() for tensor in tensors)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All in lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif is_dataclass(value):
        yield from _tensors([getattr(value, one.name) for one in fields(value)])
