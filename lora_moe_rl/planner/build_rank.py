"""One trainer rank of a layout, built for real and without values.

Megatron-core, its bridge and our adapters run as in a training rank, on the `meta` device and with
torch's fake process groups: a world of thousands of ranks is one process, one rank after the other.
"""

from __future__ import annotations

import json
import logging
import re
import resource
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


@dataclass(frozen=True)
class BuiltRank:
    """What a rank holds.

    base: shape of every frozen tensor, by the names of `planner/base.py`: global layers, the
        rank's experts of a layer stacked.
    ways: over how many ranks each of them is cut, as Megatron marks it.
    adapters: canonical tensor and box of each of the rank's parts of the adapter.
    """

    rank: int
    base: dict[str, tuple[int, ...]]
    ways: dict[str, int]
    adapters: list[tuple[str, Box]]


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
        self.hf_config = hf_config

    def build(self, rank: int) -> BuiltRank:
        with self._groups(rank), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chunks = self._chunks()
            base, ways = {}, {}
            for chunk in chunks:
                for name, tensors in _tensors(chunk).items():
                    (shape,) = {tuple(tensor.shape) for tensor in tensors}
                    of_experts = ".experts." in name
                    base[name] = (len(tensors), *shape) if of_experts else shape
                    ways[name] = self._ways(tensors[0], of_experts)
            from lora_moe_rl.adapters.attach import Adapters

            adapters = [
                (s.name, Box(s.start, tuple(s.tensor[s.index].shape)))
                for s in Adapters(chunks, self.spec, seed=0).slices()
            ]
        return BuiltRank(rank, base, ways, adapters)

    def peak(self) -> int:
        """Most resident memory of this process so far, in bytes."""
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

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
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        stages = range(self.trainer.vpp) if self.trainer.vpp > 1 else [None]
        with torch.device("meta"):
            chunks = [provider.provide(vp_stage=stage) for stage in stages]
            replicate(chunks, self.trainer, self.device)
        return chunks

    def _ways(self, tensor: torch.Tensor, of_experts: bool) -> int:
        cut = getattr(tensor, "tensor_model_parallel", False)
        if of_experts:
            return self.trainer.ep * (self.trainer.etp if cut else 1)
        return self.trainer.tp if cut else 1


def _tensors(chunk: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Parameters and the routers' corrections, by name; of experts, one tensor each."""
    found = [*chunk.named_parameters()]
    found += [(n, b) for n, b in chunk.named_buffers() if n.endswith(".expert_bias")]
    by_name: dict[str, list[torch.Tensor]] = {}
    for name, tensor in found:
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
            layer = chunk.decoder.layers[int(match[1])].layer_number - 1
            rest = re.sub(r"(\.experts\..*\.(?:weight|bias))\d+$", r"\1", match[2])
            name = f"decoder.layers.{layer}.{rest}"
        by_name.setdefault(name, []).append(tensor)
    return by_name
