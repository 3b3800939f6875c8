"""The parts of `bench scale` that grow with the adapter: with its layers, experts, trainer ranks.

A model with DeepSeek-V3's names and tiny widths, so that it is the number of tensors that counts.
"""

from __future__ import annotations

import tempfile
import weakref
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from lora_moe_rl.adapters import peft, peft_import
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.bench.export_model import CONFIG
from lora_moe_rl.bench.refit_model import SendingRank
from lora_moe_rl.bench.report import temporary
from lora_moe_rl.bench.scale_parts import Size, Work
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.refit.parts import PartLayout, check_complete, part_layouts
from lora_moe_rl.refit.plan import EngineLayout, make_plan
from lora_moe_rl.verify.inputs import drawn

BF16 = 2
RUN = RunConfig.model_validate({"adapter": {"rank": 2, "alpha": 2.0}})
TINY = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
ENGINE = EngineLayout(slot_rank=8, tp=8)  # without ep: each rank takes some of every expert


def export(size: Size) -> Work:
    """A PEFT directory, its experts one by one."""
    spec, tensors, folder = *_adapter(size), temporary()
    return _keeping(folder, lambda: peft.write(Path(folder.name, "out"), spec, tensors, RUN))


def reading(size: Size) -> Work:
    """Such a directory, checked and read."""
    spec, tensors, folder = *_adapter(size), temporary()
    peft.write(Path(folder.name, "out"), spec, tensors, RUN)
    return _keeping(folder, lambda: peft_import.read(Path(folder.name, "out"), spec.shape))


def refit_plan(size: Size) -> Work:
    """What goes from which trainer rank to which engine rank, and whether that is all of it."""
    spec = _spec(size)
    return lambda: _layouts(spec, size)


def sending(size: Size) -> Work:
    """One trainer rank's part of a version, packed, checked and summed up."""
    spec = _spec(size)
    rank = SendingRank(RUN, spec, 0)
    rank.prepare_refit(_layouts(spec, replace(size, ranks=1)))
    return lambda: rank.send(1)


def _layouts(spec: AdapterSpec, size: Size) -> list[PartLayout]:
    trainer = TrainerConfig(world_size=size.ranks, ep=size.ranks)
    layouts = part_layouts(make_plan(spec, trainer, ENGINE, BF16), spec, "bfloat16")
    check_complete(layouts, spec, ENGINE)
    return layouts


def _spec(size: Size) -> AdapterSpec:
    own = {"num_hidden_layers": size.layers, "n_routed_experts": size.experts}
    return AdapterSpec.build(ModelShape.from_hf_config(CONFIG | TINY | own), RUN.adapter)


@lru_cache(maxsize=1)
def _adapter(size: Size) -> tuple[AdapterSpec, dict[str, np.ndarray]]:
    spec = _spec(size)
    return spec, drawn(spec.tensor_shapes, seed=0)


def _keeping(folder: tempfile.TemporaryDirectory[str], work: Work) -> Work:
    """`work`, with whose end the folder goes too."""
    weakref.finalize(work, folder.cleanup)
    return work
