"""Which layouts and forms are verified where none is named: those that the model allows."""

from __future__ import annotations

import pytest
from published_configs import PUBLISHED

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.verify.export import FORMS, _forms
from lora_moe_rl.verify.layouts import chosen, parse_layouts

DEFAULT = "tp2,etp2tp2,ep2"


def spec_of(name: str, **adapter) -> AdapterSpec:
    shape = ModelShape.from_hf_config(PUBLISHED[name])
    return AdapterSpec.build(shape, AdapterConfig(**adapter))


def parse_for(name: str):
    shape = spec_of(name).shape
    return lambda wanted: parse_layouts(wanted, RunConfig(), shape)


def test_a_layout_of_the_default_that_cannot_be_is_left_out_and_said(capsys):
    found = chosen(None, DEFAULT, parse_for("GPT-OSS-20B"), "--layouts")
    assert [layout.name for layout in found] == ["tp2", "ep2"]
    assert capsys.readouterr().err.startswith("left out: etp2tp2: trainer.etp=2 would cut experts")
    found = chosen(None, DEFAULT, parse_for("Qwen3-30B-A3B"), "--layouts")
    assert [layout.name for layout in found] == DEFAULT.split(",")
    assert not capsys.readouterr().err


def test_one_that_is_named_and_a_default_of_which_nothing_can_be_are_errors():
    parse = parse_for("GPT-OSS-20B")
    with pytest.raises(ConfigError, match="--layouts: etp2tp2: trainer.etp=2 would cut"):
        chosen("tp2,etp2tp2", DEFAULT, parse, "--layouts")
    with pytest.raises(ConfigError, match="--layouts: none of etp2tp2,etp2 can be: etp2tp2: "):
        chosen(None, "etp2tp2,etp2", parse, "--layouts")


@pytest.mark.parametrize(
    ("name", "adapter", "left_out"),
    [
        ("Qwen3-30B-A3B", {}, ()),
        ("GPT-OSS-20B", {}, ("peft-2d", "merged", "vllm-adapter", "vllm-merged")),
        ("GPT-OSS-20B", {"targets": ("q_proj",)}, ("peft-2d", "vllm-adapter")),
    ],
)
def test_forms_are_those_that_something_reads(name, adapter, left_out):
    spec = spec_of(name, **adapter)
    assert _forms(spec, None) == ([form for form in FORMS if form not in left_out], [])
    assert _forms(spec, ["peft-3d"]) == (["peft-3d"], [])
    for form in left_out:
        with pytest.raises(ConfigError, match=f"--forms has {form}: of GptOssForCausalLM, "):
            _forms(spec, ["peft-3d", form])
