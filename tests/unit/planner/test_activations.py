"""Which modules' activations are counted."""

import pytest

from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.planner import activations


@pytest.mark.parametrize(
    ("device", "installed", "modules"),
    [
        ("cuda", True, activations.FUSED),
        ("auto", True, activations.FUSED),
        ("cuda", False, activations.LOCAL),
        ("cpu", True, activations.LOCAL),
    ],
)
def test_a_gpu_has_fused_modules_where_transformer_engine_is(
    monkeypatch, device, installed, modules
):
    monkeypatch.setattr(activations, "has_transformer_engine", lambda: installed)
    assert activations.modules_of(TrainerConfig(device=device)) == modules
