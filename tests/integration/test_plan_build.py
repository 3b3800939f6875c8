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
        *("base", "counts", "adapters", "refit"),
        *("parameters, all", "refit, all"),
    }
    assert all(check["elements"] > 0 for check in built["checks"])
    assert built["peak_bytes"] < 2 * 2**30
