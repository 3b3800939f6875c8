"""The agent is a program of the user's, which speaks OpenAI's protocol to the run's endpoint.

    the run ──OPENAI_BASE_URL, OPENAI_API_KEY──> a process of the agent's: chats, tools, all its own
            <── chat completions: the policy answers, each turn is kept token for token
            <── POST /v1/reward, or the reward function scores the last turn

A chat that goes on from all messages so far is one sample; any other begins a new one, a fork, and
all samples of a trajectory have its reward (endpoint/sessions.py). What an agent can ask for:
endpoint/trajectories.py. How trajectories ended is counted: done, context_overflow (no room was
left), agent_error (its process failed), timeout. A trajectory that failed is tried again with a new
process, environment.retries times; then it has no reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, model_validator

from lora_moe_rl.config import EnvironmentConfig, RunConfig
from lora_moe_rl.config.plugins import PARTS
from lora_moe_rl.config.section import LONGEST_WAIT_S, is_set
from lora_moe_rl.data.samples import Group, Prompt, Sample
from lora_moe_rl.data.scores import Details, Played, Scores
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.environments.parts.conversation import Conversation, finish, together
from lora_moe_rl.environments.parts.tool_calls import absolute_calls
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.jsonl import finite
from lora_moe_rl.ports import Policy, Rewards
from lora_moe_rl.rewards.by_set import NoRewards

if TYPE_CHECKING:
    from lora_moe_rl.endpoint.run_source import RunSource
    from lora_moe_rl.endpoint.sessions import Session
    from lora_moe_rl.endpoint.trajectories import Outcome, Trajectories

ENDS = ("done", "context_overflow", "agent_error", "timeout")
ALL = 2**31  # sessions: as many as the schedule has trajectories


class External(Environment):
    class Settings(EnvironmentConfig):
        command: str | None = Field(
            None,
            description="The agent's program with its arguments: a process for each trajectory, or "
            "for as many as it asks for. null: agents come by themselves, to environment.port.",
        )
        processes: int = Field(8, ge=1, description="Most processes of the agent at a time.")
        timeout_s: float = Field(
            600,
            gt=0,
            le=LONGEST_WAIT_S,
            description="Longest trajectory with its agent, less its waits for engines that start "
            "anew, give way or take a version.",
        )
        retries: int = Field(1, ge=0, description="More tries of a trajectory that failed.")
        overflow_reward: float | None = Field(
            0.0,
            description="The reward of a trajectory whose prompts outgrew their room, and whose "
            "agent ended without giving it one, where no reward.function scores it; null: it has "
            "failed, and is in no loss.",
        )
        overrule: bool = Field(
            False,
            description="Answer requests for other models, or other ways of sampling, as the "
            "policy is trained, and count them; false: they are refused.",
        )
        calls: str = Field(
            "json",
            description="How the model writes a call of a tool that the agent has told it of: json "
            "in <tool_call>, python, vllm:NAME (by that parser of vLLM's), or a form of your own, "
            "file.py:function.",
        )
        host: str = Field("127.0.0.1", description="The address that the endpoint listens on.")
        port: int = Field(0, ge=0, lt=65536, description="Its port; 0: any that is free.")
        key_env: str | None = Field(
            None,
            description="The environment variable with the key of agents that come by themselves.",
        )
        requests: int = Field(1024, ge=1, description="Requests that are answered at a time.")
        waiting: int = Field(4096, ge=0, description="Requests that may wait; more get a 429.")

        @model_validator(mode="after")
        def _one_kind_of_agents(self) -> External.Settings:
            if self.command is None and (self.key_env is None or not self.port):
                raise ValueError(
                    "environment=external has no agent: set environment.command to its program; or "
                    "environment.port and environment.key_env, for agents that come by themselves"
                )
            if self.command is not None and self.key_env is not None:
                raise ValueError("environment.key_env has no effect with environment.command")
            if self.command is None and is_set(self, "processes"):
                raise ValueError(
                    f"environment.processes={self.processes} has no effect without "
                    "environment.command: agents that come by themselves ask for as many "
                    "trajectories as they like; leave it out"
                )
            return self

        def absolute(self) -> dict[str, Any]:
            return absolute_calls(self.calls)

    rewards_itself = True
    bounds_sets = False  # agents ask one server, of the run
    forks = True
    has_chats = True
    begins_with_row = False
    settings: Settings

    def __init__(self, config: RunConfig, rewards: Rewards, tokenizer: Any):
        super().__init__(config, rewards, tokenizer)
        for source in config.sources().values():
            for name in ("system_prompt", "chat_template_kwargs"):
                if getattr(source, name):
                    raise ConfigError(
                        f"{source.key(name)} has no effect with environment=external, whose agent "
                        "writes its own messages: leave it out"
                    )
        advantage = getattr(config.algorithm, "advantage", None)
        teaches = isinstance(advantage, str) and PARTS["advantage"].find(advantage).needs_teacher
        if teaches and isinstance(rewards, NoRewards):
            raise ConfigError(
                f"algorithm.advantage={advantage} without reward.function learns from its teacher "
                "alone, and what agents give would be lost: set reward.function"
            )
        self.gate = Gate(self.settings, tokenizer)

    @property
    def about(self) -> str:
        agents = self.settings.command or "agents that come by themselves"
        return f"asked by {agents} at {self.gate.url}"

    def close(self) -> None:
        self.gate.close()

    async def rollout(self, prompt: Prompt, policy: Policy) -> Group:
        counts: Counter[str] = Counter()
        counts.update(dict.fromkeys((*ENDS, "turns", "retried", "overruled", "base_requests"), 0))
        given: dict[Conversation, Outcome] = {}
        talks = [
            self._talk(prompt, policy, place, counts, given) for place in range(self.group_size)
        ]
        made = await together(talks)
        whole = [given[one] for one in made if one.failure is None]
        return await finish(prompt, policy, made, _Given(self.rewards, whole), counts)

    async def _talk(
        self,
        prompt: Prompt,
        policy: Policy,
        place: int,
        counts: Counter[str],
        given: dict[Conversation, Outcome],
    ) -> Conversation:
        from lora_moe_rl.endpoint.bodies import POLICY
        from lora_moe_rl.endpoint.run_source import RunSource

        row = finite(prompt.columns)  # a table has NaN where it has no number
        task = json.loads(json.dumps({"prompt": prompt.text, "row": row}, default=str))
        left = self.settings.retries
        while True:
            source = RunSource(self.config, self.settings.overrule, policy, self.tokenizer)
            outcome, session = await self.gate.outcome(source, place, task)
            counts["overruled"] += source.overruled
            counts["base_requests"] += source.base_requests
            one = session.conversations.get(POLICY)
            outcome = self._overflown(outcome, session, one)
            failure = self._failure(outcome, one)
            if failure is None or not left:
                break
            left -= 1
            counts["retried"] += 1
        silent = one is None and outcome.end == "done"  # it ended well, and has asked nothing
        counts["agent_error" if silent else outcome.end] += 1
        if one is None:
            one = self.conversation(prompt, policy, place)
            await one.ask(1)  # stands for it in the group; it has no reward, and is in no loss
        one.failure, one.no_forks, given[one] = failure, self.no_forks, outcome
        counts["turns"] += one.turns
        return one

    def _overflown(self, outcome: Outcome, session: Session, one: Conversation | None) -> Outcome:
        """Of a policy that wrote more than fits, and an agent that could not go on, the end is the
        policy's: to try again, or to leave it out, would spare it just that."""
        ended = outcome.end in ("done", "agent_error") and outcome.reward is None
        if one is None or not (session.outgrown and ended):
            return outcome
        reward = None
        if isinstance(self.rewards, NoRewards):
            reward = self.settings.overflow_reward
            if reward is None:
                return outcome
        one.overflow()
        return type(outcome)("context_overflow", reward)

    def _failure(self, outcome: Outcome, one: Conversation | None) -> str | None:
        if outcome.failure is not None:
            return outcome.failure
        if one is None:
            return "the agent asked the policy nothing"
        if outcome.reward is None and isinstance(self.rewards, NoRewards):
            return "the agent set no reward, and there is no reward function"
        return None


