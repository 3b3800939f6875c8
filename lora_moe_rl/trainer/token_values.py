"""What the trainer knows of single tokens of the few samples that are kept to be looked at.

The update computes it anyway, for every token: here it is picked out of the micro-batches, and put
together over the ranks. Without logging.tokens no sample is kept, and nothing is copied or sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import MicroBatch, unpack
from lora_moe_rl.data.update_result import TokenValues

if TYPE_CHECKING:
    import torch

    from lora_moe_rl.trainer.meter import Meter


class Kept:
    """`samples`: numbers of those that are kept, the same on every rank."""

    def __init__(self, batch: TrainBatch, samples: Sequence[int]):
        self.samples = list(samples)
        self._lengths = batch.response_sizes()[self.samples].tolist()
        self._found: dict[int, list[np.ndarray]] = {}

    def take(self, data: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> None:
        """Both `[T]`. Of each sample what comes first stays: of its first forward in the update."""
        wanted = set(self.samples) & set(data.samples) - self._found.keys()
        if wanted:
            streams = [unpack(data, one.cpu().numpy()) for one in (logprobs, entropy)]
            for sample in wanted:
                self._found[sample] = [stream[sample] for stream in streams]

    def everywhere(self, meter: Meter) -> dict[int, TokenValues]:
        """The values of each sample, on every rank. Raises ValueError unless exactly one rank that
        reports has had it."""
        if not self.samples:
            return {}
        parts = []
        for sample, length in zip(self.samples, self._lengths, strict=True):
            here = self._found.get(sample) if meter.reports else None
            known = [np.zeros(length)] * 2 if here is None else here
            parts += [np.array([float(here is not None)]), *known]
        whole = np.array(meter.all_reduce(np.concatenate(parts).tolist()))
        found, begin = {}, 0
        for sample, length in zip(self.samples, self._lengths, strict=True):
            ranks, begin = whole[begin], begin + 1
            if ranks != 1:
                raise ValueError(f"{ranks:.0f} ranks had the tokens of sample {sample}, not one")
            logprobs, entropy = whole[begin : begin + 2 * length].astype(np.float32).reshape(2, -1)
            begin += 2 * length
            found[sample] = TokenValues(logprobs, entropy)
        return found
