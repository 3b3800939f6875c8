"""Versions into the slots of vLLM's own layers and manager, which have no model here."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from published_configs import QWEN3_30B_A3B, shrunk
from refit_ranks import make_layouts, make_senders

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.refit import parts

pytestmark = pytest.mark.seconds  # imports vLLM

SLOTS, SLOT_RANK = 2, 8
DIRT = 7.0  # what a slot may hold before: of vLLM's own loader, of another adapter


def make_manager(layouts):
    """vLLM's manager, with dirty layers for the modules that the layouts name."""
    from vllm.lora.layers import FusedMoEWithLoRA
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager

    def buffers(entries, matrix: str, slice_: int, extra: tuple[int, ...]) -> torch.Tensor:
        (shape,) = {e.box.shape for e in entries if (e.matrix, e.slice) == (matrix, slice_)}
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
        else:
            layer.n_slices = 1
            layer.lora_a_stacked, layer.lora_b_stacked = stacks
        return layer

    by_module: dict[str, list] = {}
    for layout in layouts:
        for entry in layout.entries:
            by_module.setdefault(entry.module, []).append(entry)
    manager = LRUCacheLoRAModelManager.__new__(LRUCacheLoRAModelManager)
    manager.lora_config = SimpleNamespace(
        lora_dtype=torch.float32, max_lora_rank=SLOT_RANK, max_loras=SLOTS, max_cpu_loras=SLOTS
    )
    manager._registered_adapters = AdapterLRUCache(SLOTS, manager.deactivate_adapter)
    manager._active_adapters = AdapterLRUCache(SLOTS, manager._deactivate_adapter)
    manager.lora_index_to_id = [None] * SLOTS
    manager.modules = {module: layer_of(entries) for module, entries in by_module.items()}
    return manager


class Worker:
    """A worker of rank 0 that is prepared for an adapter of rank 4, and the trainer that sends."""

    def __init__(self):
        from lora_moe_rl.refit.receiver import Receiver

        shape = ModelShape.from_hf_config(shrunk(QWEN3_30B_A3B) | {"num_hidden_layers": 1})
        config = AdapterConfig(targets=("o_proj", "experts.*"), rank=4, alpha=4)
        self.spec = AdapterSpec.build(shape, config)
        self.layouts = make_layouts(self.spec)
        self.manager = make_manager(self.layouts)
        self.receiver = Receiver()
        self.receiver.rank = 0
        self.receiver.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1)
        runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=self.manager))
        self.receiver.model_runner = runner
        self.senders = {}  # a part goes with its sender
        self.prepare()

    def prepare(self) -> None:
        assert "error" not in self.receiver.refit_prepare(parts.to_json(self.layouts))

    def tensors(self, version: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(version)
        shapes = self.spec.tensor_shapes.items()
        return {name: draw.standard_normal(shape, np.float32) for name, shape in shapes}

    def send(self, version: int, sent_as: int | None = None) -> str:
        (sender,) = make_senders(self.layouts, self.spec, self.tensors(version), TrainerConfig())
        self.senders[version] = sender
        return json.dumps([asdict(sender.send(version if sent_as is None else sent_as))])

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
            e.tensor: slots.buffer(e.module, e.slice, e.matrix)[slot]
            for e in self.layouts[0].entries
        }

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


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_what_a_slot_held_before_is_gone_and_other_slots_are_as_they_were(worker):
    slot = worker.publish(1)
    assert worker.holds(slot, 1)
    assert all((held == DIRT).all() for held in worker.held(1 - slot).values())


def test_a_slot_is_cleaned_again_when_another_adapter_is_prepared(worker):
    slot = worker.publish(1)
    worker.receiver.refit_drop(1)
    for held in worker.held(slot).values():
        held.fill_(DIRT)
    worker.prepare()
    assert worker.publish(2) == slot and worker.holds(slot, 2)


def test_two_versions_stand_side_by_side_under_ids_of_their_own(worker):
    slots = {version: worker.publish(version) for version in (3, 4)}
    assert sorted(slots.values()) == [0, 1]
    assert all(worker.holds(slot, version) for version, slot in slots.items())
    assert {worker.manager.lora_index_to_id[slot] for slot in slots.values()} == {4, 5}
    assert worker.manager.lora_index_to_id[slots[3]] == 4
    assert worker.receiver.refit_state() == {"versions": [3, 4]}
    assert "no free slot for adapter version 5" in worker.receiver.refit_stage(
        5, worker.send(5)
    ).get("error", "")
    assert worker.receiver.refit_drop(3) == {"dropped": True}
    assert worker.publish(5) == slots[3] and worker.holds(slots[3], 5)
    staged = worker.receiver.refit_stage(6, worker.send(6), [4])
    assert staged["slot"] == slots[4] and worker.receiver.refit_state() == {"versions": [5]}
    # What a version that is refused has sent away is gone all the same.
    refused = worker.receiver.refit_stage(7, worker.send(7, sent_as=6), [5])
    assert "error" in refused and worker.receiver.refit_state() == {"versions": []}


def test_a_byte_that_changed_on_the_way_is_named_and_nothing_is_served(worker):
    text = worker.send(1)
    entry = worker.layouts[0].entries[3]
    worker.senders[1].buffer[entry.offset + 1] ^= 1
    error = worker.receiver.refit_stage(1, text)["error"]
    assert f"worker 0: adapter version 1: the checksum of {entry.tensor}" in error
    assert "version 1 is not staged" in worker.receiver.refit_commit(1)["error"]
    assert worker.receiver.refit_state() == {"versions": []}


def test_parts_of_another_version_are_refused(worker):
    error = worker.receiver.refit_stage(2, worker.send(2, sent_as=1))["error"]
    assert "sent adapter version 1 instead of 2" in error


def test_only_the_version_that_was_staged_can_be_served(worker):
    worker.receiver.refit_stage(1, worker.send(1))
    assert "version 2 is not staged" in worker.receiver.refit_commit(2)["error"]
    worker.receiver.refit_drop(1)
    assert "version 1 is not staged" in worker.receiver.refit_commit(1)["error"]


def test_a_tensor_that_differs_from_what_was_sent_is_named(worker):
    text = worker.send(1)
    slot = worker.receiver.refit_stage(1, text)["slot"]
    worker.receiver.refit_commit(1)
    assert worker.receiver.refit_compare(1, text) == {"differing": []}
    assert (
        "the parts of trainer ranks [0] are missing"
        in worker.receiver.refit_compare(1, "[]")["error"]
    )
    worker.held(slot)["layers.0.experts.down.B"].view(-1)[0] += 1
    found = worker.receiver.refit_compare(1, text)
    assert found == {"differing": ["layers.0.experts.down.B"]}