class Gate:
    """The endpoint of a run: it listens from its first trajectory on, in the run's event loop."""

    def __init__(self, settings: External.Settings, tokenizer: Any):
        from lora_moe_rl.endpoint.admission import Admission
        from lora_moe_rl.endpoint.app import Endpoint
        from lora_moe_rl.endpoint.listening import Listening
        from lora_moe_rl.endpoint.rendering import Chats
        from lora_moe_rl.endpoint.sessions import Sessions
        from lora_moe_rl.endpoint.trajectories import Trajectories

        command = _words(settings.command)
        chats = Chats(tokenizer, settings.calls)
        self.sessions = Sessions(_key(settings.key_env), most=ALL)
        self.listening = Listening(settings.host, settings.port)
        self.url = self.listening.url
        self.trajectories: Trajectories = Trajectories(
            self.sessions, self.url, command, settings.processes, settings.timeout_s
        )
        admission = Admission(settings.requests, settings.waiting)
        self.endpoint = Endpoint(self.sessions, chats, admission, self.trajectories.routes())
        self._serving: asyncio.Task[None] | None = None

    async def outcome(
        self, source: RunSource, place: int, task: dict[str, Any]
    ) -> tuple[Outcome, Session]:
        from lora_moe_rl.endpoint.sessions import Session

        if self._serving is None:
            self._serving = asyncio.create_task(self.listening.serve(self.endpoint.app()))
        started = asyncio.create_task(self.listening.started())
        try:
            both = {self._serving, started}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()
        if self._serving.done():  # no agent can ask any more: nobody waits for one
            self._serving.result()
            raise RuntimeError(f"the endpoint at {self.url} has ended while the run went on")
        session = Session(source, place)
        source.on_failure = lambda error: self.trajectories.broke(session, error)
        return await self.trajectories.outcome(session, task, source.held_up), session

    def close(self) -> None:
        self.trajectories.close()
        self.listening.close()


