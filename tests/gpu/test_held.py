"""Memory of a GPU that one process owns and another maps, by CUDA's own handles, without vLLM; on
two GPUs a part on each.

Run with `make test-gpu`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lora_moe_rl.adapters.sharding import Box, window
from lora_moe_rl.base.contents import Contents, Kept
from lora_moe_rl.base.ipc import Cuda
from lora_moe_rl.base.ipc_store import map_store, share_store
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.kernels.bit_sums import bit_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPAWN = multiprocessing.get_context("spawn")
CONTENTS = Contents(
    {"model": "a"},
    {name: Kept("bfloat16", (1, 4, 1024, 4096)) for name in ("one", "two", "three")},  # 32 MiB each
)
WHOLE = dict.fromkeys(CONTENTS.tensors, Box((0, 0, 0, 0), (1, 4, 1024, 4096)))
# Two ranks of an engine have two of the four experts each.
HALVES = [
    dict.fromkeys(CONTENTS.tensors, Box((0, first, 0, 0), (1, 2, 1024, 4096))) for first in (0, 2)
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def values(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(CONTENTS.tensors[name].shape, generator=generator).to(torch.bfloat16)


def own(folder: str, gpu: int, boxes: dict[str, Box], shared, end) -> None:
    def fill(name: str, out: torch.Tensor) -> None:
        out.copy_(values(name)[window(boxes[name].start, boxes[name].shape)])

    torch.cuda.set_device(gpu)
    store = share_store(folder, CONTENTS, boxes, fill, Cuda())
    shared.set()
    end.poll(300)  # until it is closed
    store.close()


@contextmanager
def owners(folder, parts: list[dict[str, Box]]) -> Iterator[list]:
    """A process on each of some GPUs that owns a part of every tensor."""
    shared, ends, processes = [SPAWN.Event() for _ in parts], [], []
    for gpu, boxes in enumerate(parts):
        ours, theirs = SPAWN.Pipe()
        arguments = (str(folder), gpu, boxes, shared[gpu], theirs)
        processes.append(SPAWN.Process(target=own, args=arguments))
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    try:
        assert all(one.wait(120) for one in shared)
        yield processes
    finally:
        for end, process in zip(ends, processes, strict=True):
            end.close()
            process.join(60)


@pytest.fixture
def owner(tmp_path):
    with owners(tmp_path, [WHOLE]) as (process,):
        yield process


def used() -> int:
    """Bytes of the GPU that are in use, by whichever process."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_a_process_maps_what_another_holds_and_the_memory_is_there_once(owner, tmp_path):
    bit_sum(torch.zeros(1024, device="cuda"))  # kernels are loaded by their first call
    torch.cuda.synchronize()
    before = used()
    mapped = map_store(tmp_path, CONTENTS, Cuda())
    torch.cuda.synchronize()
    for name in CONTENTS.tensors:
        assert mapped[name].is_cuda and torch.equal(mapped[name].cpu(), values(name))
    torch.cuda.empty_cache()
    assert used() - before < CONTENTS.nbytes / 4
    mapped.check()


def test_a_write_is_found(owner, tmp_path):
    mapped = map_store(tmp_path, CONTENTS, Cuda())
    mapped["two"][0, 3, 1023, 4095] += 1
    with pytest.raises(HeldBaseError, match="two is not what the engine has put there"):
        for _ in CONTENTS.tensors:
            mapped.check()


def test_an_owner_that_is_killed_is_seen(owner, tmp_path):
    mapped = map_store(tmp_path, CONTENTS, Cuda())
    owner.kill()
    owner.join(60)
    with pytest.raises(HeldBaseError, match="the engine that holds the base has ended"):
        mapped.check()
    with pytest.raises(HeldBaseError, match="no engine holds the base there"):
        map_store(tmp_path, CONTENTS, Cuda())


def take(folder: str, gpu: int, box: Box, answers) -> None:
    """A trainer rank on a GPU: what it finds of `box`, or the error."""
    torch.cuda.set_device(gpu)
    try:
        mapped = map_store(folder, CONTENTS, Cuda())
        found = {name: mapped.part(name, box) for name in CONTENTS.tensors}
        mapped.check()
        assert all(part.device.index == gpu for part in found.values())
        answers.put({name: part.cpu().float().numpy() for name, part in found.items()})
    except HeldBaseError as error:
        answers.put(str(error))


def taken(folder, gpu: int, box: Box):
    answers = SPAWN.Queue()
    process = SPAWN.Process(target=take, args=(str(folder), gpu, box, answers))
    process.start()
    found = answers.get(timeout=120)
    process.join(60)
    return found


@two_gpus
def test_each_of_two_gpus_has_its_part_and_a_rank_takes_it_there_alone(tmp_path):
    with owners(tmp_path, HALVES):
        assert len([one for one in tmp_path.iterdir() if one.is_dir()]) == 2
        for gpu, first in ((0, 0), (1, 2), (1, 3)):
            box = Box((0, first, 0, 0), (1, 1, 1024, 4096))
            for name, part in taken(tmp_path, gpu, box).items():
                assert (part == values(name)[:, first : first + 1].float().numpy()).all()
        for gpu, first in ((0, 2), (1, 0)):
            said = taken(tmp_path, gpu, Box((0, first, 0, 0), (1, 1, 1024, 4096)))
            assert f"one: this rank takes experts {first}:{first + 1} of 4" in said


@two_gpus
def test_a_gpu_without_an_owner_is_named(tmp_path):
    with owners(tmp_path, HALVES[:1]):
        said = taken(tmp_path, 1, Box((0, 0, 0, 0), (1, 1, 1024, 4096)))
        assert "no engine holds the base there" in said
