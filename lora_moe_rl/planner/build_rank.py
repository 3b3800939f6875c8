"""One trainer rank of a layout, built for real and without values.

Megatron-core, its bridge and our adapters run as in a training rank, on the `meta` device and with
torch's fake process groups: a world of thousands of ranks is one process, one rank after the other.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lora_moe_rl.adapters.sharding import Box
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.trainer.device import Device

# transformers has no class of type kimi_k2: it is DeepSeek-V3's.
_CLASS_OF = {"kimi_k2": "deepseek_v3"}


@dataclass(frozen=True)
class BuiltRank:
    """What a rank holds.

    parameters: shape of every frozen parameter, by chunk and Megatron's name.
    ways: of those that are cut, over how many ranks of the rank's tp or expert-tp group.
    adapters: (canonical tensor, its box, whether this rank is the one that exports it).
    """

    rank: int
    parameters: dict[str, tuple[int, ...]]
    ways: dict[str, int]
    adapters: list[tuple[str, Box, bool]]


class Builder:
    """Builds ranks of one layout of one model."""

    def __init__(self, hf_config: dict[str, Any], spec: AdapterSpec, trainer: TrainerConfig):
        self.spec = spec
        # As on a machine without GPUs, wherever this runs: `meta` has no kernels.
        self.trainer = trainer.model_copy(update={"device": "cpu", "dtype": "bfloat16"})
        self.device = Device.choose(self.trainer)
        self.device.prepare(threads=1)
        from lora_moe_rl.trainer import bridge

        logging.getLogger("megatron").setLevel(logging.ERROR)
        logging.getLogger("megatron.bridge").setLevel(logging.ERROR)
        self.auto_bridge = bridge.load()
        kind = _CLASS_OF.get(hf_config["model_type"], hf_config["model_type"])
        self.hf_config = hf_config | {"model_type": kind}

    def build(self, rank: int) -> BuiltRank:
        with self._groups(rank), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chunks = self._chunks()
            parameters, ways = {}, {}
            for i, chunk in enumerate(chunks):
                for name, parameter in chunk.named_parameters():
                    parameters[f"{i}.{name}"] = tuple(parameter.shape)
                    ways[f"{i}.{name}"] = self._ways(name, parameter)
            from lora_moe_rl.adapters.attach import Adapters

            adapters = Adapters(chunks, self.spec, seed=0)
            held = [
                (s.name, Box(s.start, tuple(s.tensor[s.index].shape)), s.exported)
                for s in adapters.slices()
            ]
        return BuiltRank(rank, parameters, ways, held)

    @contextmanager
    def _groups(self, rank: int) -> Iterator[None]:
        from megatron.core import parallel_state as ps
        from torch.testing._internal.distributed.fake_pg import FakeStore

        from lora_moe_rl.trainer.model import init_model_parallel

        dist.init_process_group(
            "fake", rank=rank, world_size=self.trainer.world_size, store=FakeStore()
        )
        try:
            init_model_parallel(self.trainer, create_gloo_process_groups=False)
            yield
        finally:
            ps.destroy_model_parallel()
            dist.destroy_process_group()

    def _chunks(self) -> list[torch.nn.Module]:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from transformers import AutoConfig

        from lora_moe_rl.trainer.model import make_provider, replicate

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.hf_config))
            source = self.auto_bridge.from_hf_config(AutoConfig.from_pretrained(folder))
            num_layers = self.spec.shape.num_layers
            provider = make_provider(source, self.trainer, num_layers, self.device, load=False)
        provider.perform_initialization = False
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        stages = range(self.trainer.vpp) if self.trainer.vpp > 1 else [None]
        with torch.device("meta"):
            chunks = [provider.provide(vp_stage=stage) for stage in stages]
            replicate(chunks, self.trainer, self.device)
        return chunks

    def _ways(self, name: str, parameter: torch.nn.Parameter) -> int:
        if not getattr(parameter, "tensor_model_parallel", False):
            return 1
        return self.trainer.etp if ".experts." in name else self.trainer.tp
