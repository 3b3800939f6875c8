"""A merged refit without an engine: what travels, what arrives, and the base it is merged into."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from published_configs import SMALL_DEEPSEEK_V3
from refit_ranks import make_layouts, make_senders
from safetensors.torch import save_file

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, RunConfig, TrainerConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import ConfigError, FileError, RefitError
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.refit.plan import EngineLayout, make_plan
from lora_moe_rl.rollout.facts import fused_parts

SHAPE = ModelShape.from_hf_config(SMALL_DEEPSEEK_V3)
TWO = TrainerConfig(world_size=2, tp=2)


def make_spec(**adapter) -> AdapterSpec:
    config = AdapterConfig(**{"rank": 4, "targets": ("*", "kv_b_proj"), **adapter})
    return AdapterSpec.build(SHAPE, config, servable=False)


def received(spec: AdapterSpec, engine: EngineLayout, rank: int, tensors) -> dict[str, np.ndarray]:
    """Every canonical tensor as engine rank `rank` can put it together; NaN where nothing came."""
    layouts = make_layouts(spec, TWO, engine)
    found = {name: np.full(shape, np.nan) for name, shape in spec.tensor_shapes.items()}
    for sender in make_senders(layouts, spec, tensors, TWO):
        sender.send(1)
        whole = torch.from_numpy(sender.buffer).view(torch.float32)
        for entry in sender.layout.entries:
            if rank in entry.targets:
                window = tuple(
                    slice(a, a + n) for a, n in zip(entry.box.start, entry.box.shape, strict=True)
                )
                found[entry.tensor][window] = entry.view(whole).numpy()
    return found


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_every_engine_rank_gets_the_whole_adapter(layout):
    spec = make_spec(expert_layout=layout)
    generator = np.random.default_rng(0)
    tensors = {n: generator.standard_normal(s, np.float32) for n, s in spec.tensor_shapes.items()}
    for rank in range(2):
        found = received(spec, EngineLayout(8, tp=2, merged=True), rank, tensors)
        for name, value in found.items():
            site = spec.by_name[name[:-2]]
            scale = site.scale if name.endswith("B") else 1
            np.testing.assert_array_equal(value, tensors[name] * np.float32(scale))


def test_with_ep_a_rank_gets_the_adapters_of_its_experts():
    spec = make_spec()
    tensors = {name: np.ones(shape, np.float32) for name, shape in spec.tensor_shapes.items()}
    mine = [
        received(spec, EngineLayout(8, tp=2, ep=True, merged=True), rank, tensors)
        for rank in range(2)
    ]
    for name in spec.tensor_shapes:
        came = [np.isfinite(found[name]) for found in mine]
        if ".experts." in name:  # the first rank has what does not divide
            assert came[0][:3].all() and not came[0][3:].any()
            assert came[1][3:].all() and not came[1][:3].any()
        else:
            assert came[0].all() and came[1].all()


def test_kv_b_proj_needs_merged_weights():
    spec = make_spec()
    with pytest.raises(RefitError, match=r"layers.0.kv_b_proj has no adapter slot.*mode=merged"):
        make_plan(spec, TWO, EngineLayout(8), 4)


def test_parts_of_fused_modules_come_in_vllms_order():
    parts = fused_parts(SHAPE, 1)
    assert parts["model.layers.1.self_attn.fused_qkv_a_proj"] == ["q_a_proj", "kv_a_proj"]
    assert parts["model.layers.1.self_attn.kv_b_proj"] == ["kv_b_proj"]
    assert parts["model.layers.1.mlp.experts"] == ["experts.gate", "experts.down", "experts.up"]


@pytest.mark.parametrize("setting", [{"refit": {"slots": 3}}, {"rollout": {"fully_sharded": True}}])
def test_what_applies_to_slots_alone_is_refused(setting):
    config = with_settings(RunConfig(), {"rollout": {"tp": 2}})
    config = with_settings(config, setting)
    with pytest.raises(ConfigError, match="refit.mode=merged: it applies only with .*=adapter"):
        with_settings(config, {"refit": {"mode": "merged"}})


@pytest.fixture
def base_dir(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_DEEPSEEK_V3))
    rewrite(tmp_path)
    return tmp_path


def rewrite(folder, **tensors):
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    save_file(
        {name.format(e): torch.ones(16, 32, **tensors) for e in range(5)},
        folder / "model.safetensors",
    )


def test_a_base_is_checked_before_it_is_read(base_dir):
    Base(str(base_dir)).check(1, "experts.up")
    with pytest.raises(FileError, match="no tensor model.layers.1.mlp.experts.0.down_proj.weight"):
        Base(str(base_dir)).check(1, "experts.down")
    rewrite(base_dir, dtype=torch.int8)
    with pytest.raises(RefitError, match="experts.0.up_proj.weight is I8; refit.mode=merged"):
        Base(str(base_dir)).check(1, "experts.up")
    (base_dir / "config.json").write_text(
        json.dumps(SMALL_DEEPSEEK_V3 | {"moe_intermediate_size": 8})
    )
    with pytest.raises(RefitError, match=r"is \(16, 32\), and config.json makes it \(8, 32\)"):
        Base(str(base_dir)).check(1, "experts.up")


def test_a_base_that_was_written_anew_is_refused(base_dir):
    base = Base(str(base_dir))
    base.check_unchanged()
    rewrite(base_dir)
    with pytest.raises(RefitError, match="model.safetensors has changed since the engine started"):
        base.check_unchanged()


@pytest.mark.parametrize("setting", [{"rounding": "nearest"}, {"warn_lost": 0.5}, {"stop_lost": 2}])
def test_what_applies_to_merged_weights_alone_is_refused(setting):
    with_settings(RunConfig(), {"refit": {"mode": "merged", **setting}})
    with pytest.raises(ConfigError, match="refit.mode=adapter: it applies only with .*=merged"):
        with_settings(RunConfig(), {"refit": setting})


def test_a_bound_that_stops_is_not_below_the_one_that_warns():
    with pytest.raises(ValueError, match=r"warn_lost=0.6 is above refit.stop_lost=0.5"):
        RunConfig(refit={"mode": "merged", "warn_lost": 0.6, "stop_lost": 0.5})
