"""What has to hold at the end of a run: each check sees what it is for."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from safetensors.numpy import save_file

from lora_moe_rl.chaos import checks
from lora_moe_rl.config import RunConfig

CONFIG = RunConfig(
    data={"generator": "m:rows"},  # type: ignore[arg-type]
    trainer={"steps": 2},  # type: ignore[arg-type]
    algorithm={"prompts_per_step": 3},  # type: ignore[arg-type]
)


def order(*steps: tuple[int, ...]) -> list[dict]:
    return [
        {"step": i, "groups": [{"drawn": row} for row in rows]}
        for i, rows in enumerate(steps, start=1)
    ]


def test_steps_are_each_on_record_once_and_in_turn():
    assert checks.once("steps", [1, 2, 3], 3).passed
    for wrong in ([1, 3], [1, 2, 2, 3], [2, 1, 3], [1, 2, 3, 4], []):
        assert not checks.once("steps", wrong, 3).passed, wrong
    found = checks.once("steps", [1, 2, 2], 3).found
    assert "twice or beyond: [2]" in found and "lacking: [3]" in found


def test_a_prompt_that_is_trained_twice_and_one_that_is_lost_are_named():
    assert checks.tickets(order((0, 1, 2), (4, 3, 5)), CONFIG).passed
    twice = checks.tickets(order((0, 1, 2), (2, 3, 4)), CONFIG)
    assert not twice.passed and "twice: [2]; lost: [5]" in twice.found
    lost = checks.tickets(order((0, 1, 2), (4, 5, 6)), CONFIG)
    assert not lost.passed and "lost: [3]" in lost.found
    assert not checks.tickets(order((0, 1, 2)), CONFIG).passed


def test_rows_that_come_again_are_only_counted():
    file = CONFIG.model_copy(update={"data": RunConfig(data={"path": "x"}).data})  # type: ignore
    assert checks.tickets(order((0, 1, 2), (2, 1, 0)), file).passed
    assert not checks.tickets(order((0, 1, 2), (2, 1)), file).passed


def test_a_sample_that_is_on_record_twice_is_found():
    records = [{"step": 1, "sample": 0}, {"step": 1, "sample": 4}, {"step": 2, "sample": 0}]
    assert checks.samples(records, 2).passed
    assert not checks.samples([*records, records[0]], 2).passed
    assert not checks.samples([], 2).passed and checks.samples([], 0).passed


def test_a_lock_that_is_held_is_found(tmp_path):
    assert checks.free(tmp_path / ".lock").passed
    with FileLock(tmp_path / ".lock"):
        assert not checks.free(tmp_path / ".lock").passed


def test_shared_memory_that_nobody_has_mapped_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "SHARED_MEMORY", tmp_path)
    (tmp_path / "of-before").touch()
    before = checks.shared_memory()
    assert checks.no_shared_memory(before).passed
    left = tmp_path / "left"
    left.write_bytes(bytes(4096))
    found = checks.no_shared_memory(before)
    assert not found.passed and found.found == str(left)
    with open(left, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert checks.no_shared_memory(before).passed


def test_a_process_that_is_left_fails():
    assert checks.no_processes([]).passed
    assert not checks.no_processes(["12 python"]).passed


def test_rewards_are_compared_within_what_chance_makes_of_them():
    draws = np.random.default_rng(0)
    one, other = draws.normal(0.6, 0.05, 200).tolist(), draws.normal(0.6, 0.05, 200).tolist()
    assert checks.rewards(one, other).passed
    worse = [value - 0.1 for value in other]
    assert not checks.rewards(one, worse).passed
    assert checks.rewards([*worse[:150], *one[150:]], other).passed  # only the end counts
    assert not checks.rewards(one[:20], other).passed


def run_of(folder: Path, adapter: dict[str, np.ndarray], samples: str = "{}") -> Path:
    (folder / "adapter").mkdir(parents=True)
    save_file(adapter, folder / "adapter" / checks.ADAPTER)
    for name in ("samples.jsonl", "order.jsonl"):
        (folder / name).write_text(samples)
    return folder


def test_two_runs_are_the_same_to_the_last_bit_or_not(tmp_path):
    value = np.ones(3, dtype=np.float32)
    one = run_of(tmp_path / "one", {"a": value, "b": value})
    same = run_of(tmp_path / "same", {"b": value, "a": value})
    assert all(check.passed for check in checks.same_bits(one, same))
    bit = np.nextafter(value, 2, dtype=np.float32)
    for i, other in enumerate(({"a": value, "b": bit}, {"a": value}, {"a": value, "c": value})):
        folder = run_of(tmp_path / f"other-{i}", other)
        *rest, adapter = checks.same_bits(one, folder)
        assert not adapter.passed and "'b'" in adapter.found and all(c.passed for c in rest)
    folder = run_of(tmp_path / "samples", {"a": value, "b": value}, "{} ")
    assert [check.passed for check in checks.same_bits(one, folder)] == [False, False, True]


def test_a_directory_without_a_run_fails(tmp_path):
    config = RunConfig(logging={"run_dir": str(tmp_path / "none")})  # type: ignore[arg-type]
    (found,) = checks.files(config)
    assert not found.passed


@pytest.mark.parametrize("name", ["steps on record", "steps in order.jsonl", "lock is free"])
def test_what_is_checked_of_a_run_directory(tmp_path, name):
    config = RunConfig(logging={"run_dir": str(tmp_path)}, data={"generator": "m:rows"})  # type: ignore[arg-type]
    (tmp_path / "config.yaml").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert name in {check.name for check in checks.files(config)}


@pytest.mark.parametrize(
    ("happened", "passed"),
    [
        (["engine.kill", "engine.hang", "rank.kill"], [True, True]),
        (["engine.kill", "rank.kill", "disk.full"], [False, True]),
        (["engine.kill", "engine.kill", "controller.kill"], [True, False]),
    ],
)
def test_a_death_that_was_counted_twice_is_found(happened, passed):
    records = [
        {"step": 1},
        {"rollout/restarts": 2, "trainer/restarts": 1.0},
        {"rollout/restarts": 0},
    ]
    found = checks.restarts(happened, records)
    assert [one.passed for one in found] == passed
    assert found[0].found.startswith("2 for ")
