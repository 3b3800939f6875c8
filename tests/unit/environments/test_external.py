"""Trajectories of agents outside: what they are given, what comes of them, what may fail."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from spoken_source import Speaker

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.cluster.held_up import HeldUp
from lora_moe_rl.cluster.watchdog import marked
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.data.scores import Details, Scores
from lora_moe_rl.endpoint.bodies import Asked, Sampling
from lora_moe_rl.endpoint.refusal import Refused
from lora_moe_rl.endpoint.run_source import RunSource
from lora_moe_rl.endpoint.trajectories import OF_RUN
from lora_moe_rl.environments.base import why_no_forks
from lora_moe_rl.environments.external import External
from lora_moe_rl.errors import ConfigError, EngineDied, NotServed
from lora_moe_rl.ports import Manner
from lora_moe_rl.rewards.by_set import NoRewards
from lora_moe_rl.tiny.tokenizer import make_tokenizer

pytestmark = pytest.mark.seconds  # starts processes, imports transformers
AGENT = Path(__file__).parents[2] / "helpers/external_agent.py"
TOKENIZER = make_tokenizer()
PROMPT = Prompt(0, "2+3=", list(b"2+3="), {"answer": "5"})


class Rewards:
    """1 for every sample that it is shown."""

    async def score(self, prompt, samples):
        return Scores(np.ones(len(samples), np.float32), [], Details())


@pytest.fixture
def make():
    made = []

    def make(what: str | None, group=2, rewards=None, algorithm=None, **settings) -> External:
        if what is not None:
            settings["command"] = f"{sys.executable} {AGENT} {what}"
        config = RunConfig(
            model={"max_length": 256},
            rollout={"max_response_tokens": 200, "temperature": 0.5},
            algorithm={"name": "reinforce_pp", "group_size": group} | (algorithm or {}),
            environment={"name": "external"} | settings,
        )
        made.append(External(config, rewards or NoRewards(), TOKENIZER))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert not marked(OF_RUN, one.gate.trajectories.mark)


def counted(group) -> dict[str, float]:
    return {name: value for name, value in group.counts.items() if value}


def test_a_teacher_alone_would_lose_what_agents_give(make):
    teacher = {"name": "opd", "teacher_url": "http://x/v1", "teacher_model": "m"}
    with pytest.raises(ConfigError, match="what agents give would be lost: set reward.function"):
        make("rewards", algorithm=teacher)
    make("rewards", algorithm=teacher, rewards=Rewards())


async def test_a_process_sets_rewards_and_goes_on_with_the_next_trajectory(make):
    environment = make("rewards", group=3, processes=1)
    first = await environment.rollout(PROMPT, Speaker("five", "5", "55"))
    assert sorted(first.rewards.tolist()) == [0.25, 0.5, 1.0] and not first.failures
    assert counted(first) == {"done": 3, "turns": 3}
    assert {len(s.text) / 4: r for s, r in zip(first.samples, first.rewards, strict=True)} == {
        0.25: 0.25, 0.5: 0.5, 1.0: 1.0,
    }  # fmt: skip
    second = await environment.rollout(PROMPT, Speaker("5"))
    assert second.rewards.tolist() == [0.25] * 3
    assert len(marked(OF_RUN, environment.gate.trajectories.mark)) == 1  # one process for all six
    table = first.routes.table()
    assert table.valid.all() and first.conversations.tolist() == [0, 1, 2]


async def test_an_agent_tells_which_turn_has_earned_what(make):
    group = await make("turns").rollout(PROMPT, Speaker("5"))
    assert not group.failures and group.rewards.tolist() == [1, 1]
    assert group.details.by_turn == {0: [0.25, 0.75], 1: [0.25, 0.75]}
    assert counted(group) == {"done": 2, "turns": 4}
    assert [one.states for one in group.samples] == [(None, "sure? ?")] * 2


async def test_without_a_reward_of_its_agent_a_trajectory_has_that_of_the_function(make):
    group = await make("ask", rewards=Rewards()).rollout(PROMPT, Speaker("5"))
    assert group.rewards.tolist() == [1, 1] and counted(group) == {"done": 2, "turns": 2}
    group = await make("ask", retries=0).rollout(PROMPT, Speaker("5"))
    assert np.isnan(group.rewards).all()
    assert "set no reward, and there is no reward function" in group.failures[0]


async def test_an_agent_that_fails_is_tried_again_and_then_has_no_reward(make):
    group = await make("fail", group=1, rewards=Rewards()).rollout(PROMPT, Speaker("5"))
    assert np.isnan(group.rewards).all()
    assert group.failures == ["prompt 0: the agent ended with 1: the browser has crashed"]
    assert counted(group) == {"agent_error": 1, "retried": 1, "turns": 1}
    group = await make("nothing", group=1, rewards=Rewards(), retries=0).rollout(
        PROMPT, Speaker("5")
    )
    assert group.failures == ["prompt 0: the agent asked the policy nothing"]
    assert len(group.samples) == 1 and group.samples[0].num_sampled == 1


async def test_who_outgrew_its_room_is_not_spared_by_an_agent_that_fails_at_it(make):
    for rewards, settings, reward in (
        (Rewards(), {}, 1), (None, {}, 0), (None, {"overflow_reward": -1.0}, -1),
    ):  # fmt: skip
        environment = make("outgrows", rewards=rewards, **settings)
        group = await environment.rollout(PROMPT, Speaker("5"))
        assert group.rewards.tolist() == [reward] * 2 and not group.failures
        assert counted(group) == {"context_overflow": 2, "turns": 2}  # and none was tried again
        assert [one.truncated for one in group.samples] == [True, True]
    environment = make("outgrows", overflow_reward=None, retries=0)
    group = await environment.rollout(PROMPT, Speaker("5"))
    assert np.isnan(group.rewards).all() and counted(group) == {"agent_error": 2, "turns": 2}


async def test_an_agent_that_goes_on_after_that_has_ended_as_ever(make):
    group = await make("recovers", group=1, rewards=Rewards()).rollout(PROMPT, Speaker("5"))
    assert counted(group) == {"done": 1, "turns": 2, "forks": 1}
    assert not any(one.truncated for one in group.samples)


FORKS = [
    ({}, True),
    ({"name": "grpo"}, True),
    ({"name": "ppo"}, False),
    ({"name": "vapo"}, False),
    ({"name": "opd"}, False),
    ({"kl_coef": 0.1}, False),
    ({"gamma": 0.9}, False),
]


@pytest.mark.parametrize(("algorithm", "taken"), FORKS, ids=[str(one) for one, _ in FORKS])
def test_which_algorithms_take_a_trajectory_that_became_several_samples(algorithm, taken):
    chosen = {"name": "reinforce_pp", "group_size": 2} | algorithm
    config = RunConfig(algorithm=chosen, rollout={"temperature": 1})
    assert (why_no_forks(config) is None) == taken


async def test_a_fork_that_the_algorithm_cannot_take_has_failed_and_ends_no_run(make):
    """And the step is made of what is left."""
    environment = make("forks", algorithm={"gamma": 0.9}, rewards=Rewards())
    group = await environment.rollout(PROMPT, Speaker("5"))
    assert np.isnan(group.rewards).all() and len(group.samples) == 2
    assert len(group.failures) == 2 and counted(group) == {"done": 2, "turns": 4, "forks": 2}
    assert "it became 2 samples (a fork), and algorithm=reinforce_pp, as it is" in group.failures[0]
    (signal,) = signals_of(algorithms.make(environment.config), [group])
    assert not any(weight.any() for weight in signal.weights)
    group = await make("forks", rewards=Rewards()).rollout(PROMPT, Speaker("5"))
    assert group.rewards.tolist() == [1] * 4 and not group.failures
    held_out = environment.held_out(2, None)  # of which nothing is trained
    assert not (await held_out.rollout(PROMPT, Speaker("5"))).failures


async def test_an_agent_that_hangs_is_ended_with_its_process(make):
    environment = make("hang", group=1, rewards=Rewards(), retries=0, timeout_s=20)
    group = await environment.rollout(PROMPT, Speaker("5"))
    assert counted(group) == {"timeout": 1, "turns": 1} and "timeout_s=20" in group.failures[0]
    while found := marked(OF_RUN, environment.gate.trajectories.mark):
        psutil.wait_procs(found, timeout=0.1)
        await asyncio.sleep(0.05)


async def test_an_agent_that_hangs_before_it_asks_is_late_and_not_in_error(make):
    environment = make(None, group=1, retries=0, timeout_s=0.5, command="sleep 600")
    group = await environment.rollout(PROMPT, Speaker("5"))
    assert counted(group)["timeout"] == 1 and "timeout_s=0.5" in group.failures[0]


async def test_what_an_agent_complains_of_is_not_kept_but_for_the_last_of_it(make):
    """Nor does it wait for somebody to read it: 64 MB are more than a pipe holds."""
    environment = make("complains", group=1, rewards=Rewards(), retries=0)
    assert not (await environment.rollout(PROMPT, Speaker("5"))).failures
    tables = [f"/proc/{os.getpid()}/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    deleted = [Path(one) for one in tables if "(deleted)" in os.path.realpath(one)]
    assert not [one for one in deleted if one.stat().st_size > 1 << 20]


async def test_what_an_agent_leaves_behind_in_a_session_of_its_own_ends_with_it(make):
    environment = make("leaves", group=2, processes=1, rewards=Rewards())
    group = await environment.rollout(PROMPT, Speaker("5"))
    assert counted(group) == {"done": 2, "turns": 2}
    async with asyncio.timeout(60):  # while the run goes on
        while marked(OF_RUN, environment.gate.trajectories.mark):
            await asyncio.sleep(0.05)


async def test_folders_of_agents_that_are_at_work_go_when_the_run_ends(make):
    environment = make("hang", group=1, retries=0)
    task = asyncio.create_task(environment.rollout(PROMPT, Speaker("5")))
    async with asyncio.timeout(60):
        while not marked(OF_RUN, environment.gate.trajectories.mark):
            await asyncio.sleep(0.05)
    (mark,) = environment.gate.trajectories._marks
    (folder := Path(tempfile.gettempdir()) / f"sandbox-{mark}-x").mkdir()
    environment.close()
    assert not folder.exists()
    task.cancel()
    await asyncio.wait([task])


async def test_an_engine_that_dies_gives_the_ticket_back_and_ends_its_agents(make):
    speaker = Speaker("5")
    speaker.fails = EngineDied("vLLM's processes of engine 0 have ended")
    with pytest.raises(EngineDied):
        await make("ask").rollout(PROMPT, speaker)


async def test_an_endpoint_that_does_not_start_or_has_ended_is_told_and_not_waited_for(make):
    broken = make("rewards", group=1)

    async def serve(app):
        raise OSError("no more descriptors")

    broken.gate.listening.serve = serve
    with pytest.raises(OSError, match="no more descriptors"):
        await asyncio.wait_for(broken.rollout(PROMPT, Speaker("5")), 20)
    ended = make("rewards", group=1)
    await ended.rollout(PROMPT, Speaker("5"))
    ended.gate.listening.stop()
    await asyncio.wait([ended.gate._serving])
    with pytest.raises(RuntimeError, match="has ended while the run went on"):
        await asyncio.wait_for(ended.rollout(PROMPT, Speaker("5")), 20)


async def test_agents_that_come_by_themselves_claim_trajectories_with_the_owners_key(
    make, monkeypatch
):
    monkeypatch.setenv("AGENTS_KEY", "secret")
    environment = make(None, key_env="AGENTS_KEY", port=free_port())
    speaker = Speaker("5", "6")
    rolling = asyncio.create_task(environment.rollout(PROMPT, speaker))
    async with httpx.AsyncClient(base_url=environment.gate.url, timeout=60) as http:

        async def ask(key, path, body=None):
            header = {"Authorization": f"Bearer {key}"}
            return await http.post(path, json=body or {}, headers=header)

        await environment.gate.listening.started()
        assert (await ask("guessed", "/next")).status_code == 401
        chat = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
        assert (await ask("secret", "/chat/completions", chat)).status_code == 401
        one, other = [(await ask("secret", "/next")).json() for _ in range(2)]
        assert one["task"] == {"prompt": "2+3=", "row": {"answer": "5"}}
        assert (await ask(one["api_key"], "/reward", {"reward": 1})).status_code == 409
        for key in (one["api_key"], other["api_key"]):
            for wrong in ({"temperature": 0.9}, {"seed": 3}, {"model": "gpt-4o"}):
                refused = (await ask(key, "/chat/completions", chat | wrong)).json()["error"]
                assert "environment.overrule" in refused["message"]
            assert (await ask(key, "/chat/completions", chat | {"temperature": 0.5})).is_success
            for reward in (float("1e999"), float("nan"), 1e39, 10**400, "1", True):
                wrong = {"reward": reward}
                content = str(wrong).replace("'", '"').replace("inf", "Infinity")
                content = content.replace("nan", "NaN").replace("True", "true")
                header = {"Authorization": f"Bearer {key}"}
                answer = await http.post("/reward", content=content, headers=header)
                assert answer.status_code == 400 and "in float32" in answer.text
            assert (await ask(key, "/reward")).status_code == 400
            assert (await ask(key, "/reward", {"reward": 0.5})).is_success
            assert (await ask(key, "/chat/completions", chat)).status_code == 410
    group = await rolling
    assert group.rewards.tolist() == [0.5, 0.5] and counted(group) == {"done": 2, "turns": 2}


async def test_a_row_with_no_number_is_told_as_null(make):
    """As a table has it; JSON has no word for NaN."""
    row = {"answer": "5", "level": float("nan"), "more": [np.float32("inf"), {"of": float("nan")}]}
    group = await make("ask", rewards=Rewards()).rollout(Prompt(0, "?", [1], row), Speaker("5"))
    assert not group.failures and group.rewards.tolist() == [1, 1]


async def test_what_differs_from_how_the_policy_is_trained_is_overruled_where_that_is_wanted(
    make, monkeypatch
):
    monkeypatch.setenv("AGENTS_KEY", "secret")
    environment = make(None, group=1, key_env="AGENTS_KEY", port=free_port(), overrule=True)
    rolling = asyncio.create_task(environment.rollout(PROMPT, Speaker("5")))
    async with httpx.AsyncClient(base_url=environment.gate.url, timeout=60) as http:
        await environment.gate.listening.started()
        header = {"Authorization": "Bearer secret"}
        key = (await http.post("/next", headers=header)).json()["api_key"]
        header = {"Authorization": f"Bearer {key}"}
        asked = {"model": "gpt-4o", "temperature": 1.5, "prompt": "2+3="}
        assert (await http.post("/completions", json=asked, headers=header)).is_success
        await http.post("/reward", json={"reward": 1}, headers=header)
    assert counted(await rolling) == {"done": 1, "turns": 1, "overruled": 1}


class Pausing(Speaker):
    """Waits before each answer, which is told of or not."""

    def __init__(self, pause_s: float, told: bool):
        super().__init__("5")
        self.pause_s, self.told, self.waits = pause_s, told, HeldUp()

    async def sample(self, token_ids, n, turn=None):
        with self.waits if self.told else nullcontext():
            await asyncio.sleep(self.pause_s)
        return await super().sample(token_ids, n, turn)

    def held_up(self):
        return self.waits.seconds()


@pytest.mark.parametrize("told", [True, False])
async def test_what_engines_keep_waiting_is_no_time_of_a_trajectory(make, monkeypatch, told):
    """Otherwise one that does nothing wrong fails when they are started anew."""
    monkeypatch.setenv("AGENTS_KEY", "secret")
    environment = make(
        None, group=1, retries=0, key_env="AGENTS_KEY", port=free_port(), timeout_s=3
    )
    rolling = asyncio.create_task(environment.rollout(PROMPT, Pausing(5.0, told)))
    async with httpx.AsyncClient(base_url=environment.gate.url, timeout=60) as http:
        await environment.gate.listening.started()
        key = (await http.post("/next", headers={"Authorization": "Bearer secret"})).json()
        http.headers["Authorization"] = f"Bearer {key['api_key']}"
        answered = await http.post("/completions", json={"model": "policy", "prompt": "2+3="})
        assert answered.is_success is told
        if told:
            await http.post("/reward", json={"reward": 1})
            assert counted(await rolling) == {"done": 1, "turns": 1}
            return
    rolling.cancel()  # which would have the stand-in of a failed one sampled, after a pause


async def test_a_trajectory_that_is_late_by_itself_is_late_after_a_pause_too(make, monkeypatch):
    monkeypatch.setenv("AGENTS_KEY", "secret")
    environment = make(
        None, group=1, retries=0, key_env="AGENTS_KEY", port=free_port(), timeout_s=2
    )
    rolling = asyncio.create_task(environment.rollout(PROMPT, Pausing(1.0, told=True)))
    async with httpx.AsyncClient(base_url=environment.gate.url, timeout=60) as http:
        await environment.gate.listening.started()
        key = (await http.post("/next", headers={"Authorization": "Bearer secret"})).json()
        http.headers["Authorization"] = f"Bearer {key['api_key']}"
        asked = {"model": "policy", "prompt": "2+3="}
        begun = time.monotonic()
        assert (await http.post("/completions", json=asked)).is_success
        group = await asyncio.wait_for(rolling, 60)  # nobody ends it
    assert counted(group) == {"timeout": 1, "turns": 1}
    assert time.monotonic() - begun > 2.9


class WithOthers(Speaker):
    """Beside it the base, and version 3 of what once were more."""

    def beside(self, version, manner):
        self.others = [*getattr(self, "others", []), (version, manner)]
        return Other(version)


class Other(Speaker):
    def __init__(self, version):
        super().__init__("base" if version is None else f"v{version}")
        self.number = version

    async def sample(self, token_ids, n, turn=None):
        if self.number not in (None, 3):
            raise NotServed("gone", [3, 4])
        return await super().sample(token_ids, n, turn)


async def test_the_base_and_versions_that_are_served_answer_beside_the_policy(make, monkeypatch):
    """In no sample; and an agent that has asked only them has asked the policy nothing."""
    monkeypatch.setenv("AGENTS_KEY", "secret")
    environment = make(None, group=1, key_env="AGENTS_KEY", port=free_port())
    speaker = WithOthers("5")
    rolling = asyncio.create_task(environment.rollout(PROMPT, speaker))
    async with httpx.AsyncClient(base_url=environment.gate.url, timeout=60) as http:
        await environment.gate.listening.started()
        key = (await http.post("/next", headers={"Authorization": "Bearer secret"})).json()
        http.headers["Authorization"] = f"Bearer {key['api_key']}"

        async def ask(model, **more):
            asked = {"model": model, "prompt": "2+3=", **more}
            return (await http.post("/completions", json=asked)).json()

        said = await ask("base", temperature=0.3, seed=7, stop_token_ids=[1])
        assert said["choices"][0]["text"] == "base"
        assert (await ask("policy@3"))["choices"][0]["text"] == "v3"
        gone = (await ask("policy@2"))["error"]
        assert gone["code"] == "model_not_found"
        assert (
            "no model policy@2 here any more; there are policy, policy@3, policy@4, base"
            in (gone["message"])
        )
        assert (await http.post("/reward", json={"reward": 1})).status_code == 409
        assert [model["id"] for model in (await http.get("/models")).json()["data"]] == [
            "policy", "base"
        ]  # fmt: skip
        await ask("policy")
        await http.post("/reward", json={"reward": 1})
    group = await rolling
    assert counted(group) == {"done": 1, "turns": 1, "base_requests": 2}
    assert [sample.text for sample in group.samples] == ["5"] and len(speaker.asked) == 1
    manner = Manner(temperature=0.3, seed=7, stop_token_ids=(1,))
    assert speaker.others == [(None, manner), (3, Manner()), (2, Manner())]


def test_where_adapters_are_merged_there_is_no_base():
    config = RunConfig(refit={"mode": "merged"}, model={"max_length": 256})
    source = RunSource(config, False, WithOthers("5"), TOKENIZER)
    assert source.models() == ["policy"]
    for model in ("base", "policy@3"):
        with pytest.raises(Refused, match=f"model={model}, and a trajectory is sampled by"):
            source.policy(Asked(model, Sampling()))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "environment.command"),
        ({"key_env": "AGENTS_KEY"}, "environment.port"),
        ({"command": "python x.py", "key_env": "AGENTS_KEY"}, "no effect"),
        ({"key_env": "NOT_THERE", "port": 9, "processes": 32}, "processes=32 has no effect"),
        ({"command": "no_such_program"}, "no program 'no_such_program'"),
        ({"command": 'python "'}, "environment.command"),
        ({"key_env": "NOT_THERE", "port": 9}, "NOT_THERE"),
        ({"command": "python x.py", "host": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, settings, told):
    os.environ.pop("NOT_THERE", None)
    with pytest.raises(ValueError, match=told):  # ConfigError is one, and so is pydantic's
        make(None, **settings)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
