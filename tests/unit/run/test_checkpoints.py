"""When a run's checkpoints are written, by whom, and what waits for them."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import numpy as np
import pytest
from checkpoint_runs import Disk, Run, no, yes

from lora_moe_rl.adapters import peft
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.errors import AdapterError, CheckpointError, DiskError, RunDirError
from lora_moe_rl.files import checkpoint_writing
from lora_moe_rl.files.checkpoint import newest_step, newest_valid, read_manifest, step_of
from lora_moe_rl.files.checkpoint_writing import KEPT
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.files.trainer_state import Saved
from lora_moe_rl.files.trouble import Trouble
from lora_moe_rl.run import checkpoints as module


def test_others_go_on_while_ranks_write_and_the_next_step_while_the_adapter_is_written(
    tmp_path, monkeypatch
):
    run = Run(tmp_path, Disk(slow=0.3, value=3.0))
    may_write, threads, ticks = threading.Event(), [], [0]
    stock = peft.write

    def slow_write(*args, **more):
        threads.append(threading.current_thread().name)
        assert may_write.wait(20)
        stock(*args, **more)

    monkeypatch.setattr(module.peft, "write", slow_write)

    async def tick():
        while True:
            ticks[0] += 1
            await asyncio.sleep(0.01)

    async def steps(checkpoints, tasks):
        ticking = tasks.create_task(tick())
        await checkpoints.write(2, {"data": {}}, no, tasks)
        during = ticks[0]
        assert during >= 5  # in 0.3 s of which the event loop has all
        assert newest_valid(run.run_dir.checkpoints).path.name == "step-000002"
        assert not run.run_dir.adapter.exists() and run.told == []  # is being written
        may_write.set()
        await checkpoints.finish()
        ticking.cancel()

    run.do(steps)
    assert threads == ["adapter"]
    assert run.weights == {3.0} and run.told == [2] and run.pushed == [("step-000002", True)]
    assert sorted(p.name for p in run.run_dir.path.glob("adapter*")) == ["adapter"]


def test_the_ranks_files_are_not_read_again(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(checkpoint_writing, "sha256_of", read.append)
    run = Run(tmp_path, Disk())

    async def one(checkpoints, tasks):
        await checkpoints.write(2, {"data": {"drawn": 4}}, no, tasks)

    run.do(one)
    assert read == []
    metadata = read_manifest(run.run_dir.checkpoints / "step-000002")
    assert metadata["trainer"] == {"version": 1, "optimizer_steps": 1}
    assert (metadata["step"], metadata["data"]) == (2, {"drawn": 4})


def test_the_book_is_that_of_the_steps_end_whatever_is_drawn_while_it_is_written(tmp_path):
    run, book = Run(tmp_path, Disk(slow=0.1)), {"data": {"drawn": 4}, "done": [3]}

    async def draw():
        book["data"]["drawn"] = 5
        book["done"].append(4)

    async def one(checkpoints, tasks):
        tasks.create_task(draw())
        await checkpoints.write(2, book, no, tasks)

    run.do(one)
    metadata = newest_valid(run.run_dir.checkpoints).metadata
    assert book["data"] == {"drawn": 5}
    assert (metadata["data"], metadata["done"]) == ({"drawn": 4}, [3])


def test_a_rank_that_has_written_nothing_makes_no_checkpoint(tmp_path):
    disk = Disk()
    whole = disk.save
    disk.save = lambda directory: Saved(whole(directory).meta, {})
    run = Run(tmp_path, disk)
    with pytest.raises(CheckpointError, match="trainer ranks have not written trainer_0000"):
        run.do(lambda checkpoints, tasks: checkpoints.write(2, {}, no, tasks))
    assert newest_step(run.run_dir.checkpoints) == 0


def test_weights_that_are_not_finite_are_not_exported_and_end_the_run(tmp_path):
    run = Run(tmp_path, Disk(value=np.nan))
    with pytest.raises(AdapterError, match="NaN or infinite"):
        run.do(lambda checkpoints, tasks: checkpoints.write(2, {}, no, tasks))
    assert not run.run_dir.adapter.exists()


def test_a_full_disk_does_not_end_the_run_which_tries_again_each_minute(tmp_path):
    now, disk = [0.0], Disk(room=False)
    run = Run(tmp_path, disk)
    run.run_dir.trouble = Trouble(run.said.append, lambda: now[0])

    async def steps(checkpoints, tasks):
        for step, seconds in ((1, 0), (2, 1), (3, 30), (4, 59), (5, 62), (6, 90)):
            now[0] = seconds
            if checkpoints.is_due(step, last=False):
                await checkpoints.write(step, {}, no, tasks)
        # Due at steps 2, 4 and 6; at step 5 it was a minute since it was last said.
        assert disk.asked == 4 and len(run.said) == 2 and "no space left" in run.said[0]
        disk.room, now[0] = True, 125
        assert checkpoints.is_due(7, last=False)  # which it is not by itself
        await checkpoints.write(7, {}, no, tasks)
        assert checkpoints.newest == 7
        assert run.said[2:] == ["a checkpoint can be written again"]
        assert not checkpoints.is_due(7, last=False)

    run.do(steps)
    assert run.told == [7]


def test_the_last_checkpoint_waits_for_room_and_not_for_ever(tmp_path, monkeypatch):
    disk = Disk(room=False)
    run = Run(tmp_path, disk)

    def last(checkpoints, tasks):
        return checkpoints.write(9, {}, yes, tasks)

    monkeypatch.setattr(module, "LAST_RETRY_S", 0.0)
    monkeypatch.setattr(module, "LAST_ROOM_S", 0.0)
    with pytest.raises(DiskError):
        run.do(last)
    monkeypatch.setattr(module, "LAST_ROOM_S", 600.0)

    async def room(checkpoints, tasks):
        tasks.create_task(make_room())
        await last(checkpoints, tasks)

    async def make_room():
        await asyncio.sleep(0.1)
        disk.room = True

    again = Run(tmp_path, disk)
    again.do(room)
    assert newest_step(again.run_dir.checkpoints) == 9 and again.told == [9]
    assert disk.asked > 2


def test_a_checkpoint_that_has_become_the_last_while_it_was_written_is_waited_for(
    tmp_path, monkeypatch
):
    """Ctrl-C came meanwhile."""
    disk, stopped = Disk(room=False, slow=0.1), []
    monkeypatch.setattr(module, "LAST_RETRY_S", 0.01)
    run = Run(tmp_path, disk)

    async def stop():
        await asyncio.sleep(0.05)
        stopped.append(True)
        disk.room = True

    async def write(checkpoints, tasks):
        tasks.create_task(stop())
        disk.save, stock = refuse_once(disk), disk.save
        await checkpoints.write(2, {}, lambda: bool(stopped), tasks)
        assert checkpoints.newest == 2 and disk.save == stock

    run.do(write)


def refuse_once(disk):
    """What `save` does the first time, in as long as it takes."""
    stock = disk.save

    def save(directory):
        disk.save = stock
        time.sleep(0.1)
        raise DiskError("no space left on device")

    return save


class Refusing:
    """Writes adapters, but for the first `times`."""

    def __init__(self, monkeypatch, times: int):
        self.times, self.asked, self.stock = times, 0, peft.write
        monkeypatch.setattr(module.peft, "write", self)

    def __call__(self, *args, **more):
        self.asked += 1
        if self.asked <= self.times:
            raise OSError(28, "No space left on device")
        self.stock(*args, **more)


def test_where_only_the_adapter_is_refused_only_the_adapter_is_tried_again(tmp_path, monkeypatch):
    """Also at the run's last step, where the checkpoint that is there stays as it is."""
    disk, refusing = Disk(value=2.0), Refusing(monkeypatch, times=3)
    run = Run(tmp_path, disk)
    monkeypatch.setattr(module, "LAST_RETRY_S", 0.01)

    async def last(checkpoints, tasks):
        await checkpoints.write(9, {"data": {}}, yes, tasks)
        written = (run.run_dir.checkpoints / "step-000009").stat().st_ino
        await checkpoints.finish()
        assert (run.run_dir.checkpoints / "step-000009").stat().st_ino == written

    run.do(last)
    assert disk.asked == 1 and refusing.asked == 4
    assert run.weights == {2.0} and run.told == [9]
    assert "cannot write the adapter" in run.said[0] and "can be written again" in run.said[-1]


