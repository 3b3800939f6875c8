"""A client that goes before its answer is there: the real engine gives its request up."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import ray
from engine_fixtures import save_random_model
from left_engines import LEAVES_AFTER_S, EndlessEngine, LeftEngine
from refit_ranks import make_layouts, make_senders
from spoken_source import TOKENIZER, client, listening

from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.cluster import engine_actor
from lora_moe_rl.cluster.engines import RolloutEngines
from lora_moe_rl.config import RunConfig
from lora_moe_rl.endpoint.run_source import RunSource
from lora_moe_rl.endpoint.sessions import Session, Sessions
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY
from lora_moe_rl.verify.engine import EngineProcess
from lora_moe_rl.verify.inputs import random_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LENGTH, MANY = 4096, 4000  # tokens; so many take far longer than their client waits


def model_and_config(folder: Path) -> tuple[RunConfig, AdapterSpec]:
    save_random_model("qwen3_moe", folder)
    path = folder / "config.json"
    longer = json.loads(path.read_text()) | {"max_position_embeddings": LENGTH}
    path.write_text(json.dumps(longer))
    config = RunConfig(
        model={"path": str(folder), "max_length": LENGTH},
        rollout={"max_response_tokens": MANY},
    )
    return config, AdapterSpec.build(ModelShape.from_hf_config(longer), config.adapter)


def test_serve_gives_up_what_nobody_waits_for(tmp_path):
    config, spec = model_and_config(tmp_path)
    with EngineProcess(config, spec, tmp_path, tmp_path / "log", LeftEngine) as engine:
        engine.start()
        found = engine.ask("left", MANY)
    assert found == {"tokens": 4, "gone": 1, "running": 0, "free": True}


@contextmanager
def engines_of_a_run(folder: Path, monkeypatch):
    """One engine as a run has it: a Ray actor, which serves version 0."""
    config, spec = model_and_config(folder)
    monkeypatch.setattr(engine_actor, "RolloutEngine", EndlessEngine)
    here = Path(__file__).parent
    folders = {"env_vars": {"PYTHONPATH": f"{here}:{here.parent / 'helpers'}:{here.parents[1]}"}}
    place = SimpleNamespace(
        engine=lambda index: {"num_cpus": 1, "runtime_env": folders}, engines_share=False
    )
    logs = SimpleNamespace(log_path=lambda name: folder / f"{name}.log", tail=lambda name: "")
    engines = RolloutEngines(config, spec, folder, logs, place)
    layouts = make_layouts(spec)
    senders = make_senders(layouts, spec, random_adapter(spec, 1), config.trainer)
    try:
        engines.start_async()
        engines.wait_started()
        engines.prepare_refit(layouts, SHARED_MEMORY)
        asyncio.run(engines.publish(0, [ray.put(sender.send(0)) for sender in senders]))
        yield engines
        ray.get(engines.actors[0].remote("shutdown"), timeout=60)
    finally:
        for actor in engines.actors.values():
            actor.end()


def test_a_run_gives_up_what_nobody_waits_for(ray_session, tmp_path, monkeypatch):
    with engines_of_a_run(tmp_path, monkeypatch) as engines:
        found = asyncio.run(left(engines))
    assert found == {"running": 0, "finished_samples": 1, "versions": [0], "turns": 1}


async def left(engines: RolloutEngines) -> dict:
    """An agent's chat that it does not wait for, and its next one, which it does: what the engine
    has finished, once its core has nothing to do."""
    config = engines.config
    source = RunSource(config, False, engines.policy(0, seed=0), TOKENIZER)
    sessions = Sessions("owner")
    session = sessions.add(Session(source))
    asked = {"model": "policy", "messages": [{"role": "user", "content": "2+3="}]}
    async with listening(sessions) as (endpoint, at):
        agent = client(at, session.key)
        with pytest.raises(openai.APITimeoutError):
            await agent.with_options(timeout=LEAVES_AFTER_S).chat.completions.create(**asked)
        await agent.chat.completions.create(**asked, max_tokens=4)
        assert endpoint.gone == 1 and engines.rolling == [0]
    while not await engines.actors[0].remote("core_is_free"):
        await asyncio.sleep(0.05)
    state = await engines.actors[0].remote("state")
    return {**state, "turns": session.conversations["policy"].turns}
