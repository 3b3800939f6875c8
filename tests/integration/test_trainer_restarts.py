"""Trainer ranks that die or hang in a run: it comes to the same bits as one in which none did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from cli_run import RECIPE, CliRun
from ranks import random_adapter, random_batch, run_ranks
from safetensors.numpy import load_file

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import CheckpointError
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model

DYING = Path(__file__).parent / "dying_trainer.py"


def go_on_from_copies(worker, spec):
    """Metrics and adapter of a step that is done, and of the same step once more from the copies
    that were taken before it; and what is said of a damaged copy."""
    batch, routes = random_batch(spec)
    worker.set_adapter(random_adapter(spec))
    worker.update(batch, routes)
    size, mine = worker.copy()
    copies = [None] * dist.get_world_size()
    dist.all_gather_object(copies, mine)
    found = []
    for _ in range(2):
        metrics = worker.update(batch, routes).metrics
        found.append((metrics, worker.export(), worker.version()))
        worker.load_copy(*copies)
    next(iter(copies[-1].tensors["trainer"].values())).flat[0] += 1
    try:
        worker.load_copy(*copies)
    except CheckpointError as error:
        return found, size, str(error)


def test_a_step_from_copies_in_memory_is_the_same_to_the_last_bit():
    config = RunConfig(model="qwen3_moe", trainer={"world_size": 2, "ep": 2, "lr": 1e-3})
    answers = run_ranks(config, resolve_model("qwen3_moe"), go_on_from_copies)
    for (one, again), size, error in answers:
        assert one[0] == again[0] and one[2] == again[2] == 2 and size > 1e5
        for ours, theirs in zip(one[1], again[1], strict=True):
            assert ours.name == theirs.name
            np.testing.assert_array_equal(ours.data, theirs.data, err_msg=ours.name)
        assert error == "the copy of trainer rank 1's state in memory is damaged"


def train(folder: Path, recipe: Path, *settings: str) -> tuple[str, list[str]]:
    run = CliRun(
        "train",
        *(recipe, f"logging.run_dir={folder}", "trainer.steps=5", "checkpoint.every=0", *settings),
        output=folder.with_suffix(".out"),
    )
    try:
        assert run.finish() == 0, run.output
        return run.output, run.leftovers()
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_that_die_and_hang_leave_no_trace_in_what_is_learned(tmp_path, monkeypatch):
    resolve_model("qwen3_moe")
    whole, healed = tmp_path / "whole", tmp_path / "healed"
    train(whole, RECIPE)
    monkeypatch.setenv("MARKS", str(tmp_path))
    files = tmp_path / "refit"
    by_files = "refit.transport=directory", f"refit.directory={files}"
    limits = "trainer.max_restarts=3", "trainer.timeout_s=45"
    output, leftovers = train(healed, DYING, *limits, *by_files)
    print(output)
    assert sorted(one.name for one in files.iterdir()) == ["v000004", "v000005"]
    assert all((one / "manifest.json").exists() for one in files.iterdir())
    assert leftovers == []
    marks = ("died-in-step-2", "hung-in-step-3", "died-in-the-proof")
    assert all((tmp_path / mark).exists() for mark in marks)
    records = list(read_jsonl(healed / "metrics.jsonl"))
    assert [record["trainer/restarts"] for record in records] == [0, 1, 2, 2, 3]
    assert [record["rollout/restarts"] for record in records] == [0] * 5
    log = (healed / "logs/controller.log").read_text()
    assert log.count("all trainer ranks are ended and started anew") == 3
    assert "trainer-1 failed" in log and "no answer within 45 s" in log
    for name in ("samples.jsonl", "order.jsonl"):
        assert (healed / name).read_text() == (whole / name).read_text()
    ours, theirs = (load_file(f / "adapter/adapter_model.safetensors") for f in (healed, whole))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], err_msg=name)
