"""How much Ray may hold in memory on one machine."""

from types import SimpleNamespace

import pytest

from lora_moe_rl.cluster import ray_start

GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "shm", "wanted"),
    [
        (2000, 1000, 500),  # half of /dev/shm
        (2000, 1900, 600),  # three tenths of the memory
        (4, 4, 2),
        (2000, None, 2),  # no /dev/shm
    ],
)
def test_the_store_of_one_machine_goes_by_its_memory(monkeypatch, tmp_path, memory, shm, wanted):
    monkeypatch.setattr(ray_start, "SHM", str(tmp_path if shm else tmp_path / "none"))
    told = SimpleNamespace(total=memory * GIB)
    monkeypatch.setattr(ray_start.psutil, "virtual_memory", lambda: told)
    free = SimpleNamespace(free=(shm or 0) * GIB)
    monkeypatch.setattr(ray_start.shutil, "disk_usage", lambda _: free)
    assert ray_start.store_bytes() == wanted * GIB
