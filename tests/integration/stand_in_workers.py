"""vLLM workers on GPUs that are names (`stand_in_gpus.py`): imported in their processes, before
they load the model."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
from stand_in_gpus import port
from vllm.distributed import get_tensor_model_parallel_rank

from lora_moe_rl.base import loader
from lora_moe_rl.base.held import Held
from lora_moe_rl.base.ipc_store import Owned
from lora_moe_rl.refit.receiver import Receiver


class SharingReceiver(Receiver):
    pass


def held_by(folder, config) -> Held:
    return replace(HELD_BY(folder, config), gpu=True)


def outside_pools(held: Held) -> Owned:
    rank = get_tensor_model_parallel_rank()
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: rank),
        mock.patch.object(torch.cuda, "set_device", lambda index: None),
        mock.patch.object(loader, "Cuda", lambda: port(held.folder, rank)),
    ):
        return OUTSIDE_POOLS(held)


HELD_BY, OUTSIDE_POOLS = loader.held_by, loader.outside_pools
loader.held_by, loader.outside_pools = held_by, outside_pools
loader.kept_on_gpus = lambda: loader.KEPT
