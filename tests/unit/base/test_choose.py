"""When a run holds its base once, and what it says where it cannot."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plain_checkpoint import EXPERTS, HIDDEN, KEYS, LAYERS, QUERIES, VOCABULARY, WIDTH, save_plain
from quantised import edit, make_pair
from safetensors.torch import load_file, save_file

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.base import choose
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.run.held_base import held_base


@pytest.fixture
def model(tmp_path) -> Path:
    return save_plain(tmp_path / "model")


def why(model: Path, *settings: str) -> str:
    config = override(RunConfig(), ["model.held_once=on", *settings])
    shape = ModelShape.from_hf_config(json.loads((model / "config.json").read_text()))
    return choose.why_private(config, shape, model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["refit.mode=merged"], "refit.mode=merged writes"),
        (["trainer.device=cuda"], "on the CPU alone"),
        (["rollout.tp=2"], "w13_weight.*and 1 more cannot be shared: the engine cuts each expert"),
        (["model.held_dir=/no/such"], "model.held_dir=/no/such: No such file"),
    ],
)
def test_a_run_that_cannot_says_why(model, settings, message, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert why(model) == ""
    assert re.search(message, why(model, *settings))
    config = override(RunConfig(), ["model.held_once=on", *settings])
    shape = ModelShape.from_hf_config(json.loads((model / "config.json").read_text()))
    with pytest.raises(ConfigError, match="model.held_once=on: "):
        choose.decide(config, shape, model)
    auto = override(config, ["model.held_once=auto"])
    assert re.search(message, choose.decide(auto, shape, model))


VOCABULARIES = {"model.embed_tokens.weight", "lm_head.weight"}
ON_ONE = ["placement.mode=colocated", "trainer.device=cuda"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "placement.mode is not colocated"),
        (["trainer.device=cpu"], "trainer.device=cpu, and the engines are on GPUs"),
        ([*ON_ONE, "trainer.world_size=2"], "world_size=2 is not rollout.engines=1"),
        ([*ON_ONE, "refit.mode=merged"], "refit.mode=merged writes"),
    ],
)
def test_a_run_on_gpus_that_cannot_says_why(model, settings, message, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(choose, "vllm_on_cpu", lambda: False)
    assert re.search(message, why(model, *settings))


def test_on_one_gpu_the_same_is_held_as_on_a_cpu(model, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(choose, "vllm_on_cpu", lambda: False)
    assert why(model, *ON_ONE) == ""
    config = override(RunConfig(), ["model.held_once=on", *ON_ONE])
    shape = ModelShape.from_hf_config(json.loads((model / "config.json").read_text()))
    experts = LAYERS * EXPERTS * 3 * WIDTH * HIDDEN
    linears = LAYERS * (2 * QUERIES + 2 * KEYS) * HIDDEN
    assert choose.held_bytes(config, shape, None) == 2 * (experts + linears + 2 * 128 * HIDDEN)
    assert choose.private(config, shape, None) == {}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
            assert why(model, *ON_ONE).startswith(f"{name} has expandable_segments:True")
    monkeypatch.setattr(choose, "installed", lambda name: "2" if "transformer" in name else None)
    monkeypatch.setattr(choose, "vllm_on_cpu", lambda: False)
    assert "Transformer Engine is installed" in why(model, *ON_ONE)


TWO = [*ON_ONE, "trainer.world_size=2", "trainer.ep=2", "rollout.tp=2", "rollout.ep=true"]


def test_on_two_gpus_each_holds_what_both_ranks_on_it_have(model, monkeypatch, capsys):
    """Experts alone of a trainer that cuts no linears. Ranks that cut both share all but the
    vocabulary, which vLLM pads from 70 to 128 rows."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(choose, "vllm_on_cpu", lambda: False)
    shape = ModelShape.from_hf_config(json.loads((model / "config.json").read_text()))
    experts = LAYERS * EXPERTS * 3 * WIDTH * HIDDEN
    linears = LAYERS * (2 * QUERIES + 2 * KEYS) * HIDDEN
    path = "model.layers.*.self_attn"
    for settings, each, own in (
        (TWO, experts, {f"{path}.qkv_proj.weight", f"{path}.o_proj.weight", *VOCABULARIES}),
        ([*TWO, "trainer.tp=2"], experts + linears, VOCABULARIES),
    ):
        assert why(model, *settings) == ""
        config = override(RunConfig(), ["model.held_once=on", *settings])
        assert choose.gpu_bytes(config, shape, None) == 2 * each // 2
        private = choose.private(config, shape, None)
        assert private.keys() == own
        assert all("the engine on its GPU has" in reason for reason in private.values())
        every = experts + linears + 2 * VOCABULARY * HIDDEN
        small = LAYERS * EXPERTS * HIDDEN + (2 * LAYERS + 1) * HIDDEN
        assert choose.held_share(config, shape, None) == each / (every + small)
        run = SimpleNamespace(
            config=config, spec=SimpleNamespace(shape=shape), private="", model_dir=model
        )
        with held_base(run) as folder:
            assert Path(folder).is_dir()
        said = f"{each / 2**20:,.1f} MiB on each GPU, {each / (every + small):.0%} of the base"
        assert f"hold their base once: {said}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([*TWO, "trainer.ep=1"], "w13_weight.*cannot be shared: .* set trainer.ep=2"),
        ([*TWO, "rollout.ep=false"], "the engine cuts each expert into 2"),
        ([*TWO, "rollout.engines=2"], "world_size=2 is not rollout.engines=2"),
    ],
)
def test_on_two_gpus_what_they_lack_is_an_error_before_anything_starts(
    model, settings, message, monkeypatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(choose, "vllm_on_cpu", lambda: False)
    shape = ModelShape.from_hf_config(json.loads((model / "config.json").read_text()))
    config = override(RunConfig(), ["model.held_once=on", *settings])
    with pytest.raises(ConfigError, match=f"model.held_once=on: .*{message}"):
        choose.decide(config, shape, model)
    assert re.search(
        message, choose.decide(override(config, ["model.held_once=auto"]), shape, model)
    )


@pytest.mark.parametrize("form", ["int4", "mxfp4", "fp8"])
def test_a_quantised_base_is_held_on_a_gpu_where_vllms_kernels_take_its_sizes(
    form, tmp_path, monkeypatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(choose, "vllm_on_cpu", lambda: False)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    packed, _ = make_pair("qwen3_moe", tmp_path / "whole", form, **sizes)
    assert why(packed, *ON_ONE) == ""
    shape = ModelShape.from_hf_config(json.loads((packed / "config.json").read_text()))
    config = override(RunConfig(), ["model.held_once=on", *ON_ONE])
    values = len(shape.moe_layers) * shape.num_experts * 3 * 128 * 128
    bits = {"int4": 4 + 16 / 32, "mxfp4": 4 + 8 / 32, "fp8": 8}[form]
    assert choose.expert_bytes(config, shape, form) == values * bits / 8
    if form != "fp8":
        other = {"hidden_size": 128, "moe_intermediate_size": 96}
        packed, _ = make_pair("qwen3_moe", tmp_path / "padded", form, **other)
        said = why(packed, *ON_ONE)
        assert "routed_experts.w13_weight" in said
        assert "an engine's rank has 96 and 128: use rollout.ep=true" in said


def test_a_cluster_is_refused(model, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "on one machine alone" in why(model)


def test_a_quantised_checkpoint_is_refused(model):
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, model / "model.safetensors")
    assert "is F8_E4M3" in why(model)


def test_an_expert_that_is_not_quantised_as_the_others_is_named(tmp_path):
    packed, _ = make_pair("qwen3_moe", tmp_path, "int4")
    assert why(packed) == ""
    path = "model.layers.1.mlp.experts.2.up_proj"
    edit(packed, **{f"{path}.weight_scale": None})
    assert why(packed) == f"{path} is not quantised, and the base int4"


def test_keys_that_have_no_effect_are_refused():
    for settings, message in (
        (["model.held_dir=/tmp"], "model.held_dir=/tmp has no effect with model.held_once=off"),
        (["algorithm=sft", "model.held_once=on"], "model.held_once=on has no effect"),
        (["model.held_dir=shm"], "model.held_dir=shm is relative"),
    ):
        with pytest.raises(ConfigError, match=message):
            override(RunConfig(), settings)