def test_the_last_adapter_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    Refusing(monkeypatch, times=10**9)
    run = Run(tmp_path, Disk())
    monkeypatch.setattr(module, "LAST_RETRY_S", 0.01)
    monkeypatch.setattr(module, "LAST_ROOM_S", 0.05)

    async def last(checkpoints, tasks):
        await checkpoints.write(9, {"data": {}}, yes, tasks)
        await checkpoints.finish()

    with pytest.raises(DiskError, match="No space left"):
        run.do(last)
    assert newest_valid(run.run_dir.checkpoints).path.name == "step-000009"


def test_a_newer_checkpoint_takes_the_place_of_an_adapter_that_was_refused(tmp_path, monkeypatch):
    disk, refusing = Disk(value=2.0), Refusing(monkeypatch, times=1)
    run = Run(tmp_path, disk)

    async def two(checkpoints, tasks):
        await checkpoints.write(2, {"data": {}}, no, tasks)
        await asyncio.sleep(0.2)  # it was refused, and would be tried again in a minute
        disk.value = 4.0
        await checkpoints.write(4, {"data": {}}, no, tasks)

    run.do(two)
    assert refusing.asked == 2 and run.told == [4] and run.weights == {4.0}


def test_the_last_checkpoint_is_judged_by_the_evaluation_that_comes_after_it(tmp_path):
    """Until then the one before the last was the best, and stayed though it is too old."""
    best = {"keep": 2, "keep_best": 1, "best_metric": "eval/sums/avg"}
    run = Run(tmp_path, Disk(), **best)
    values = {2: 0.5, 4: 0.25, 6: 0.75}

    async def steps(checkpoints, tasks):
        for step, value in values.items():
            await checkpoints.write(step, {"data": {}}, no, tasks)
            run.run_dir.append(run.run_dir.metrics_file, [{"step": step, "eval/sums/avg": value}])
        await checkpoints.finish()
        assert left() == [2, 4, 6]
        await checkpoints.judge(6)

    def left() -> list[int]:
        return sorted(step_of(path) for path in run.run_dir.checkpoints.glob("step-*"))

    run.do(steps)
    assert left() == [4, 6]
    kept = json.loads((run.run_dir.checkpoints / KEPT).read_text())
    assert kept == {"step-000006": "best: eval/sums/avg 0.75"}


