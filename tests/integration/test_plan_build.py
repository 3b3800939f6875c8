"""`lora-moe-rl plan --build`: Kimi-K2 on 512 ranks, built without values and compared."""

from __future__ import annotations

import json

import pytest

from lora_moe_rl import cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAYOUT = ["trainer.world_size=512", "trainer.tp=8", "trainer.pp=8", "trainer.ep=32"]
ENGINE = ["rollout.tp=16", "rollout.ep=true"]


def test_kimi_k2_is_built_as_it_is_planned(capsys):
    options = ["--gpus", "528", "--gpus-per-node", "16", "--gpu", "h200", "--rank", "32"]
    code = cli.main(["plan", "--model", "kimi-k2", *options, *LAYOUT, *ENGINE, "--build", "--json"])
    built = json.loads(capsys.readouterr().out)["build"]
    assert built["passed"] and code in (0, 1)  # 1: it is built, and does not fit
    assert built["unique_parameters"] == 1_026_408_232_448
    assert built["ranks"] == [n for stage in range(8) for n in (64 * stage, 64 * stage + 63)]
    assert {check["what"] for check in built["checks"]} == {
        *("base", "counts", "adapters", "refit", "engine"),
        *("parameters, all", "refit, all"),
    }
    assert all(check["elements"] > 0 for check in built["checks"])
    assert built["peak_bytes"] < 2 * 2**30


TURNS = ["placement.mode=colocated", "trainer.offload=optimizer", "trainer.world_size=8"]


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ("24", ["trainer.world_size=8", "rollout.dp=16", "rollout.nodes=2"]),
        ("8", [*TURNS, "rollout.tp=8"]),
        ("8", [*TURNS, "rollout.tp=8", "model.held_once=on"]),
    ],
)
def test_engines_over_nodes_turns_and_what_is_held_once_are_built_as_planned(gpus, words, capsys):
    """Qwen3-30B: every engine rank has the experts that vLLM gives it."""
    options = ["--model", "qwen3-30b-a3b", "--gpus", gpus, "--gpu", "h200", "--build", "--json"]
    layout = ["trainer.ep=8", "rollout.ep=true", *words]
    code = cli.main(["plan", *options, *layout])
    found = json.loads(capsys.readouterr().out)
    built = found["build"]
    assert built["passed"] and code in (0, 1)
    assert built["unique_parameters"] == 30_532_122_624
    (engine,) = [check for check in built["checks"] if check["what"] == "engine"]
    # 48 layers of gate, up and down, [768 x 2048] each: the first of 8 or 16 ranks has 16 or 8 of
    # the 128 experts, and all of them have rank 16 adapters.
    ranks = 16 if "rollout.dp=16" in words else 8
    assert engine["elements"] == 48 * 3 * 128 * (768 * 2048 // ranks + 16 * (768 + 2048))


@pytest.mark.parametrize(
    ("model", "parameters"), [("gpt-oss-20b", 20_914_757_184), ("gpt-oss-120b", 116_829_156_672)]
)
def test_experts_with_biases_and_sinks_of_each_ranks_heads_are_built_as_planned(
    model, parameters, capsys
):
    layout = ["trainer.world_size=16", "trainer.tp=2", "trainer.pp=2", "trainer.ep=4"]
    options = ["--model", model, "--gpus", "24", "--gpu", "h200", "--build", "--json"]
    code = cli.main(["plan", *options, *layout])
    built = json.loads(capsys.readouterr().out)["build"]
    assert built["passed"] and code in (0, 1)
    assert built["unique_parameters"] == parameters
