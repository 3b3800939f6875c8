"""One GPU: a version of an adapter from one process's memory on it into another's, and through the
host's memory, without vLLM. The same code without a GPU: tests/unit/refit.

Run with `make test-gpu`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transport_ranks import VERSION, all_sent, make_channel, offering

from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit import on_device, parts
from lora_moe_rl.refit.copies import Cuda, Sources
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def offer(pipe) -> None:
    """A trainer's process: two ranks of it have adapters on the GPU."""
    torch.cuda.set_device(0)
    all_ = all_sent(make_channel("cuda_ipc"), "bfloat16", "cuda")
    pipe.send((all_.layouts, all_.sent))
    pipe.recv()
    all_.senders[1].buffer[all_.layouts[1].entries[0].offset] ^= 1
    torch.cuda.synchronize()
    pipe.send(None)
    pipe.recv()


def test_a_version_is_mapped_from_another_process_and_checked_where_it_lies():
    with offering(offer) as there:
        layouts, sent = there.layouts, there.sent
        here = all_sent(SHARED_MEMORY, "bfloat16")
        end = make_channel("cuda_ipc").incoming(0)
        for layout, part, sender in zip(layouts, sent, here.senders, strict=True):
            memory = end.open(layout, part)
            assert memory.is_cuda and part.version == VERSION
            parts.check_received(layout, part, memory, range(len(layout.entries)))
            np.testing.assert_array_equal(memory.cpu().numpy(), sender.buffer)
        there.pipe.send("change a byte")
        there.pipe.recv()
        with pytest.raises(RefitError, match=f"checksum of {layouts[1].entries[0].tensor}"):
            parts.check_received(layouts[1], sent[1], end.open(layouts[1], sent[1]), [0])
        end.mapped.clear()
        ends_well(there)


def ends_well(there) -> None:
    there.pipe.send("end")
    there.process.join(60)
    assert there.process.exitcode == 0


@pytest.mark.parametrize("run_bytes", [2**26, 4096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_on_a_gpu_are_packed_as_on_the_host(dtype, run_bytes, monkeypatch):
    monkeypatch.setattr("lora_moe_rl.refit.sender.DEVICE_RUN_BYTES", run_bytes)
    there = all_sent(SHARED_MEMORY, dtype, "cuda")
    here = all_sent(SHARED_MEMORY, dtype)
    assert all(sender.staged for sender in there.senders)
    for one, other in zip(there.sent, here.sent, strict=True):
        assert one.checksums == other.checksums


def test_sums_are_those_of_the_host():
    boxes = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(2**23)]
    assert on_device.checksums(boxes) == on_device.checksums([box.cuda() for box in boxes])


def test_boxes_are_written_out_of_memory_that_was_locked():
    port, memory = Cuda(), parts.host_memory(2**20)
    memory[:] = np.random.default_rng(0).integers(0, 0x40, 2**20, dtype=np.uint8)
    sources = Sources(port)
    assert [sources.locked(0, memory) for _ in range(2)] == [False, True]
    values = torch.from_numpy(memory[: 4 * 16 * 32]).view(torch.float32).view(16, 32)
    whole = torch.zeros(16, 32, device="cuda")
    part = torch.zeros(16, 64, device="cuda")  # a rank below the slot's
    several = torch.zeros(3, 16, 32, device="cuda")  # of all experts
    for held in (whole, part[:, :32], several):
        port.writer(held, (16, 32))(memory[: 4 * 16 * 32])
    port.wait()
    assert torch.equal(whole.cpu(), values)
    assert torch.equal(part.cpu(), torch.nn.functional.pad(values, (0, 32)))
    assert torch.equal(several.cpu(), values.expand(3, 16, 32))
    assert not sources.locked(0, memory.copy())  # unlocks the one before


def offer_by_nixl(pipe) -> None:
    torch.cuda.set_device(0)
    all_ = all_sent(make_channel("nixl"), "bfloat16", "cuda")
    pipe.send((all_.layouts, all_.sent))
    pipe.recv()


def test_a_version_is_read_by_nixl_out_of_another_process():
    pytest.importorskip("nixl_cu13")
    with offering(offer_by_nixl) as there:
        here = all_sent(SHARED_MEMORY, "bfloat16")
        end = make_channel("nixl").incoming(0)
        for layout, part, sender in 2 * [
            *zip(there.layouts, there.sent, here.senders, strict=True)
        ]:
            memory = end.open(layout, part)
            assert memory.is_cuda and part.version == VERSION
            mine = [i for i, entry in enumerate(layout.entries) if 0 in entry.targets]
            parts.check_received(layout, part, memory, mine)
            for span in (layout.entries[i].span(layout.dtype) for i in mine):
                np.testing.assert_array_equal(memory[span].cpu().numpy(), sender.buffer[span])
        ends_well(there)
