"""What a plan says of experts that trainer and engines hold once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_moe_rl import cli
from lora_moe_rl.config.overrides import override
from lora_moe_rl.planner import tables
from lora_moe_rl.planner.held import HeldPart, held_parts, shared_bytes
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
    shared = shared_bytes(plan.facts, plan.config, 0, form, 8)
    assert shared == sum(part.shared[form] for part in plan.held) >= experts.trainer[form]
    assert experts.shared == experts.trainer


def test_kimi_k2_thinking_fits_one_node_because_its_experts_are_held_once():
    plan, private = planned(), planned("model.held_once=off")
    assert plan.problems == [] and plan.gpus == (8, 8, True)
    assert plan.engine.sequences * plan.config.model.max_length > 250_000
    saved = private.heaviest.memory["base"] - plan.heaviest.memory["base"]
    # All but routers and norms of the rank is shared: 61 layers, hidden 7,168.
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    assert plan.heaviest.memory["base"] == 2 * (60 * 384 * 7168 + norms)
    assert saved == private.heaviest.base_bytes["int4"] - plan.heaviest.memory["base"]
    assert not private.held and any("turn of the rollout" in p for p in private.problems)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["placement.mode=split"], "GPUs of their own"),
        (
            ["trainer.ep=4"],
            "takes experts 0:96 of 384, and rank 0 of the engine on its GPU has experts 0:48 of "
            "384: set trainer.ep=8",
        ),
        (["rollout.ep=false"], "the engine cuts each expert into 8"),
    ],
)
def test_experts_that_cannot_be_shared_are_a_problem_with_the_reason(settings, why):
    plan = planned(*settings)
    (experts,) = (part for part in plan.held if part.part == "experts")
    assert why in experts.why and experts.shared["int4"] == 0
    assert any(f"model.held_once=on: {experts.why}" == problem for problem in plan.problems)
    auto = planned(*settings, "model.held_once=auto")
    assert not any("model.held_once" in problem for problem in auto.problems)


def test_on_the_cpu_only_the_rule_counts():
    request = read([RECIPE])
    config = override(request.config, ["trainer.device=cpu", "trainer.ep=4"])
    (experts,) = (p for p in held_parts(request.facts, config, "int4", 1) if p.part == "experts")
    assert experts.why == ""


def parts_of(*settings: str) -> dict[str, HeldPart]:
    request = read([RECIPE])
    config = override(request.config, settings)
    return {part.part: part for part in held_parts(request.facts, config, "int4", 8)}


def test_on_as_many_gpus_as_ranks_all_but_what_is_small_is_shared():
    one = ("world_size=1", "tp=1", "ep=1", "etp=1")
    alone = [f"trainer.{word}" for word in one] + ["rollout.tp=1", "rollout.ep=false"]
    for settings in ([], alone):
        found = parts_of(*settings)
        assert {name for name, part in found.items() if part.why} == {"router", "norms"}


def test_a_trainer_that_cuts_no_linears_shares_experts_and_what_engines_do_not_cut():
    """MLA's two linears before the heads: 1,536 and 576 rows of 7,168, in 61 layers."""
    found = parts_of("trainer.tp=1")
    shared = {name for name, part in found.items() if part.shared["int4"]}
    assert shared == {"experts", "attention"}
    assert found["attention"].shared["int4"] == 2 * 61 * (1536 + 576) * 7168
    assert "rank 0 of the engine on its GPU has" in found["attention"].why
    apart = 64 * (1536 * 192 + 512 * 256 + 7168 * 128)  # of 64 heads, what is after them
    twice = found["attention"].together("int4", once=True) - found["attention"].engine["int4"]
    assert twice == 2 * 61 * apart


def test_pipeline_stages_share_their_own_layers():
    """Of two engines of four ranks: each stage of the trainer stands on the GPUs of one."""
    request = read([RECIPE])
    words = ["trainer.pp=2", "trainer.tp=4", "trainer.ep=4", "rollout.engines=2", "rollout.tp=4"]
    config = override(request.config, words)
    experts = 384 // 4 * 3 * 7168 * 2048 * BITS["int4"] / 8  # of a layer
    plan = make(request.facts, config, request.assumed)
    private = make(request.facts, override(config, ["model.held_once=off"]), request.assumed)
    for mine, alone in zip(plan.classes, private.classes, strict=True):
        layers = [layer for layer in mine.layers if layer]  # the first is dense
        saved = alone.memory["base"] - mine.memory["base"]
        assert saved > len(layers) * experts
        routers = 2 * 384 * 7168 * len(layers)
        norms = mine.memory["base"] - routers
        assert 0 < norms < 2 * (len(mine.layers) + 1) * (2 * 7168 + 1536 + 512)
    assert len(plan.classes) == 2


def test_several_nodes_are_refused():
    request = read([RECIPE])
    (experts,) = (
        part
        for part in held_parts(request.facts, request.config, "int4", 4)
        if part.part == "experts"
    )
    assert "on several nodes" in experts.why and experts.shared["int4"] == 0


def test_the_command_says_what_is_shared_and_why_not(capsys):
    assert cli.main(["plan", RECIPE]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "held once: embeddings, attention, experts, shared experts, dense MLPs router: " in said
    assert "planned ahead" not in said
    once, embeddings, attention, *_ = tables._why_twice(planned("trainer.tp=1"))
    assert once == "held once: attention in part, experts"
    where = "trainer rank 0 takes all, and rank 0 of the engine on its GPU has rows 0:"
    assert embeddings == f"  embeddings: {where}20480 of 163840"
    assert attention == f"  attention: {where}1536 of 12288"
    assert cli.main(["plan", RECIPE, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["held"]
    assert {part["part"] for part in held if part["why"]} == {"router", "norms"}
    assert all(
        part["shared"]["int4"] == part["trainer"]["int4"] for part in held if not part["why"]
    )


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("qwen3-next-80b-a3b", "a model with linear attention"),
        ("ling-mini-2.0", "a model with q, k and v"),
    ],
)
def test_a_model_of_which_nothing_is_shared_is_planned(model, why, capsys):
    words = ["plan", "--model", model, "--gpus", "8", "placement.mode=colocated", "--json"]
    assert cli.main([*words, "model.held_once=auto"]) == 0
    held = json.loads(capsys.readouterr().out)["held"]
    assert held and all(not any(part["shared"].values()) for part in held)
    assert all(part["why"].startswith(why) for part in held if part["part"] == "experts")
