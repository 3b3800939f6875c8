"""A version merged into bfloat16 weights: the same bytes on every worker and after a restart, and
what arrived of it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from published_configs import PUBLISHED, SMALL_DEEPSEEK_V3
from refit_ranks import make_layouts, make_senders
from safetensors.torch import save_file

from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.kernels.merge.rounding import Arrived
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.refit.merged_modules import EXPERTS, Merge, Module, find_arriving, in_partitions
from lora_moe_rl.refit.plan import EngineLayout
from lora_moe_rl.rollout.facts import fused_parts

SHAPE = ModelShape.from_hf_config(SMALL_DEEPSEEK_V3)
SPEC = AdapterSpec.build(SHAPE, AdapterConfig(rank=4, targets=("*", "kv_b_proj")), servable=False)
TWO = TrainerConfig(world_size=2, tp=2)
SIZE = 1e-3  # of the change, over the weights


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Base:
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(SMALL_DEEPSEEK_V3))
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for site in SPEC:
        for expert in range(site.num_experts or 1):
            name = hf_path(SHAPE, site.module).format(expert)
            value = torch.randn(site.out_features, site.in_features, generator=generator)
            weights[f"model.layers.{site.layer}.{name}.weight"] = value.bfloat16()
    save_file(weights, folder / "model.safetensors")
    return Base(str(folder))


def adapter() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    tensors = {}
    for site in SPEC:
        for matrix, shape in (("A", site.shape_A), ("B", site.shape_B)):
            size = 1 if matrix == "A" else SIZE / (site.scale * site.rank**0.5)
            value = size * generator.standard_normal(shape, np.float32)
            tensors[f"{site.name}.{matrix}"] = value
    return tensors


def merged(
    base: Base, engine: EngineLayout, rank: int, rounding="stochastic", seed=0, version=3
) -> tuple[dict[str, torch.Tensor], Merge]:
    """All weights of a worker by name, and of experts those it holds."""
    layouts = make_layouts(SPEC, TWO, engine, "bfloat16")
    buffers, pieces = {}, {}
    for sender in make_senders(layouts, SPEC, adapter(), TWO):
        sender.send(version)
        whole = torch.from_numpy(sender.buffer).view(torch.bfloat16)
        buffers[sender.layout.source] = whole.clone()
        for entry in sender.layout.entries:
            if rank in entry.targets:
                pieces.setdefault(entry.tensor, []).append((sender.layout.source, entry))
    merge = Merge(
        version, buffers, base, torch.bfloat16, torch.device("cpu"), rounding=rounding, seed=seed
    )
    experts = range(5) if not engine.ep else (range(3), range(3, 5))[rank]
    places = SimpleNamespace(places={expert: i for i, expert in enumerate(experts)})
    found: dict[str, torch.Tensor] = {}
    for layer in range(SHAPE.num_layers):
        for path, names in fused_parts(SHAPE, layer).items():
            local = experts if names[0] in EXPERTS else None
            arriving = {
                name: find_arriving(f"layers.{layer}.{name}", base, layer, name, pieces, local)
                for name in names
            }
            module = Module(path, layer, tuple(names), arriving)
            if local is None:
                found |= dict(merge.linear(module))
            else:
                for expert, shards in merge.experts(module, places):
                    found |= {
                        base.name(layer, name, expert): shards[EXPERTS[name]] for name in names
                    }
    return found, merge


WHOLE, TP, EP = (
    EngineLayout(8, tp=tp, ep=ep, merged=True) for tp, ep in ((1, False), (2, False), (2, True))
)


def test_every_worker_and_a_restart_make_the_same_bytes(base):
    expected, merge = merged(base, WHOLE, 0)
    assert len(expected) == sum(site.num_experts or 1 for site in SPEC)
    total = sum(one.change for one in merge.arrived.values())
    for engine in (WHOLE, TP, EP):
        arrived = {}
        for rank in range(engine.tp):
            found, worker = merged(base, engine, rank)
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
            arrived |= worker.arrived
        assert sum(one.change for one in arrived.values()) == pytest.approx(total, rel=1e-12)
    for other in ({"seed": 1}, {"version": 4}):
        found, _ = merged(base, WHOLE, 0, **other)
        assert not any(torch.equal(value, expected[name]) for name, value in found.items())


def test_nearest_loses_much_of_a_small_change_and_stochastic_none_in_the_mean(base):
    """Of 12,000 elements. The mean's standard error is taken from the seeds themselves."""

    def arrives(rounding: str, seed: int) -> float:
        _, merge = merged(base, WHOLE, 0, rounding, seed)
        every = Arrived()
        for one in merge.arrived.values():
            every.add(one)
        return (every.got + every.change - every.error) / (2 * every.change)

    assert arrives("nearest", 0) < 0.65
    found = [arrives("stochastic", seed) for seed in range(16)]
    assert np.mean(found) == pytest.approx(1, abs=4 * np.std(found) / 4)
    assert np.std(found) < 0.08


def test_what_arrived_is_told_by_module(base):
    _, merge = merged(base, EP, 1)
    sites = [site for site in SPEC if site.num_experts is None]
    assert {site.name for site in sites} < merge.arrived.keys()
    experts = {name for name in merge.arrived if ".experts." in name}
    assert experts == {f"layers.1.{name} of experts 3 to 4" for name in EXPERTS}
    weight = base.weight(0, "o_proj").double()
    site = SPEC.by_name["layers.0.o_proj"]
    A, B = (torch.from_numpy(adapter()[f"{site.name}.{m}"]) for m in "AB")
    change = (B * site.scale).bfloat16().double() @ A.bfloat16().double()
    found = merge.arrived["layers.0.o_proj"]
    assert found.change == pytest.approx(float(change.square().sum()), rel=1e-5)
    assert found.value == pytest.approx(float((weight + change).square().sum()), rel=1e-5)


def test_a_linear_with_several_outputs_is_compared_partition_by_partition():
    """By hand: Qwen3.5-35B-A3B has 16 key heads and 32 value heads of 128."""
    shape = ModelShape.from_hf_config(PUBLISHED["Qwen3.5-35B-A3B, by itself"])
    base: Any = SimpleNamespace(shape=shape, name=lambda layer, name: f"{layer}.{name}")
    module = Module("in_proj_qkvz", 0, ("in_proj_qkv", "in_proj_z"), {})
    qkv, z = torch.arange(8192.0)[:, None], torch.full((4096, 1), -1.0)
    weights = [("0.in_proj_qkv.weight", qkv), ("0.in_proj_z.weight", z)]
    found = dict(in_partitions(base, module, weights))
    assert [len(piece) for piece in found.values()] == [2048, 2048, 4096, 4096]
    assert torch.equal(torch.cat([*found.values()]), torch.cat([qkv, z]))
    assert all(name.endswith(".weight") for name in found)
