"""Whole runs whose engine has several ranks: tensor-parallel ones, and data-parallel ones that
share the experts out, on one node and on two."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from cli_run import RECIPE, CliRun, trained

from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ONE_RANK = ("trainer.world_size=1", "trainer.ep=1")
SPREAD = ("rollout.dp=2", "rollout.ep=true")
SAME = ("loss/policy", "optim/grad_norm", "reward/mean", "rollout/response_length")
INTERRUPTED = 130


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict:
    """The first step with an engine of one rank."""
    resolve_model("qwen3_moe")
    folder = tmp_path_factory.mktemp("plain") / "run"
    (record,) = trained(folder, RECIPE, "trainer.steps=1", *ONE_RANK)
    return record


def check(records: list[dict], plain: dict) -> None:
    for name in SAME:
        assert records[0][name] == pytest.approx(plain[name], rel=1e-5, abs=1e-7), name
    check_served(records)


def check_served(records: list[dict]) -> None:
    """Engine and trainer are one policy."""
    for record in records:
        assert record["replay/coverage"] == 1
        assert record["refit/max_diff"] <= 1e-4
        assert record["mismatch/max_abs_logprob_diff"] <= 1e-4


@pytest.mark.whole
def test_an_engine_of_tensor_parallel_ranks(tmp_path):
    """Its workers are started inside a placement group of Ray's."""
    tensor_parallel = ("rollout.tp=2", "rollout.ep=true")
    records = trained(tmp_path / "run", RECIPE, "trainer.steps=2", *ONE_RANK, *tensor_parallel)
    assert [record["adapter/version"] for record in records] == [0, 1]
    check_served(records)


def test_the_first_step_is_that_of_an_engine_of_one_rank(plain, tmp_path):
    records = trained(tmp_path / "run", RECIPE, "trainer.steps=2", *ONE_RANK, *SPREAD)
    assert [record["adapter/version"] for record in records] == [0, 1]
    check(records, plain)


def test_ranks_take_turns_with_the_trainer(plain, tmp_path):
    """Both give their caches back, and have them again before the proof."""
    turns = (*SPREAD, "placement.mode=colocated")
    records = trained(tmp_path / "run", RECIPE, "trainer.steps=2", *ONE_RANK, *turns)
    assert [record["adapter/version"] for record in records] == [0, 1]
    check(records, plain)
    both = 2 * 0.25  # GiB: rollout.cpu_kv_cache_gib of each rank, all touched at its start
    assert records[0]["placement/given_back"] == pytest.approx(both, rel=0.05)
    assert records[1]["placement/given_back"] > 0


def test_ranks_on_two_nodes_train_the_same_and_the_death_of_one_is_noticed(plain, tmp_path):
    """The trainer's rank, the engine's front with a rank, and its other rank: a node for each."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 150_000_000}
    cluster, folder = Cluster(initialize_head=True, head_node_args=node), tmp_path / "run"
    try:
        for _ in range(2):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        run = CliRun(
            *("train", RECIPE, *ONE_RANK, *SPREAD, "rollout.nodes=2", "trainer.steps=1000"),
            *(f"logging.run_dir={folder}", "checkpoint.every=0", "rollout.max_restarts=1"),
            output=tmp_path / "run.out",
            ray_address=cluster.address,
        )
        try:
            run.wait_for(lambda: len(records(folder)) >= 2, "two steps")
            other = on_the_other_node(folder)
            assert other.children()
            for rank in other.children():
                rank.kill()
            run.wait_for_text("engine-0 is back")
            done = len(records(folder))
            run.wait_for(lambda: len(records(folder)) > done, "a step after it")
            run.interrupt()
            assert run.finish() == INTERRUPTED, run.output
        finally:
            run.end()
    finally:
        cluster.shutdown()
    said = " ".join(run.output.split())
    assert "engine-0 died" in said and "restart 1 of rollout.max_restarts=1" in said
    check(records(folder), plain)
    assert records(folder)[-1]["rollout/restarts"] == 1


def records(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return list(read_jsonl(file)) if file.exists() else []


def on_the_other_node(folder: Path) -> psutil.Process:
    """The actor of the engine's ranks there: a process of the cluster, not of the run."""
    log = str(folder / "logs/engine-0-node-1.log")
    for process in psutil.process_iter():
        try:
            mine = os.readlink(f"/proc/{process.pid}/fd/1") == log
            if mine and "ray::RanksOfEngine" in " ".join(process.cmdline()):
                return process
        except (OSError, psutil.Error):
            continue
    raise AssertionError(f"nobody writes {log}")
