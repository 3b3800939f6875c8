"""Triton's interpreter, on the device's own memory, and with bfloat16 (it has it as uint16)."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import cuda
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import (
    GridExecutor,
    InterpreterBuilder,
    InterpreterOptions,
    TensorHandle,
)

from host_cuda.operators import on_host

DOT, BINARY = InterpreterBuilder.create_dot, InterpreterBuilder.binary_op
CALL, TUNED = GridExecutor.__call__, Autotuner.run
PATCH = interpreter._patch_lang
PATCHED: set[Any] = set()


def install() -> None:
    GridExecutor._init_args_hst = lambda self, args, kwargs: (
        [_on_host(one) for one in args],
        {key: _on_host(one) for key, one in kwargs.items()},
    )
    GridExecutor._restore_args_dev = lambda self, *all: None
    GridExecutor.__call__ = _call
    interpreter._patch_lang = _patch_once
    Autotuner.run = _untuned
    # What a compiled kernel has in debugging alone, and half of the time here.
    interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.binary_op = _binary
    # A kernel that begins before the last one has ended: here none does.
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda **_: None


def _call(self, *args, **kwargs):
    if callable(self.grid):
        known = {key: one for key, one in kwargs.items() if key in self.arg_names}
        self.grid = _with_tensors(self.grid, inspect.getcallargs(self.fn, *args, **known))
    return CALL(self, *args, **kwargs)


def _with_tensors(grid: Any, given: dict[str, Any]) -> Any:
    """A kernel's grid function has the tensors that the kernel is called with, not pointers. It may
    write into them, make them longer, and put others in their places."""

    def wrapped(pointers: dict[str, Any]) -> Any:
        sizes = grid(given)
        for name, one in given.items():
            if isinstance(one, torch.Tensor):
                pointers[name] = interpreter._implicit_cvt(_on_host(one))
        return sizes

    return wrapped


def _patch_once(function: Any) -> Any:
    """Triton's language stays that of the interpreter. It would be looked through at each call of a
    kernel, and of a function in one, which is a quarter of the time."""
    if function not in PATCHED:
        PATCHED.add(function)
        PATCH(function)
        _patch_names(function.__globals__)
    return interpreter._LangPatchScope()  # with nothing to take back


def _patch_names(names: dict[str, Any]) -> None:
    """What a module has of Triton's language under names of its own."""
    for name, value in list(names.items()):
        if inspect.isfunction(value) and tl.core.is_builtin(value):
            names[name] = functools.partial(value, _semantic=interpreter.interpreter_semantic)
    names.setdefault("range", _range)


class Place(int):
    """Where a loop is, of which a kernel may ask for another type."""

    def to(self, dtype: Any) -> int:
        return int(self)


def _range(*bounds: Any) -> Any:
    places = range(*bounds)
    return map(Place, places) if any(isinstance(one, tl.tensor) for one in bounds) else places


def _untuned(self, *args, **kwargs):
    self.configs = self.configs[:1]  # of which none is faster here
    return TUNED(self, *args, **kwargs)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cuda":
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return on_host(value)
    if isinstance(value, tuple):
        made = [_on_host(one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


def _dot(self, a, b, d, *more):
    return DOT(self, _widened(a), _widened(b), d, *more)


def _binary(self, left, right, op):
    if left.dtype.scalar != tl.bfloat16:
        return BINARY(self, left, right, op)
    found = op(_widened(left).data, _widened(right).data)
    if found.dtype == bool:
        return TensorHandle(found, tl.int1)
    return TensorHandle(_rounded(found), tl.bfloat16)


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(numbers: np.ndarray) -> np.ndarray:
    """Of float32, to the nearest even bfloat16."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
