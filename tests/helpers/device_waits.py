"""What waits for the device while it is being given work, by the place it is called from.

    OnCuda   torch's own report of it
    AsIf     without a GPU: calls that would wait if every tensor were on one

A place is (file, line) of the innermost frame that is not torch's. `ours` are those of this
repository.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parents[2]
# Of a wait these are not the cause: torch, and who passes on its warning of it.
BETWEEN = (str(Path(torch.__file__).parent), warnings.__file__, __file__)
READS = {
    "item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "bincount", "equal",
    "__bool__", "__float__", "__int__", "__index__", "__array__", "is_nonzero",
}  # fmt: skip
# Copies to the device without a wait on a GPU, and takes another way on the CPU.
NOT_ON_A_GPU = (
    "kernels/backend.py",
    "kernels/grouped_lora/torch_path.py",
    "kernels/route_codec/cpu_path.py",
    "lora_moe_rl/trainer/megatron_on_cpu.py",
)


class Places:
    """`found`: {(file, line): times}."""

    def __init__(self):
        self.found: Counter[tuple[str, int]] = Counter()

    def note(self, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename.startswith(BETWEEN):
            frame = frame.f_back
        if frame is not None:
            self.found[frame.f_code.co_filename, frame.f_lineno] += 1

    def ours(self) -> dict[str, int]:
        """{"folder/file.py:line": times}."""
        return {
            f"{name}:{line}": times
            for (file, line), times in self.found.items()
            if (name := _own(file)) and not name.startswith(NOT_ON_A_GPU)
        }

    def others(self) -> dict[str, int]:
        """{"/path/file.py:line": times}."""
        return {
            f"{file}:{line}": times
            for (file, line), times in self.found.items()
            if _own(file) is None
        }


def _own(file: str) -> str | None:
    """A file of this repository by its path within it; None for others, also in a .venv here."""
    path = Path(file).resolve()
    if not path.is_relative_to(ROOT) or ".venv" in path.relative_to(ROOT).parts[:1]:
        return None
    return str(path.relative_to(ROOT))


class AsIf(TorchFunctionMode):
    def __init__(self, places: Places):
        super().__init__()
        self.places = places

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _waits(func.__name__, args, kwargs):
            self.places.note(sys._getframe(1))
        return func(*args, **kwargs)


def _waits(name: str, args: tuple, kwargs: dict) -> bool:
    if name in READS:
        return True
    if name in ("tensor", "as_tensor"):
        return kwargs.get("device") is not None
    if name == "to":
        asked = kwargs.get("device") or next((a for a in args if isinstance(a, torch.device)), None)
        return asked is not None and not kwargs.get("non_blocking", False)
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in index)
    if name == "repeat_interleave":
        return isinstance(args[-1], torch.Tensor) and kwargs.get("output_size") is None
    return False


@contextmanager
def on_cuda(places: Places):
    """Inside, what torch knows to have waited is noted."""

    def show(message, *rest, **more) -> None:
        if "synchronizing CUDA operation" in str(message):
            places.note(sys._getframe(1))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def watch(engine, make: Callable[[Places], object]) -> Places:
    """From now on what waits inside the forwards and backwards of a trainer's engine is noted.
    `make` gives a context."""
    places, schedule = Places(), engine._schedule

    def watched(*args, **kwargs):
        with make(places):
            return schedule(*args, **kwargs)

    engine._schedule = watched
    return places
