"""One GPU: memory that one process owns and another maps, by CUDA's own handles, without vLLM.

Run with `make test-gpu`.
"""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from lora_moe_rl.base.contents import Contents, Kept
from lora_moe_rl.base.ipc import Cuda
from lora_moe_rl.base.ipc_store import map_store, share_store
from lora_moe_rl.errors import HeldBaseError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPAWN = multiprocessing.get_context("spawn")
CONTENTS = Contents(
    {"model": "a"},
    {name: Kept("bfloat16", (4, 1024, 4096)) for name in ("one", "two", "three")},  # 32 MiB each
)
MIB = 2**20


def values(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(CONTENTS.tensors[name].shape, generator=generator).to(torch.bfloat16)


def own(folder: str, shared, end) -> None:
    store = share_store(folder, CONTENTS, WHOLE, lambda name, out: out.copy_(values(name)), Cuda())
    shared.set()
    end.wait(300)
    store.close()


@pytest.fixture
def owner(tmp_path):
    shared, end = SPAWN.Event(), SPAWN.Event()
    process = SPAWN.Process(target=own, args=(str(tmp_path), shared, end))
    process.start()
    assert shared.wait(120)
    yield process
    end.set()
    process.join(60)


def used() -> int:
    """Bytes of the GPU that are in use, by whichever process."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_a_process_maps_what_another_holds_and_the_memory_is_there_once(owner, tmp_path):
    torch.zeros(1, device="cuda")
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
    mapped["two"][3, 1023, 4095] += 1
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
