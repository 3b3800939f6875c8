"""Ranks that send an adapter, without a trainer: whole tensors cut as a layout cuts them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from lora_moe_rl.adapters.sharding import window
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.refit.parts import STORAGE, PartLayout, part_layouts
from lora_moe_rl.refit.plan import EngineLayout, TrainerRank, make_plan, trainer_ranks
from lora_moe_rl.refit.sender import Held, Sender
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY
from lora_moe_rl.rollout.facts import Dtype, slot_rank

Tensors = Mapping[str, np.ndarray]


def held_by(rank: TrainerRank, spec: AdapterSpec, tensors: Tensors, device: str = "cpu") -> Held:
    held = {}
    for site in spec:
        if site.layer in rank.layers:
            for matrix in "AB":
                name = f"{site.name}.{matrix}"
                whole = tensors[name]
                held[name] = []
                for box in rank.layout.boxes(site, matrix):
                    part = np.ascontiguousarray(whole[window(box.start, box.shape)], np.float32)
                    held[name].append((box, torch.from_numpy(part).to(device)))
    return held


def make_layouts(
    spec: AdapterSpec,
    trainer: TrainerConfig | None = None,
    engine: EngineLayout | None = None,
    dtype: Dtype = "float32",
) -> list[PartLayout]:
    engine = engine or EngineLayout(slot_rank(spec))
    plan = make_plan(spec, trainer or TrainerConfig(), engine, STORAGE[dtype].itemsize)
    return part_layouts(plan, spec, dtype)


def make_senders(
    layouts: list[PartLayout],
    spec: AdapterSpec,
    tensors: Tensors,
    trainer: TrainerConfig,
    channel: Channel = SHARED_MEMORY,
    device: str = "cpu",
) -> list[Sender]:
    ranks = trainer_ranks(trainer, spec.shape.num_layers)
    scales = {site.name: site.scale for site in spec}
    senders = []
    for layout in layouts:
        held = held_by(ranks[layout.source], spec, tensors, device)
        senders.append(Sender(layout, held, scales, channel.outgoing(layout, "127.0.0.1")))
    return senders
