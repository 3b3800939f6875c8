"""Ways of writing an adapter version from shared memory into slots on the device.

    box by box             as the receiver does it
    one copy               of as many bytes into one buffer: the least there is to do
    one copy, scattered    that copy, and from there into the slots on the device
    ... page-locked        the same from memory that the driver has locked, and without waiting

A way that does not leave in the slots what was sent has no seconds.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.bench.gpu.parts import Parts
from lora_moe_rl.bench.kernels import seconds
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.planner import facts
from lora_moe_rl.refit.copies import port_of
from lora_moe_rl.refit.parts import STORAGE, part_layouts
from lora_moe_rl.refit.plan import EngineLayout, make_plan
from lora_moe_rl.rollout.facts import slot_rank

MODEL = "qwen3_30b_a3b"
RANK, SLOTS, SLOT = 16, 2, 1
LAYERS = {"cuda": None, "cpu": 2}  # None: all


def run(parts: Parts, device: str) -> None:
    version = Version(device)
    for name, write in version.ways().items():
        parts.part(name, lambda write=write: version.timed(write))
    if device == "cuda":
        parts.part("lock", version.lock)
        for name, write in version.ways().items():
            parts.part(f"{name}, page-locked", lambda write=write: version.timed(write))


class Version:
    """An adapter version of random values in shared memory, and slots for it on the device: a
    tensor for each box, as vLLM's for one engine rank, the slot first."""

    def __init__(self, device: str):
        self.device, self.locked = device, False
        self.spec = _spec(LAYERS[device])
        plan = make_plan(
            self.spec, TrainerConfig(), EngineLayout(slot_rank(self.spec)),
            STORAGE["bfloat16"].itemsize,
        )  # fmt: skip
        (self.layout,) = part_layouts(plan, self.spec, "bfloat16")
        self.memory = np.frombuffer(mmap.mmap(-1, self.layout.nbytes), dtype=np.uint8)
        # Below 0x40 in every byte: no NaN, so that equal bits are equal values.
        self.memory[:] = np.random.default_rng(0).integers(
            0, 0x40, self.layout.nbytes, dtype=np.uint8
        )
        self.source = torch.from_numpy(self.memory)
        self.staging = torch.empty(self.layout.nbytes, dtype=torch.uint8, device=device)
        self.slots = [
            torch.zeros(SLOTS, *entry.box.shape, dtype=torch.bfloat16, device=device)
            for entry in self.layout.entries
        ]
        boxes = zip(self.slots, self.layout.entries, strict=True)
        self.copies = port_of(torch.device(device))
        self.writers = [self.copies.writer(slot[SLOT], entry.box.shape) for slot, entry in boxes]

    def ways(self) -> dict[str, Callable[[], object]]:
        return {
            "box by box": self._box_by_box,
            "one copy": self._copy,
            "one copy, scattered": self._both,
        }

    def timed(self, write: Callable[[], object]) -> dict[str, Any]:
        """Raises BenchmarkError when the slots hold something else afterwards."""
        for slot in self.slots:
            slot.zero_()
        self.staging.zero_()
        taken = seconds(write, self.device)
        wrong = self._wrong(only_staged=write == self._copy)
        if wrong:
            raise BenchmarkError(f"{wrong} of {len(self.slots)} boxes are not what was sent")
        return {
            "seconds": taken,
            "gb_s": self.layout.nbytes / taken / 1e9,
            "boxes": len(self.slots),
            "bytes": self.layout.nbytes,
        }

    def lock(self) -> dict[str, int]:
        """Page-locks the shared memory, as the receiver does once."""
        self.copies.lock(self.memory)
        self.locked = True
        return {"bytes": self.memory.nbytes}

    def _box_by_box(self) -> None:
        for write, entry in zip(self.writers, self.layout.entries, strict=True):
            write(entry.bytes_of(self.memory, self.layout.dtype))
        self.copies.wait()

    def _copy(self) -> None:
        self.staging.copy_(self.source, non_blocking=self.locked)

    def _both(self) -> None:
        self._copy()
        values = self.staging.view(torch.bfloat16)
        for slot, entry in zip(self.slots, self.layout.entries, strict=True):
            slot[SLOT].copy_(entry.view(values), non_blocking=True)

    def _wrong(self, only_staged: bool) -> int:
        """Boxes that differ from what was sent: in the slots, or where one copy has left them."""
        sent = self.source.view(torch.bfloat16)
        staged = self.staging.cpu().view(torch.bfloat16)
        wrong = 0
        for slot, entry in zip(self.slots, self.layout.entries, strict=True):
            found = entry.view(staged) if only_staged else slot[SLOT].cpu()
            wrong += not torch.equal(found, entry.view(sent))
        return wrong


def _spec(layers: int | None) -> AdapterSpec:
    config = facts.config_of(MODEL) | ({} if layers is None else {"num_hidden_layers": layers})
    return AdapterSpec.build(ModelShape.from_hf_config(config), AdapterConfig(rank=RANK))
