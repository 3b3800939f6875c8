"""Checkpoints of a run whose trainer and disk are stand-ins: what it is that they are asked."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
from published_configs import QWEN3_30B_A3B, shrunk
from safetensors.numpy import load_file

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import DiskError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.files.saving import save_safetensors
from lora_moe_rl.files.trainer_state import Saved, file_name, key
from lora_moe_rl.run.checkpoints import Checkpoints

SHAPE = ModelShape.from_hf_config(shrunk(QWEN3_30B_A3B))
SPEC = AdapterSpec.build(SHAPE, RunConfig().adapter)
RANKS = 2


def yes() -> bool:
    return True


def no() -> bool:
    return False


class Disk:
    """A trainer of two ranks whose state is the number of its step. The disk takes it as soon as it
    has `room`; `slow` seconds a rank. `value`: of all weights."""

    def __init__(self, room=True, slow=0.0, value=1.0):
        self.room, self.slow, self.value, self.asked = room, slow, value, 0

    def save(self, directory: Path) -> Saved:
        self.asked += 1
        time.sleep(self.slow)
        if not self.room:
            raise DiskError("no space left on device")
        whole = {n: np.full(s, self.value, np.float32) for n, s in SPEC.tensor_shapes.items()}
        names, files = list(whole), {}
        for rank in range(RANKS):
            mine = {
                key(kind, name, (0,) * whole[name].ndim): whole[name]
                for name in names[rank::RANKS]
                for kind in ("adapter", "exp_avg")
            }
            files[file_name(rank)] = save_safetensors(directory / file_name(rank), mine)
        return Saved({"version": 1, "optimizer_steps": 1}, files)


class Run:
    """`told`: of which steps' adapters; `pushed`: which checkpoints."""

    def __init__(self, folder: Path, disk: Disk, resize: bool = False, **checkpoint):
        (folder / "config.json").write_text("{}")
        self.config = RunConfig(
            logging={"run_dir": str(folder / "run")},
            trainer={"steps": 9, "world_size": RANKS, "ep": RANKS},
            checkpoint={"every": 2} | checkpoint,
            adapter={"resize": resize},
        )
        self.said, self.told, self.pushed = [], [], []
        self.run_dir = RunDir(self.config, False, self.said.append)
        parts = (self.config, SPEC, folder, self.run_dir, disk)
        push = lambda path, adapter: self.pushed.append((path.name, adapter.exists()))  # noqa: E731
        self.checkpoints = Checkpoints(*parts, lambda step, _: self.told.append(step), push)

    def do(self, what) -> None:
        """`what(checkpoints, tasks)` in a run's event loop."""

        async def run():
            async with asyncio.TaskGroup() as tasks:
                await what(self.checkpoints, tasks)

        with self.run_dir, self.checkpoints:
            try:
                asyncio.run(run())
            except* Exception as group:
                raise group.exceptions[0] from None

    @property
    def weights(self) -> set[float]:
        """Of the adapter that is exported."""
        written = load_file(self.run_dir.adapter / "adapter_model.safetensors")
        return {float(one) for values in written.values() for one in np.unique(values)}
