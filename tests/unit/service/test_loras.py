"""A client's LoRA in the places of the service's adapter."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.config import AdapterConfig, RunConfig
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.files.untrusted import read_json
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.service.backend import Lora
from lora_moe_rl.service.loras import Cut, Places

MODEL = "qwen3_moe"


def places(**adapter) -> Places:
    config = RunConfig(model=MODEL, adapter={"rank": 16, "expert_rank": 4, **adapter})
    shape = ModelShape.from_hf_config(read_json(resolve_model(MODEL) / "config.json"))
    return Places(config, AdapterSpec.build(shape, config.adapter))


def test_ranks_are_in_the_proportion_of_the_services_own():
    ranks = places().ranks(Lora(8))
    assert {name.rpartition(".")[2]: rank for name, rank in ranks.items()} == {
        "q_proj": 8, "k_proj": 8, "v_proj": 8, "o_proj": 8, "gate": 2, "up": 2, "down": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lora", "modules"),
    [
        (Lora(16, attention=False), {"experts.gate", "experts.up", "experts.down"}),
        (Lora(16, mlp=False), {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_what_is_not_trained_has_no_rank(lora, modules):
    place = places()
    trained = {name for name, rank in place.ranks(lora).items() if rank}
    assert {place.spec.by_name[name].module for name in trained} == modules
    assert {site.module for site in place.exported(lora)} == modules


@pytest.mark.parametrize("settings", [{}, {"rslora": True}, {"expert_alpha": 3.0}])
def test_a_checkpoint_says_a_scale_of_alpha_over_the_models_own_rank(settings):
    """And so does the adapter that is exported."""
    place, lora = places(alpha=20.0, **settings), Lora(4)
    saved = AdapterSpec.build(place.spec.shape, AdapterConfig(**place.saved(lora)))
    exported = place.exported(lora).by_name
    for site in place.spec:
        rank = place.ranks(lora)[site.name]
        alpha = settings.get("expert_alpha", 20.0) if site.num_experts else 20.0
        expected = alpha / (math.sqrt(rank) if settings.get("rslora") else rank)
        assert saved.by_name[site.name].scale == pytest.approx(expected, rel=1e-12)
        assert exported[site.name].scale == pytest.approx(expected, rel=1e-12)
        assert (exported[site.name].rank, saved.by_name[site.name].rank) == (rank, site.rank)


def test_a_cut_adapter_has_the_first_rows_of_a_and_columns_of_b():
    place = places()
    spec = place.exported(Lora(4))
    rng = np.random.default_rng(0)
    whole = {name: rng.normal(size=shape) for name, shape in place.spec.tensor_shapes.items()}
    cut = Cut(whole, spec)
    assert {name: cut[name].shape for name in cut} == spec.tensor_shapes
    name = next(site.name for site in spec if site.num_experts)
    np.testing.assert_array_equal(cut[f"{name}.A"], whole[f"{name}.A"][:, :1])
    np.testing.assert_array_equal(cut[f"{name}.B"], whole[f"{name}.B"][:, :, :1])


@pytest.mark.parametrize(
    ("lora", "settings", "says"),
    [
        (Lora(32), {}, "rank=32: this service has models of rank 1 to 16"),
        (Lora(0), {}, "rank=0: this service has models of rank 1 to 16"),
        (Lora(6), {}, "experts.gate has rank 4 .* use one of 4, 8, 12, 16"),
        (Lora(8, attention=False, mlp=False), {}, "trains nothing here: there are adapters on"),
        (Lora(8, attention=False), {"targets": ("q_proj",), "expert_rank": None}, "on q_proj"),
    ],
)
def test_what_no_model_here_can_be_is_named(lora, settings, says):
    with pytest.raises(ServiceError, match=says):
        places(**settings).check(lora)
