"""What a plan says of experts that trainer and engines hold once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_moe_rl import cli
from lora_moe_rl.config.overrides import override
from lora_moe_rl.planner.held import held_parts, shared_bytes
from lora_moe_rl.planner.plan import make
from lora_moe_rl.planner.request import read

RECIPE = str(Path(__file__).parents[3] / "recipes/kimi_k2_thinking.py")
# 60 layers of 384 experts of three matrices of 7,168 x 2,048, an eighth of them on a GPU.
EXPERTS = 60 * 384 * 3 * 7168 * 2048 // 8
# Of a number: 16 bits; 8 and a float32 for 128 x 128; 4 and 16 for 32.
BITS = {"bf16": 16, "fp8": 8 + 32 / 128**2, "int4": 4 + 16 / 32, "mxfp4": 4 + 8 / 32}


def planned(*settings: str):
    request = read([RECIPE, *settings])
    return make(request.facts, request.config, request.assumed)


@pytest.mark.parametrize("form", BITS)
def test_bytes_of_experts_by_format(form):
    plan = planned()
    (experts,) = (part for part in plan.held if part.part == "experts")
    assert experts.trainer[form] == experts.engine[form] == EXPERTS * BITS[form] / 8
    assert experts.together(form, once=True) == experts.together(form, once=False) / 2
    assert shared_bytes(plan.held, form) == experts.trainer[form]


def test_kimi_k2_thinking_fits_one_node_because_its_experts_are_held_once():
    plan, private = planned(), planned("model.held_once=off")
    assert plan.problems == [] and plan.gpus == (8, 8, True)
    assert plan.engine.sequences * plan.config.model.max_length > 250_000
    saved = private.heaviest.memory["base"] - plan.heaviest.memory["base"]
    assert saved == EXPERTS * BITS["int4"] / 8
    assert not private.held and any("turn of the rollout" in p for p in private.problems)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["placement.mode=split"], "GPUs of their own"),
        (["trainer.ep=4"], "1 of 4 ranges, and the engine's of all layers and 1 of 8"),
        (["rollout.ep=false"], "the engine cuts each expert into 8"),
    ],
)
def test_experts_that_cannot_be_shared_are_a_problem_with_the_reason(settings, why):
    plan = planned(*settings)
    (experts,) = (part for part in plan.held if part.part == "experts")
    assert why in experts.why and shared_bytes(plan.held, "int4") == 0
    assert any(f"model.held_once=on: {experts.why}" == problem for problem in plan.problems)
    auto = planned(*settings, "model.held_once=auto")
    assert not any("model.held_once" in problem for problem in auto.problems)


def test_on_the_cpu_only_the_rule_counts():
    request = read([RECIPE])
    config = override(request.config, ["trainer.device=cpu", "trainer.ep=4"])
    (experts,) = (p for p in held_parts(request.facts, config, False) if p.part == "experts")
    assert experts.why == ""


def test_of_several_gpus_it_is_experts_alone_and_of_one_all_but_what_is_small():
    request = read([RECIPE])
    one = override(request.config, ["trainer.world_size=1", "trainer.tp=1", "trainer.ep=1"])
    one = override(one, ["trainer.etp=1", "rollout.tp=1", "rollout.ep=false"])
    for config, held in ((request.config, 1), (one, 5)):
        parts = held_parts(request.facts, config, True)
        assert sum(not part.why for part in parts) == held, [part.why for part in parts]


def test_the_command_says_what_is_shared_and_why_not(capsys):
    assert cli.main(["plan", RECIPE]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "held once: experts" in said and "attention: not done yet" in said
    assert "on several GPUs a run with model.held_once=on is refused yet" in said
    assert cli.main(["plan", RECIPE, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["held"]
    assert [part["part"] for part in held if not part["why"]] == ["experts"]
