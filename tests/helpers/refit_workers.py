"""A worker on the slots of vLLM's own layers and manager, which have no model here."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import torch
from published_configs import QWEN3_30B_A3B, shrunk
from refit_ranks import make_layouts, make_senders

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.refit import parts
from lora_moe_rl.refit.plan import EngineLayout
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY

SLOTS, SLOT_RANK = 2, 8
SHAPE = ModelShape.from_hf_config(shrunk(QWEN3_30B_A3B) | {"num_hidden_layers": 1})
DIRT = 7.0  # what a slot may hold before: of vLLM's own loader, of another adapter


ONE = EngineLayout(SLOT_RANK)


def make_experts(engine: EngineLayout, placement: str):
    """vLLM's map of the experts of worker 0 of an engine."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    ways = engine.ranks if engine.ep else 1
    sizes = {"tp_size": engine.tp, "pcp_size": 1, "dp_size": 1, "ep_size": ways, "sp_size": 1}
    places = {"tp_rank": 0, "pcp_rank": 0, "dp_rank": 0, "ep_rank": 0}
    rest = {"use_ep": engine.ep, "all2all_backend": "naive", "enable_eplb": False}
    spread = FusedMoEParallelConfig(**sizes, **places, **rest)
    return ExpertMapManager(1, 1, SHAPE.num_experts, 0, 2, spread, placement, False)


def make_manager(layouts, engine: EngineLayout = ONE, placement: str = "linear"):
    """vLLM's manager, with dirty layers for the modules that the layouts name."""
    from vllm.lora.layers import FusedMoEWithLoRA
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager

    def buffers(entries, matrix: str, slice_: int, extra: tuple[int, ...]) -> torch.Tensor:
        (shape,) = {e.box.shape for e in entries if (e.matrix, *e.slices) == (matrix, slice_)}
        place = -2 if matrix == "A" else -1
        shape = tuple(SLOT_RANK if i == len(shape) + place else n for i, n in enumerate(shape))
        return torch.full((SLOTS, *extra, *shape), DIRT)

    def layer_of(entries):
        grouped = entries[0].site.endswith(("gate", "up", "down"))
        kind = FusedMoEWithLoRA if grouped else BaseLinearLayerWithLoRA
        layer = kind.__new__(kind)
        torch.nn.Module.__init__(layer)
        stacks = [
            tuple(
                buffers(entries, m, i, () if grouped else (1,)) for i in range(3 if grouped else 1)
            )
            for m in "AB"
        ]
        if grouped:
            (gate_a, down_a, up_a), (gate_b, down_b, up_b) = stacks
            layer._w13_slices = 2
            layer.w13_lora_a_stacked, layer.w13_lora_b_stacked = (gate_a, up_a), (gate_b, up_b)
            layer.w2_lora_a_stacked, layer.w2_lora_b_stacked = (down_a,), (down_b,)
            layer.adapter_enabled = torch.zeros(SLOTS + 1, dtype=torch.int)
            experts = SimpleNamespace(expert_map_manager=make_experts(engine, placement))
            layer.base_layer = SimpleNamespace(routed_experts=experts)
        else:
            layer.n_slices = 1
            layer.lora_a_stacked, layer.lora_b_stacked = stacks
        return layer

    by_module: dict[str, list] = {}
    for layout in layouts:
        for entry in layout.entries:
            if 0 in entry.targets:
                by_module.setdefault(entry.module, []).append(entry)
    manager = LRUCacheLoRAModelManager.__new__(LRUCacheLoRAModelManager)
    manager.lora_config = SimpleNamespace(
        lora_dtype=torch.float32, max_lora_rank=SLOT_RANK, max_loras=SLOTS, max_cpu_loras=SLOTS
    )
    manager._registered_adapters = AdapterLRUCache(SLOTS, manager.deactivate_adapter)
    manager._active_adapters = AdapterLRUCache(SLOTS, manager._deactivate_adapter)
    manager.lora_index_to_id = [None] * SLOTS
    manager.device = torch.device("cpu")
    manager.modules = {module: layer_of(entries) for module, entries in by_module.items()}
    return manager


class Worker:
    """A worker of rank 0 that is prepared for an adapter of rank 4, and the trainer that sends.
    `placement`: of experts over the engine's ranks."""

    def __init__(
        self,
        channel: Channel = SHARED_MEMORY,
        engine: EngineLayout = ONE,
        placement: str = "linear",
    ):
        from lora_moe_rl.refit.receiver import Receiver

        config = AdapterConfig(targets=("o_proj", "experts.*"), rank=4, alpha=4)
        self.channel = channel
        self.spec = AdapterSpec.build(SHAPE, config)
        self.layouts = make_layouts(self.spec, engine=engine)
        self.manager = make_manager(self.layouts, engine, placement)
        self.receiver = Receiver()
        self.receiver.rank = 0
        self.receiver.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1)
        runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=self.manager))
        self.receiver.model_runner = runner
        self.senders = {}  # a part goes with its sender
        self.prepare()

    def prepare(self) -> None:
        layouts = parts.to_json(self.layouts)
        answer = self.receiver.refit_prepare(layouts, self.channel.to_json())
        assert "error" not in answer, answer["error"]

    def tensors(self, version: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(version)
        shapes = self.spec.tensor_shapes.items()
        return {name: draw.standard_normal(shape, np.float32) for name, shape in shapes}

    def send(self, version: int, sent_as: int | None = None) -> str:
        (sender,) = make_senders(
            self.layouts, self.spec, self.tensors(version), TrainerConfig(), self.channel
        )
        self.senders[version] = sender
        return json.dumps([asdict(sender.send(version if sent_as is None else sent_as))])

    def send_again(self, version: int) -> str:
        """The same values as another version, from the same sender."""
        sender = next(iter(self.senders.values()), None)
        return self.send(version) if sender is None else json.dumps([asdict(sender.send(version))])

    def publish(self, version: int) -> int:
        """The slot that it went into."""
        slot = self.receiver.refit_stage(version, self.send(version))["slot"]
        answer = self.receiver.refit_commit(version)
        assert answer["slot"] == slot and answer["peak_gib"] > 0
        return slot

    def held(self, slot: int) -> dict[str, torch.Tensor]:
        """Of a slot, by canonical tensor."""
        slots = self.receiver._refit_slots
        return {
            e.tensor: slots.buffer(e.module, *e.slices, e.matrix)[slot]
            for e in self.layouts[0].entries
        }

    def grouped(self) -> list:
        """vLLM's layers of routed experts."""
        return [layer for layer in self.manager.modules.values() if hasattr(layer, "_w13_slices")]

    def holds(self, slot: int, version: int) -> bool:
        """Whether the version is there, and zeros beyond its rank."""
        wanted = self.tensors(version)
        for name, held in self.held(slot).items():
            whole = torch.from_numpy(wanted[name])
            rest = SLOT_RANK - whole.shape[-2 if name.endswith("A") else -1]
            padding = (0, 0, 0, rest) if name.endswith("A") else (0, rest)
            if not torch.equal(held, torch.nn.functional.pad(whole, padding)):
                return False
        return True
