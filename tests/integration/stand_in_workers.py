"""vLLM workers on GPUs that are names (`stand_in_gpus.py`): imported in their processes, before
they load the model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
from marlin import repacking_on_the_cpu
from stand_in_gpus import port
from vllm.distributed import get_tensor_model_parallel_rank

from lora_moe_rl.base import loader
from lora_moe_rl.base.held import Held
from lora_moe_rl.base.ipc_store import Owned
from lora_moe_rl.kernels.dequant import Packed
from lora_moe_rl.refit.receiver import Receiver
from lora_moe_rl.rollout import cpu_int4


class SharingReceiver(Receiver):
    pass


def held_by(folder, config) -> Held:
    return replace(HELD_BY(folder, config), gpu=True)


class MarlinOnCpu(cpu_int4.Int4LoRAExperts):
    """Multiplies what vLLM lays out for Marlin's kernels, which are CUDA's."""

    def weights(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[Packed, Packed]:
        return Packed("int4_marlin", w1, self.w1_scale), Packed("int4_marlin", w2, self.w2_scale)


def outside_pools(*args) -> Owned:
    held: Held = args[0]
    rank = get_tensor_model_parallel_rank()
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: rank),
        mock.patch.object(torch.cuda, "set_device", lambda index: None),
        mock.patch.object(loader, "Cuda", lambda: port(held.folder, rank)),
    ):
        return OUTSIDE_POOLS(*args)


HELD_BY, OUTSIDE_POOLS = loader.held_by, loader.outside_pools
loader.held_by, loader.outside_pools = held_by, outside_pools
METHOD = loader.wna16.CompressedTensorsWNA16MoEMethod
KEPT_ON_GPUS = {**loader.KEPT, METHOD: (MarlinOnCpu, loader.GROUPED)}
loader.kept_on_gpus = lambda: KEPT_ON_GPUS
# What cpu_int4.py makes vLLM pick.
marlin = cpu_int4.WNA16MoEBackend.MARLIN
cpu_int4.Int4LoRAExperts = MarlinOnCpu
cpu_int4.WNA16MoEBackend = SimpleNamespace(TRITON=marlin)
repacking = repacking_on_the_cpu()
repacking.__enter__()  # for as long as this process lives
