"""`lora-moe-rl bench step` with the real engines."""

import json
import os
import subprocess
import sys
import tempfile

import pytest
from transformers import AutoModelForCausalLM

from lora_moe_rl.bench import planned
from lora_moe_rl.bench.model import make_model
from lora_moe_rl.models.tokenizer import stop_ids


@pytest.mark.slow
def test_bench_step_reports_as_json(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("b")  # a short name: vLLM's sockets lie there
    command = [sys.executable, "-m", "lora_moe_rl", "bench", "step", "--steps", "2", "--json"]
    # Ray's sockets cannot lie as deep as the test's folder.
    environment = os.environ | {"TMPDIR": str(tmp_path), "RAY_TMPDIR": tempfile.gettempdir()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # nothing else is printed there
    stages = {"rollout", "reward", "train", "refit", "other", "step"}
    assert result["seconds"].keys() == stages
    parts = sum(value for stage, value in result["seconds"].items() if stage != "step")
    assert parts == pytest.approx(result["seconds"]["step"], rel=0.01)
    assert result["seconds"]["rollout"] > 0 and result["seconds"]["train"] > 0
    assert result["worst"]["replay/coverage"] == 1
    assert 0 < result["worst"]["mismatch/max_abs_logprob_diff"] <= 1e-4
    assert result["steps"] == 2 and result["parameters"] == 1_970_272
    assert not any(tmp_path.glob("lora-moe-rl-bench-*")), "it leaves its files behind"


def test_the_model_of_the_benchmark_has_no_end_of_sequence(tmp_path):
    count = make_model(tmp_path)
    assert stop_ids(str(tmp_path)) == set()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == count == 1_970_272
    assert model.generation_config.eos_token_id is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bench_agents_asks_both_servers_for_the_same_tokens():
    sizes = ("--trajectories", "4", "--rounds", "2", "--at-once", "2")
    command = [sys.executable, "-m", "lora_moe_rl", "bench", "agents", *sizes, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    result = json.loads(done.stdout)
    assert done.returncode in (0, 1), done.stderr  # 1: this machine is busy, or slow
    assert result["turns"] == 4 * 8 and 0 < result["outside_the_engine"] < 1
    for server in result["servers"].values():
        assert server["tokens_per_second"] > 0 and 0.5 < server["cache_hit_rate"] < 1
    assert result["route_bytes_of_a_turn"] < result["full_route_bytes_of_a_turn"] / 4


@pytest.mark.slow
def test_a_rank_holds_the_base_that_is_planned(tmp_path):
    """With few experts: the rest of what a rank holds is not much more than imports leave."""
    planned.save_model(tmp_path, "qwen3_moe", experts=8)
    rows = {row.what: row for row in planned.measure("trainer", tmp_path, "/dev/shm")}
    base = rows["base"]
    # Four layers of 8 experts, and attention, in float32.
    assert base.planned > 4 * 4 * (8 * 3 * 1024 * 512 + 1024 * (2 * 1024 + 2 * 512))
    assert base.ratio == pytest.approx(1, abs=planned.OFF)
    assert rows["adapter, gradients, moments"].measured > 0 < rows[planned.STEP].measured


@pytest.mark.slow
def test_bench_tinker_learns_the_same_by_the_service_as_a_run():
    command = [sys.executable, "-m", "lora_moe_rl", "bench", "tinker", "--steps", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    result = json.loads(done.stdout)
    assert done.returncode in (0, 1), done.stderr  # 1: this machine is busy, or slow
    stages = {"sample", "learn", "publish", "step"}
    assert result["seconds"].keys() == result["of_the_run"].keys() == stages
    assert 0 < result["seconds"]["learn"] < result["seconds"]["step"]
    assert [one["number"] for one in result["growth"]["data"]] == [128, 512, 2048]
