"""What compares in float32, where engines are on GPUs: vLLM's kernels of adapters take 16 bits
alone."""

from __future__ import annotations

import pytest

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cli import main
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.planner.facts import find
from lora_moe_rl.rollout import device
from lora_moe_rl.verify import export, refit


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch):
    for module in (device, export, refit):
        monkeypatch.setattr(module, "vllm_on_cpu", lambda: False)


def spec_of(preset: str) -> AdapterSpec:
    return AdapterSpec.build(find(preset).shape, AdapterConfig(rank=8))


@pytest.mark.parametrize("command", ["replay", "async", "base"])
def test_refused_before_the_model_is_looked_for(command, capsys):
    assert main(["verify", command, "--model", "not/there"]) == 2
    said = capsys.readouterr().err
    assert f"verify {command} compares in float32" in said and "verify refit" in said


def test_refits_are_compared_in_bfloat16():
    config, spec = refit.make_config("x"), spec_of("qwen3_30b_a3b")
    assert config.trainer.dtype == "bfloat16"
    engines, left_out = refit._engines(None, config, spec, None)
    assert [engine.name for engine in engines] == ["tp1", "tp2", "tp2ep", "tp2fs"] and not left_out
    assert refit.make_config("x", ["trainer.dtype=float32"]).trainer.dtype == "float32"


def test_a_verification_without_an_engine_is_none():
    config = with_settings(refit.make_config("x"), {"trainer": {"dtype": "float32"}})
    with pytest.raises(ConfigError, match="none of the default can be: tp1: .* 16 bits alone"):
        refit._engines(None, config, spec_of("qwen3_30b_a3b"), None)


@pytest.mark.parametrize(
    ("preset", "left_out"),
    [("qwen3_30b_a3b", ["vllm-adapter"]), ("moonlight_16b_a3b", ["vllm-adapter", "vllm-merged"])],
)
def test_forms_that_are_served_are_left_out_with_a_word(preset, left_out):
    spec = spec_of(preset)
    forms, said = export._forms(spec, None)
    assert [line.partition(":")[0] for line in said] == left_out
    assert list(forms) == [form for form in export.FORMS if form not in left_out]
    with pytest.raises(ConfigError, match="vllm-adapter: .* 16 bits alone; .*serve-check"):
        export._forms(spec, ["merged", "vllm-adapter"])
    assert export._forms(spec, ["merged"]) == (["merged"], [])
