"""Choosing the trainer's device."""

import pytest
import torch

from lora_moe_rl.config import RunConfig, TrainerConfig, applicable
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.trainer import bridge, device


def test_the_stub_of_transformer_engine_is_not_taken_for_the_package(monkeypatch):
    import sys

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    on_gpu = device.Device("cuda", torch.bfloat16)
    before = on_gpu.transformer_engine
    bridge._stub_transformer_engine()
    try:
        assert on_gpu.transformer_engine == before
    finally:
        for name in ("transformer_engine", "transformer_engine.pytorch"):
            sys.modules.pop(name, None)


def test_context_parallelism_is_refused_where_transformer_engine_would_attend(monkeypatch):
    for module in (device, applicable):
        monkeypatch.setattr(module, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    two = TrainerConfig(world_size=2, cp=2)
    with pytest.raises(ConfigError, match="trainer.cp=2: Transformer Engine"):
        device.Device.choose(two)
    with pytest.raises(ConfigError, match="trainer.cp=2: Transformer Engine"):
        applicable.check_applicable(RunConfig(model="m", trainer=two))
    on_cpu = TrainerConfig(world_size=2, cp=2, device="cpu")
    assert device.Device.choose(on_cpu).kind == "cpu"
    applicable.check_applicable(RunConfig(model="m", trainer=on_cpu))
    assert device.Device.choose(TrainerConfig()).kind == "cuda"


def test_experts_cut_both_ways_are_refused_where_ranks_speak_over_gloo():
    both = {"world_size": 4, "tp": 2, "ep": 2, "etp": 2}
    with pytest.raises(ConfigError, match="trainer.ep=2 with trainer.etp=2: .*gloo"):
        applicable.check_applicable(
            RunConfig(model="m", trainer=TrainerConfig(**both, device="cpu"))
        )
    applicable.check_applicable(RunConfig(model="m", trainer=TrainerConfig(**both)))
    one = TrainerConfig(world_size=4, tp=2, etp=2, device="cpu")
    applicable.check_applicable(RunConfig(model="m", trainer=one))
