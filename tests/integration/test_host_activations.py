"""Activations of real Megatron ranks on the host: the same gradients, and what the plan says."""

import pytest
import tiny_families
from ranks import random_adapter, random_batch, run_ranks
from torch.multiprocessing.reductions import StorageWeakRef

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.bench.memory import SEQUENCES, TOKENS, Kept
from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.trainer import TrainerMemory

LEAST = 2**10  # of tiny models


def gradients(worker, spec):
    """(loss, norm, {tensor of the adapter: bytes of its gradient}, bytes moved) of a rank."""
    from lora_moe_rl.trainer import host_activations

    host_activations.LEAST_BYTES = LEAST
    worker.engine.adapters.load(random_adapter(spec))
    loss, norm, shards = worker.gradients(*random_batch(spec))
    host = worker.engine.on_host
    moved = 0 if host is None else host.taken()[1]
    return loss, norm, [(s.name, s.start, s.data.tobytes()) for s in shards], moved


def held(worker, spec):
    """(bytes that went to the host, the most of them on the device at once) of one micro-batch."""
    from lora_moe_rl.trainer import host_activations

    host_activations.LEAST_BYTES = LEAST
    host, met, most = worker.engine.on_host, {}, [0]
    pack, leave, unpack = host._pack, host._leave, host._unpack

    def count():
        alive = {}
        for storage, nbytes in met.values():
            if not storage.expired():
                alive[storage.cdata] = nbytes
        most[0] = max(most[0], sum(alive.values()))

    def packed(tensor):
        saved = pack(tensor)
        if saved is not tensor:
            storage = tensor.untyped_storage()
            met[len(met)] = (StorageWeakRef(storage), storage.nbytes())
        return saved

    def left():
        count()
        leave()

    def unpacked(saved):
        tensor = unpack(saved)
        if saved is not tensor:
            for one in saved.layer.stored.values():
                if one.device is not None:
                    met[len(met)] = (StorageWeakRef(one.device), one.device.nbytes())
            count()
        return tensor

    host._pack, host._leave, host._unpack = packed, left, unpacked
    Kept(worker.engine)
    return host.taken()[1], most[0]


def config_of(folder, layout, **trainer):
    trainer |= {"device": "cpu", "micro_batch_tokens": SEQUENCES * TOKENS} | layout
    return RunConfig(model=str(folder), trainer=trainer, adapter={"rank": 4, "alpha": 4})


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", {"world_size": 2, "tp": 2, "ep": 2}),
        ("deepseek_v3", {"world_size": 2, "pp": 2, "vpp": 2}),
    ],
)
def test_gradients_are_the_same_to_the_bit(tmp_path, family, layout):
    """Of several micro-batches, which are between forward and backward at once under pp."""
    tiny_families.save(family, tmp_path)
    layout |= {"micro_batch_tokens": 64}
    found = [
        run_ranks(config_of(tmp_path, layout, offload=offload), tmp_path, gradients)
        for offload in ("none", "activations")
    ]
    for usual, offloaded in zip(*found, strict=True):
        assert usual[:3] == offloaded[:3] and usual[3] == 0 < offloaded[3]


@pytest.mark.parametrize("layout", [{}, {"world_size": 2, "tp": 2, "ep": 2}])
def test_host_and_device_hold_what_the_plan_says(tmp_path, layout):
    tiny_families.save("qwen3_moe", tmp_path)
    config = config_of(tmp_path, layout, offload="activations")
    facts = find(str(tmp_path))
    spec = AdapterSpec.build(facts.shape, config.adapter, servable=False)
    (planned,) = TrainerMemory(facts, spec, "float32").classes(config)
    for moved, most in run_ranks(config, tmp_path, held):
        assert moved == pytest.approx(planned.host_in_step, rel=0.03)
        assert 0.8 < most / planned.memory["activations"] < 1.05
