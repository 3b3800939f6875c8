"""Versions into the slots of vLLM's own layers and manager, which have no model here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from mapped_files import Files
from refit_workers import DIRT, SLOT_RANK, Worker
from transport_ranks import make_channel

from lora_moe_rl.refit import receiver
from lora_moe_rl.refit.plan import Box, EngineLayout
from lora_moe_rl.refit.transports import cuda_ipc

pytestmark = pytest.mark.seconds  # imports vLLM


@pytest.fixture(params=["shm", "cuda_ipc"])
def worker(request, tmp_path, monkeypatch) -> Worker:
    """Of a part on the host, and of one that is on a device: here memory of files is one."""
    (tmp_path / "gpu").mkdir()
    monkeypatch.setattr(cuda_ipc.Channel, "port", Files(tmp_path / "gpu"))
    return Worker(make_channel(request.param))


@pytest.mark.parametrize(("dp", "rank"), [(0, 0), (0, 1), (2, 1)])
def test_a_workers_rank_in_its_engine_counts_tp_fastest(dp, rank):
    worker = receiver.Worker()
    worker.rank = rank
    worker.parallel_config = SimpleNamespace(data_parallel_index=dp, world_size=2)
    assert worker.engine_rank == 2 * dp + rank


def test_what_a_slot_held_before_is_gone_and_other_slots_are_as_they_were(worker):
    slot = worker.publish(1)
    assert worker.holds(slot, 1)
    assert all((held == DIRT).all() for held in worker.held(1 - slot).values())


def test_a_slot_is_cleaned_again_when_another_adapter_is_prepared(worker):
    slot = worker.publish(1)
    worker.receiver.refit_drop(1)
    for held in worker.held(slot).values():
        held.fill_(DIRT)
    worker.prepare()
    assert worker.publish(2) == slot and worker.holds(slot, 2)


def test_two_versions_stand_side_by_side_under_ids_of_their_own(worker):
    slots = {version: worker.publish(version) for version in (3, 4)}
    assert sorted(slots.values()) == [0, 1]
    assert all(worker.holds(slot, version) for version, slot in slots.items())
    assert {worker.manager.lora_index_to_id[slot] for slot in slots.values()} == {4, 5}
    assert worker.manager.lora_index_to_id[slots[3]] == 4
    assert worker.receiver.refit_state() == {"versions": [3, 4]}
    assert "no free slot for adapter version 5" in worker.receiver.refit_stage(
        5, worker.send(5)
    ).get("error", "")
    assert worker.receiver.refit_drop(3) == {"dropped": True}
    assert worker.publish(5) == slots[3] and worker.holds(slots[3], 5)
    staged = worker.receiver.refit_stage(6, worker.send(6), [4])
    assert staged["slot"] == slots[4] and worker.receiver.refit_state() == {"versions": [5]}
    # What a version that is refused has sent away is gone all the same.
    refused = worker.receiver.refit_stage(7, worker.send(7, sent_as=6), [5])
    assert "error" in refused and worker.receiver.refit_state() == {"versions": []}


def test_experts_kernels_are_told_of_the_slots_that_hold_a_version_alone(worker):
    slot = worker.publish(1)
    enabled = [layer.adapter_enabled for layer in worker.grouped()]
    assert enabled and all(one[slot] == 1 and one.sum() == 1 for one in enabled)


def test_a_byte_that_changed_on_the_way_is_named_and_nothing_is_served(worker):
    text = worker.send(1)
    entry = worker.layouts[0].entries[3]
    worker.senders[1].buffer[entry.offset + 1] ^= 1
    error = worker.receiver.refit_stage(1, text)["error"]
    assert f"worker 0: adapter version 1: the checksum of {entry.tensor}" in error
    assert "version 1 is not staged" in worker.receiver.refit_commit(1)["error"]
    assert worker.receiver.refit_state() == {"versions": []}


def test_a_version_that_comes_again_damaged_is_not_served_as_it_came_first(worker):
    text = worker.send(1)
    assert "error" not in worker.receiver.refit_stage(1, text)
    worker.senders[1].buffer[worker.layouts[0].entries[-1].offset + 1] ^= 1
    assert "checksum" in worker.receiver.refit_stage(1, text)["error"]
    assert "version 1 is not staged" in worker.receiver.refit_commit(1)["error"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_a_device_or_a_machine_that_is_full_is_answered_and_traced(worker, error, caplog):
    """A raw error would stop the workers of an engine that has several."""

    def full(layout, part):
        raise error("no room")

    worker.receiver._refit_incoming.open = full
    said = worker.receiver.refit_stage(1, worker.send(1))["error"]
    assert said == f"worker 0: {error.__name__}: no room"
    assert "refit_stage failed" in caplog.text and "Traceback" in caplog.text


def test_parts_of_another_version_are_refused(worker):
    error = worker.receiver.refit_stage(2, worker.send(2, sent_as=1))["error"]
    assert "sent adapter version 1 instead of 2" in error


def test_only_the_version_that_was_staged_can_be_served(worker):
    worker.receiver.refit_stage(1, worker.send(1))
    assert "version 2 is not staged" in worker.receiver.refit_commit(2)["error"]
    worker.receiver.refit_drop(1)
    assert "version 1 is not staged" in worker.receiver.refit_commit(1)["error"]


def test_a_tensor_that_differs_from_what_was_sent_is_named(worker):
    text = worker.send(1)
    slot = worker.receiver.refit_stage(1, text)["slot"]
    worker.receiver.refit_commit(1)
    assert worker.receiver.refit_compare(1, text) == {"differing": []}
    assert (
        "the parts of trainer ranks [0] are missing"
        in worker.receiver.refit_compare(1, "[]")["error"]
    )
    worker.held(slot)["layers.0.experts.down.B"].view(-1)[0] += 1
    found = worker.receiver.refit_compare(1, text)
    assert found == {"differing": ["layers.0.experts.down.B"]}


def test_experts_that_vllm_has_placed_otherwise_than_they_arrive_are_refused():
    spread = EngineLayout(SLOT_RANK, dp=2, ep=True)
    Worker(engine=spread)  # half of them, in order
    error = (
        r"experts\.gate\.A: experts 0 to 2 arrive, and vLLM gives this worker the experts "
        r"\[0, 2, 4\]: leave the placement linear"
    )
    with pytest.raises(AssertionError, match=error):
        Worker(engine=spread, placement="round_robin")


def test_rows_of_a_b_that_lie_apart_stand_one_behind_the_other():
    """Of q, k and v in one linear the second of two ranks has rows 4:8, 10:12 and 14:16, which
    arrive from two trainer ranks each."""
    apart = [Box((a, c), (n, 2)) for a, n in ((14, 2), (4, 3), (7, 1), (10, 2)) for c in (0, 2)]
    starts = [box.start[0] for box in receiver._joined(apart)]
    assert starts == [10, 10, 4, 4, 7, 7, 8, 8]
    together = [Box((0, 3, 0), (2, 4, 3)), Box((0, 7, 0), (2, 1, 3))]  # of experts
    assert receiver._joined(together) == together
