"""What of a base trainer ranks and engines hold beside the file that they share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lora_moe_rl.refit.receiver import Receiver
from lora_moe_rl.rollout.engine import RolloutEngine


class CountingReceiver(Receiver):
    """A vLLM worker that tells."""

    def own_base(self, path: str) -> int:
        return outside(self.model_runner.model.parameters(), Path(path))


class CountingEngine(RolloutEngine):
    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        worker = f"{CountingReceiver.__module__}.{CountingReceiver.__name__}"
        return super()._engine_args(cpu) | {"worker_extension_cls": worker}

    async def own_base(self, path: str) -> int:
        """Bytes of the base that this engine's workers hold beside the file."""
        return sum(await self.llm.collective_rpc("own_base", args=(path,)))


def outside(tensors: Iterable[torch.Tensor], path: Path) -> int:
    """Bytes of tensors that do not lie in a mapping of the file, in this process."""
    found = re.findall(rf"^([0-9a-f]+)-([0-9a-f]+) .* {re.escape(str(path))}$", _maps(), re.M)
    ranges = [(int(first, 16), int(end, 16)) for first, end in found]
    storages = {
        (storage := tensor.untyped_storage()).data_ptr(): storage.nbytes() for tensor in tensors
    }
    return sum(
        nbytes
        for place, nbytes in storages.items()
        if not any(first <= place < end for first, end in ranges)
    )


def _maps() -> str:
    return Path("/proc/self/maps").read_text()
