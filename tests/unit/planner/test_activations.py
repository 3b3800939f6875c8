"""Which modules' activations are counted, and the room that a layer's backward takes."""

from dataclasses import replace

import pytest

from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.planner import activations
from lora_moe_rl.planner.facts import find


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


def test_the_work_of_a_dense_layer_counts_repeated_heads():
    """Gradients of 8 query heads and one of keys and values, 64 wide, as four ranks see them, are
    more than those of the MLP; and the layer's input."""
    dims = {"heads": 8, "kv_heads": 1, "head_dim": 64, "intermediate": 128, "moe_intermediate": 0}
    shape = replace(find("qwen3-30b-a3b").shape, dims=dims, moe_layers=(), hidden_size=256)
    for cp, keys in ((1, 64), (4, 256)):
        trainer = TrainerConfig(world_size=cp, cp=cp)
        assert activations.layer_work(shape, trainer, 2) == 2 * (512 + keys) * 2 + 2 * 256 * 2
