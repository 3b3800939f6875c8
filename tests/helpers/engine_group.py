"""Engines as the run sees them, of which each is an obedient one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import obedient_engine
import pytest
import ray

from lora_moe_rl.cluster import engine_actor
from lora_moe_rl.cluster.engines import RolloutEngines
from lora_moe_rl.cluster.ray_start import local_ray
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import EngineDied

SPEC = SimpleNamespace(shape=SimpleNamespace(num_layers=2, moe_layers=(0, 1)))
ray.cloudpickle.register_pickle_by_value(obedient_engine)  # the actors find no helpers of tests


@pytest.fixture(scope="module")
def ray_session():
    started = not ray.is_initialized()
    if started:
        local_ray(2)
    yield
    if started:
        ray.shutdown()


@pytest.fixture
def start(ray_session, tmp_path, monkeypatch):
    """Makes a group of engines that are prepared and serve version 3; none yet, if engines may
    join, which is in one event loop."""
    monkeypatch.setattr(engine_actor, "RolloutEngine", obedient_engine.Engine)
    groups = []

    def start(placement="split", **rollout):
        config = RunConfig(rollout={"engines": 2, **rollout}, placement={"mode": placement})
        run_dir = SimpleNamespace(
            log_path=lambda name: tmp_path / f"{name}.log", tail=lambda name: f"tail of {name}"
        )
        place = SimpleNamespace(engine=lambda index: {"num_cpus": 0}, engines_share=False)
        made = RolloutEngines(config, SPEC, tmp_path, run_dir, place)
        made.proven = []

        async def prove(*what):
            made.proven.append(what)

        made.prove = prove
        groups.append(made)
        made.start_async()
        made.wait_started()
        made.prepare_refit([], None)
        if "least_engines" not in rollout:
            asyncio.run(made.publish(3, []))
        for path in tmp_path.glob("asked-*"):
            path.unlink()
        return made

    yield start
    for made in groups:
        for actor in made.actors.values():
            ray.kill(actor.handle)


def asked(folder: Path, index: int) -> list[str]:
    return (folder / f"asked-{index}").read_text().splitlines()


def fate(folder: Path, index: int, method: str, *fates: str) -> None:
    (folder / f"fate-{index}-{method}").write_text("\n".join(fates))


def sample(engines, tickets=4) -> tuple[list, int]:
    """What the run gets for its tickets, each of them given out again when its engine dies; and how
    often that was."""
    given_back = []

    async def roll(ticket):
        while True:
            try:
                version, _ = engines.published
                return await engines.policy(version, seed=ticket).sample([ticket], n=2)
            except EngineDied:
                given_back.append(ticket)

    async def together():
        found = await asyncio.gather(*(roll(ticket) for ticket in range(tickets)))
        await engines.all_back()
        return found

    answers = asyncio.run(together())
    answers = [(answer, sent.blocks[0].parts[0]) for answer, sent in answers]
    assert [args[0] for (_, args), _ in answers] == [[ticket] for ticket in range(tickets)]
    return answers, len(given_back)
