"""`lora-moe-rl verify refit` on real ranks and engines: right refits pass, faults are named."""

from __future__ import annotations

import json

import pytest
from engine_fixtures import save_random_model

from lora_moe_rl import cli

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    save_random_model("qwen3_moe", folder)
    return folder


def verify(capsys, model, *arguments) -> tuple[int, dict]:
    """Exit code, and what --json says."""
    code = cli.main(["verify", "refit", "--model", str(model), "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_experts_over_two_workers_from_two_layouts(model, capsys):
    """A worker's experts come from another place of a trainer rank than it has them."""
    code, report = verify(
        capsys, model, "--engines", "tp2ep", "--trainers", "pp2,tp2ep2",
        "--transports", "shm,distributed,nixl", "adapter.rank=6", "adapter.expert_rank=3",
    )  # fmt: skip
    assert code == 0 and report["passed"], json.dumps(report, indent=1)
    base, *rows = report["rows"]
    assert base["trainer"] == "" and 0 < base["merged_error"] <= report["tolerance"] == 5e-6
    assert {(row["trainer"], row["transport"]) for row in rows} == {
        (trainer, kind) for trainer in ("pp2", "tp2ep2") for kind in ("shm", "distributed", "nixl")
    }
    for row in rows:
        assert row["unlike"] == [] and row["nbytes"] > 0 and row["effect"] > 1e-3
        assert 0 < row["trainer_error"] <= 5e-6 and 0 < row["merged_error"] <= 5e-6
        assert row["ranks_error"] <= 1e-5 and 0 < row["direct_error"] <= 1e-5
        assert row["from_exact"].keys() == {"engine", "one rank", "trainer"}
        assert all(0 < error <= 1e-5 for error in row["from_exact"].values())


def test_experts_of_another_worker_are_named(model, capsys):
    tensor = "layers.1.experts.down.B"
    code, report = verify(
        capsys, model, "--engines", "tp2ep", "--trainers", "ep2", "--transports", "directory",
        "--fault", f"misplaced:{tensor}",
    )  # fmt: skip
    assert code == 1 and not report["passed"]
    base, row = report["rows"]
    assert base["passed"] and f"{tensor}: experts 4 to 7 arrive, and vLLM gives" in row["failure"]
