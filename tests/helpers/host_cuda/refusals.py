"""What such a GPU says to what a GPU refuses: the last line is JSON, of each the error."""

from __future__ import annotations

import json

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl


@triton.jit
def _one(to):
    tl.store(to, 1.0)


def values() -> None:
    torch.ones(3, device="cuda") * torch.ones(3)


def two() -> None:
    torch.ones(3, device="cuda:0") * torch.ones(3, device="cuda:1")


def index() -> None:
    torch.zeros(3)[torch.zeros(1, dtype=torch.int64, device="cuda")]


def numpy() -> None:
    np.asarray(torch.ones(3, device="cuda"))


def collective() -> None:
    dist.all_reduce(torch.zeros(3))


def kernel() -> None:
    _one[(1,)](torch.zeros(1))


if __name__ == "__main__":
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    found = {}
    for asked in (values, two, index, numpy, collective, kernel):
        try:
            asked()
        except Exception as error:
            found[asked.__name__] = str(error)
    print(json.dumps(found))
