"""Adam's moments in the host's memory, which go through the device a few at a time.

    host      m v   m v   m v   m v           pinned, beside a GPU
               |     ^
    device     v     |                        of at most OFFLOAD_BYTES of parameters, or of one
              Adam's step on these alone

Adam's step is elementwise: taken in pieces, by the same optimizer, it gives the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from lora_moe_rl.config.trainer import OFFLOAD_BYTES

MOMENTS = ("exp_avg", "exp_avg_sq")


def host_zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros for a moment of a parameter: on the host, and where copies to its device are
    fastest."""
    pinned = parameter.device.type == "cuda"
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu", pin_memory=pinned)


class HostMoments:
    """Keeps the moments of `adam` on the host between its steps: its state then holds these."""

    def __init__(self, adam: torch.optim.Optimizer):
        self.adam = adam

    def step(self) -> float:
        """One step of `adam` on all its parameters; the seconds that it took."""
        started = time.perf_counter()
        groups = self.adam.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, whole, strict=True):
                for bucket in buckets(parameters):
                    for other in groups:
                        other["params"] = bucket if other is group else []
                    self._step(bucket)
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
        if any(p.device.type == "cuda" for parameters in whole for p in parameters):
            torch.cuda.current_stream().synchronize()  # whoever reads the host's copies finds them
        return time.perf_counter() - started

    def _step(self, bucket: Sequence[torch.Tensor]) -> None:
        """Copies and step follow each other on one stream."""
        kept: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for parameter in bucket:
            state = self.adam.state.get(parameter, {})
            kept[parameter] = {key: state[key] for key in MOMENTS if key in state}
            for key, held in kept[parameter].items():
                state[key] = torch.empty_like(parameter).copy_(held, non_blocking=True)
        self.adam.step()
        for parameter in bucket:
            state = self.adam.state.get(parameter, {})
            for key in (key for key in MOMENTS if key in state):
                held = kept[parameter].get(key)
                held = host_zeros(parameter) if held is None else held
                state[key] = held.copy_(state[key], non_blocking=True)


def buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The parameters in turn, as many at a time as have OFFLOAD_BYTES, or one that has more."""
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.nbytes > OFFLOAD_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