class _Given:
    """Rewards that agents have set, and of conversations without one those of the run."""

    def __init__(self, rewards: Rewards, given: Sequence[Outcome]):
        self._rewards, self._given = rewards, given

    async def score(
        self, prompt: Prompt, samples: Sequence[Sample], played: Sequence[Played] = ()
    ) -> Scores:
        asked = np.array([one.reward is None for one in self._given], bool)
        scores = Scores(np.zeros(0, np.float32), [], Details())
        if asked.any():
            chosen = [sample for sample, wanted in zip(samples, asked, strict=True) if wanted]
            scores = await self._rewards.score(prompt, chosen)
        found = scores.at(np.where(asked, np.cumsum(asked) - 1, -1))
        set_by_agents = [np.nan if one.reward is None else one.reward for one in self._given]
        rewards = np.where(asked, found.rewards, np.array(set_by_agents, np.float32))
        told = {i: one.turns for i, one in enumerate(self._given) if one.turns is not None}
        found.details.by_turn.update(told)
        return found._replace(rewards=rewards)


def _words(command: str | None) -> list[str] | None:
    """Raises ConfigError for a program that is not there."""
    if command is None:
        return None
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"environment.command={command}: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"environment.command={command}: there is no program {words[0] if words else ''!r} "
            "here; give its path"
        )
    return words


def _key(variable: str | None) -> str:
    """What opens trajectories; without a variable nobody knows it. Raises ConfigError."""
    from lora_moe_rl.endpoint.keys import key_of_variable

    if variable is None:
        return os.urandom(24).hex()
    return key_of_variable(variable, "environment.key_env=")
