"""A family is one file of `adapters/families/`, and a dense one is a family like any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from published_configs import PUBLISHED, QWEN3_8B, shrunk

from lora_moe_rl.adapters import families
from lora_moe_rl.adapters.families import FAMILIES, ModelShape
from lora_moe_rl.adapters.peft_config import peft_config
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.fit import check_layout, check_replay
from lora_moe_rl.planner.base import num_parameters
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.hardware import Hardware
from lora_moe_rl.planner.plan import Assumed, make
from lora_moe_rl.planner.search import Search
from lora_moe_rl.rollout.device import engine_args
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import send

ROOT = Path(__file__).parents[3]
OFF = {"replay": {"mode": "off"}}


def test_no_other_file_names_an_architecture():
    """Except benchmarks, which make models of one family or another."""
    here = ROOT / "adapters" / "families"
    folders = ("adapters", "refit", "router_replay", "kernels", "lora_moe_rl")
    files = [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        if not file.is_relative_to(here) and "bench" not in file.parts
    ]
    assert len(files) > 150
    named = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in FAMILIES
        if name in file.read_text()
    }
    assert named == set()


def test_a_family_is_found_by_its_file_being_there(tmp_path, monkeypatch):
    """A copy of Qwen3's file under another architecture."""
    text = (Path(families.__file__).parent / "qwen3.py").read_text()
    (tmp_path / "brand_new.py").write_text(text.replace("Qwen3ForCausalLM", "BrandNewForCausalLM"))
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    found = families._found()
    assert set(found) == {*FAMILIES, "BrandNewForCausalLM"}
    monkeypatch.setitem(FAMILIES, "BrandNewForCausalLM", found["BrandNewForCausalLM"])
    shape = ModelShape.from_hf_config(QWEN3_8B | {"architectures": ["BrandNewForCausalLM"]})
    assert shape.num_layers == 36


def test_two_files_of_one_architecture_are_an_error(tmp_path, monkeypatch):
    text = (Path(families.__file__).parent / "qwen3.py").read_text()
    (tmp_path / "again.py").write_text(text)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    with pytest.raises(ValueError, match="again and qwen3 are both of Qwen3ForCausalLM"):
        families._found()


def test_importing_families_imports_neither_torch_nor_transformers():
    code = (
        "import sys, lora_moe_rl.adapters.families\n"
        "print([m for m in ('torch', 'transformers', 'megatron', 'vllm') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_dense_model_has_no_experts_anywhere():
    shape = ModelShape.from_hf_config(shrunk(QWEN3_8B))
    assert (shape.num_experts, shape.top_k, shape.moe_layers) == (0, 0, ())
    spec = AdapterSpec.build(shape, RunConfig(adapter={"rank": 4}).adapter)
    assert len(spec.sites) == 4 * 7
    assert all(site.num_experts is None for site in spec)
    with pytest.raises(ConfigError, match="adapter.expert_rank=2 has no effect"):
        AdapterSpec.build(shape, RunConfig(adapter={"rank": 4, "expert_rank": 2}).adapter)


def test_peft_gets_the_linears_of_a_dense_model_as_modules():
    config = RunConfig(adapter={"rank": 4})
    shape = ModelShape.from_hf_config(QWEN3_8B)
    written = peft_config(AdapterSpec.build(shape, config.adapter), config)
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (written["target_modules"], written["target_parameters"]) == (names, None)


def test_an_engine_of_a_dense_model_is_not_asked_for_routes():
    for name, asked in (("Qwen3-8B", False), ("Qwen3-30B-A3B", True)):
        config = RunConfig(adapter={"rank": 4})
        spec = AdapterSpec.build(ModelShape.from_hf_config(PUBLISHED[name]), config.adapter)
        args = engine_args(config, spec, "model", 0, cpu=False)
        assert args["enable_return_routed_experts"] is asked


def test_a_dense_model_has_routes_without_columns():
    table = RouteTable.build([None, np.zeros((2, 0, 0), np.int64)], [3, 2], (), 0, 0)
    sent = send(table, [(), ()])
    assert (sent.num_samples, sent.num_rows, sent.blocks) == (2, 5, ())
    assert len(sent.incomplete) == 0 and table.coverage == 1.0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "replay.mode=r3 .* this Qwen3ForCausalLM is dense.* set replay.mode=off"),
        ({"replay": {"mode": "r2"}}, "replay.mode=r2 .* set replay.mode=off"),
        ({"trainer": {"world_size": 2, "ep": 2}}, "trainer.ep=2 .* set trainer.ep=1"),
        ({"trainer": {"world_size": 2, "tp": 2, "etp": 2}}, "set trainer.etp=1"),
        ({"rollout": {"tp": 2, "ep": True}}, "rollout.ep=true .* set rollout.ep=false"),
    ],
)
def test_options_about_experts_are_refused_for_a_dense_model(sections, message):
    shape = ModelShape.from_hf_config(QWEN3_8B)
    with pytest.raises(ConfigError, match=message):
        config = RunConfig.model_validate(sections)
        check_layout(shape, config)
        check_replay(shape, config)
    check_replay(shape, RunConfig.model_validate(OFF))


def test_a_dense_model_is_planned():
    facts = find("qwen3-8b")
    assert num_parameters(facts) == 8_190_735_360
    config = RunConfig.model_validate({"trainer": {"world_size": 4, "tp": 2, "pp": 2}})
    assumed = Assumed(Hardware(8), "bf16", "bf16", Lengths(512, 512))
    plan = make(facts, config, assumed)
    assert plan.problems == []
    assert plan.routes.token == 0
    assert plan.seconds.step > 0
    proposals = Search(facts, config, assumed).best(3)
    assert {p.config.trainer.ep for p in proposals} == {1}
