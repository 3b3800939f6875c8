"""Mend for vLLM on the CPU: tokens of data-parallel ranks meet at their experts.

With experts over all ranks each rank gathers the tokens of all, and sums what their experts make of
them (`vllm/distributed/device_communicators/all2all.py`, AgRsAll2AllManager), of parts that differ
in length. `CpuCommunicator` gathers and sums parts of one length only. Here: parts are filled up to
the longest, and of the whole sum each rank keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/rollout/cpu_dp.py"


def _all_gatherv(self, input_, dim: int = 0, sizes: list[int] | None = None):
    """The parts of all ranks in their order: of one tensor `[sizes[rank], ...]` or several."""
    assert dim == 0, f"{WHO} gathers along the first dimension"
    if isinstance(input_, torch.Tensor):
        return gathered(input_, sizes or [len(input_)] * self.world_size, self.device_group)
    return [_all_gatherv(self, tensor, dim, sizes) for tensor in input_]


def gathered(
    part: torch.Tensor, sizes: Sequence[int], group: distributed.ProcessGroup | None
) -> torch.Tensor:
    """`[sum(sizes), ...]` from each rank's `[sizes[rank], ...]`."""
    longest = max(sizes)
    filled = part.new_zeros(longest, *part.shape[1:])
    filled[: len(part)] = part
    every = part.new_empty(len(sizes) * longest, *part.shape[1:])
    distributed.all_gather_into_tensor(every, filled, group=group)
    parts = every.split(longest)
    return torch.cat([one[:size] for one, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(self, input_, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's part `[sizes[rank], ...]` of the sum over ranks."""
    assert dim == 0, f"{WHO} sums along the first dimension"
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    every = input_.contiguous().clone()
    distributed.all_reduce(every, group=self.device_group)
    return every.split(sizes)[self.rank_in_group]


def install() -> None:
    """Gives the CPU's communicator both."""
    require_version("vllm", WHO)
    for name, ours in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        stock = getattr(DeviceCommunicatorBase, name)
        require_parameters(stock, ("self", "input_", "dim", "sizes"), WHO)
        setattr(CpuCommunicator, name, ours)
    require_attributes(CpuCommunicator, ("all_gather",), WHO)