def test_a_list_of_kept_checkpoints_that_is_refused_costs_no_checkpoint(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writing, "replace_file", full)
    disk = Disk()
    run = Run(tmp_path, disk, keep_hours=1.0)

    async def last(checkpoints, tasks):
        await checkpoints.write(9, {"data": {}}, yes, tasks)

    run.do(last)
    assert disk.asked == 1 and run.told == [9]
    assert "cannot write kept.json, or remove old checkpoints" in run.said[0]


def test_a_run_that_fails_waits_for_its_threads_and_one_that_is_ended_at_once_does_not(
    tmp_path, monkeypatch
):
    may_write, stock = threading.Event(), peft.write

    def late(*args, **more):
        assert may_write.wait(20)
        stock(*args, **more)

    monkeypatch.setattr(module.peft, "write", late)
    run = Run(tmp_path, Disk(value=2.0))

    async def fails(checkpoints, tasks):
        await checkpoints.write(2, {"data": {}}, no, tasks)
        await asyncio.sleep(0.1)
        threading.Timer(0.3, may_write.set).start()
        raise ValueError("something else")

    with pytest.raises(ValueError):
        run.do(fails)
    assert run.weights == {2.0}  # though nobody was told any more
    with run.checkpoints._busy:
        started = time.monotonic()
        run.checkpoints.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert time.monotonic() - started < 1


def test_lines_are_on_the_disk_before_the_checkpoint_that_goes_on_from_them(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr("lora_moe_rl.files.run_dir.sync", lambda path: events.append(path.name))
    monkeypatch.setattr(
        checkpoint_writing, "put_in_place", lambda fresh, final, old: fresh.rename(final)
    )
    run = Run(tmp_path, Disk())

    async def one(checkpoints, tasks):
        run.run_dir.append(run.run_dir.metrics_file, [{"step": 2}])
        await checkpoints.write(2, {"data": {}}, no, tasks)

    run.do(one)
    assert events == ["metrics.jsonl"]


def test_a_resize_is_asked_for_until_a_checkpoint_holds_its_ranks(tmp_path, monkeypatch):
    run = Run(tmp_path, Disk(), resize=True)
    saved = []

    async def steps(checkpoints, tasks):
        saved.append(load_config(str(run.run_dir.config_file)))
        monkeypatch.setattr(module, "write_checkpoint", refused)
        await checkpoints.write(2, {"data": {}}, no, tasks)
        saved.append(load_config(str(run.run_dir.config_file)))
        monkeypatch.undo()
        await checkpoints.write(4, {"data": {}}, no, tasks)

    def refused(*_):
        raise DiskError("no space left on device")

    run.do(steps)
    saved.append(load_config(str(run.run_dir.config_file)))
    assert [config.adapter.resize for config in saved] == [True, True, False]
    later = override(saved[-1], ["adapter.rank=4"])
    with pytest.raises(RunDirError, match="adapter.rank was 16 and is now 4"):
        RunDir(later, resume=True).check_usable()
    RunDir(override(later, ["adapter.resize=true"]), resume=True).check_usable()
