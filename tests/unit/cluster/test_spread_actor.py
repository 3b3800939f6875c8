"""The end of an engine's ranks on one node, and what becomes of those on the others."""

from __future__ import annotations

import asyncio
import mmap
import os
import time

import pytest
import ray
from ray.exceptions import RayActorError

from lora_moe_rl.cluster.actors import Actor
from lora_moe_rl.cluster.spread_actor import SpreadActor
from lora_moe_rl.config import RunConfig
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.rollout import unnamed

pytestmark = [pytest.mark.seconds, pytest.mark.usefixtures("ray_session")]


class Front:
    """Waits for its ranks, as vLLM's does: for ever."""

    async def meeting(self) -> str:
        return "here"

    async def start(self, meeting: str) -> str:
        return f"front, {meeting}"

    async def wait(self) -> None:
        await asyncio.Event().wait()


class Ranks:
    def __init__(self, fault: str):
        self.fault, self.over = fault, asyncio.Event()

    async def start(self, meeting: str) -> str:
        if self.fault == "start":
            raise RuntimeError("no model there")
        return f"ranks, {meeting}"

    async def share(self, path: str) -> None:
        """As vLLM's processes do among themselves, before they meet the front."""
        with open(path, "wb+") as file:
            file.truncate(4096)
            self.shared = mmap.mmap(file.fileno(), 0)

    async def forget_names(self) -> list[str]:
        return unnamed.forget_names()

    async def ended(self) -> str:
        await self.over.wait()
        return "EngineCore_DP1 with exit code -9"

    async def end(self) -> None:
        if self.fault == "die":
            os._exit(1)
        self.over.set()


@pytest.fixture
def spread(tmp_path):
    """Makes an engine of two nodes whose second does `fault`."""
    ended = []
    with RunDir(RunConfig(logging={"run_dir": str(tmp_path / "run")}), False) as run_dir:

        def make(fault: str) -> SpreadActor:
            of = ray.remote(num_cpus=0)
            ranks = Actor(of(Ranks).remote(fault), "engine-0-node-1", run_dir)
            made = SpreadActor(of(Front).remote(), "engine-0", run_dir, [ranks])
            ended.append(made)
            return made

        yield make
        for one in ended:
            one.end()


def test_all_meet_at_the_front(spread):
    engine = spread("none")
    assert ray.get(engine.start()) == "front, here"
    assert ray.get(engine.remote("meeting")) == "here"
    while not engine.places:
        ray.get(engine.remote("meeting"))
    assert engine.places == ["ranks, here"]


def test_what_ranks_elsewhere_share_has_no_name_once_all_have_met(spread):
    """They are killed at a run's end too, and would leave it behind."""
    path = unnamed.PLACE / f"vllm_dist_of_a_test_{os.getpid()}"
    engine = spread("none")
    try:
        ray.get(engine.ranks[0].remote("share", str(path)))
        assert path.exists()
        ray.get(engine.start())
        deadline = time.monotonic() + 30
        while path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("fault", ["end", "die"])
def test_the_front_ends_with_ranks_elsewhere(spread, fault, caplog):
    engine = spread(fault)
    ray.get(engine.start())
    waiting = engine.remote("wait")
    engine.ranks[0].remote("end")
    with pytest.raises(RayActorError):
        ray.get(waiting, timeout=30)
    assert "engine-0-node-1 has ended" in caplog.text and "engine-0 with it" in caplog.text
    if fault == "end":
        assert "(EngineCore_DP1 with exit code -9)" in caplog.text


def test_the_front_ends_when_ranks_elsewhere_do_not_start(spread, caplog):
    engine = spread("start")
    engine.start()
    with pytest.raises(RayActorError):
        ray.get(engine.remote("wait"), timeout=30)
    assert "no model there" in caplog.text
