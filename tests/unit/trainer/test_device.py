"""Choosing the trainer's device."""

import torch

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
