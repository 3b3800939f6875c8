"""A run's trajectories and the agents that they are given to.

    a rollout ──trajectory──> waiting ──> a process of the agent's program, or one that asks (next)
        ^                                     │ chats, with the trajectory's key
        └───────────────outcome───────────────┘ reward, or its end

What an agent has beside OpenAI's protocol, with its key:

    GET  /v1/task      {"prompt", "row"}: what the trajectory is about
    POST /v1/reward    {"reward": 0.5}: sets the reward, and ends the trajectory; with
                       "turns": [0.5, 0.0] beside it, of the reward what each turn has earned,
                       and "states": ["hall", "yard"], in which state each has begun
    POST /v1/next      the next trajectory, when there is one: {"api_key", "task"}

A process that ends has ended its trajectory; one that asks for the next goes on with that.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from lora_moe_rl.calls.ending import MARK, end_marked
from lora_moe_rl.cluster.watchdog import kill_marked
from lora_moe_rl.endpoint.answering import Json
from lora_moe_rl.endpoint.app import Endpoint, key_of, unless_gone
from lora_moe_rl.endpoint.bodies import POLICY
from lora_moe_rl.endpoint.receiving import body_of
from lora_moe_rl.endpoint.refusal import Refused, bad_request
from lora_moe_rl.endpoint.sessions import Session, Sessions
from lora_moe_rl.rewards.turns import fault_of

LARGEST = float(np.finfo(np.float32).max)  # of a reward
LAST_WORDS = 300  # bytes of what an agent has complained of
MOST_HEARD = 16  # times that so much is read of it which a pipe holds
# In the environment of all agents of a run; each has a mark of its own beside it (MARK).
OF_RUN = "LORA_MOE_RL_AGENTS"
SWEEP_S = 2.0  # between two looks for what agents have left behind: each looks at all processes


class Outcome(NamedTuple):
    """How a trajectory has ended. `reward` is the agent's, if it has set one; `end` is counted;
    `failure` says why there can be no reward, if so; `turns` are what of it each turn has earned,
    where the agent tells."""

    end: str
    reward: float | None = None
    failure: str | None = None
    turns: list[float] | None = None


@dataclass(eq=False)
class Trajectory:
    session: Session
    task: dict[str, Any]
    outcome: asyncio.Future[Outcome]
    held_up: Callable[[], float]
    agent: Agent | None = None  # the process it was given to
    timer: asyncio.TimerHandle | None = None
    settled: bool = False


@dataclass(eq=False)
class Agent:
    """A process of the agent's program, and the trajectory that it is at."""

    process: asyncio.subprocess.Process
    stderr: int  # a pipe that is read, without waiting
    mark: str
    at: Trajectory | None
    words: bytes = b""  # the last that it has written there
    keys: list[str] = field(default_factory=list)
    idle: asyncio.TimerHandle | None = None  # ends it when it neither ends nor asks for the next

    def busy(self) -> None:
        if self.idle is not None:
            self.idle.cancel()

    def kill(self) -> None:
        self.busy()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def hear(self) -> bool:
        """Takes what it has written to its stderr, of which the last is kept. Returns whether there
        was any."""
        try:
            part = os.read(self.stderr, 1 << 16)
        except BlockingIOError:
            return False
        if not part:  # nobody writes there any more
            asyncio.get_running_loop().remove_reader(self.stderr)
        self.words = (self.words + part)[-LAST_WORDS:]
        return bool(part)

    def last_words(self) -> str:
        """The last line that it has written to its stderr."""
        for _ in range(MOST_HEARD):  # of what it has left behind, somebody may write for ever
            if not self.hear():
                break
        lines = self.words.decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.stderr)
        os.close(self.stderr)


class Trajectories:
    """Gives trajectories to agents. `command`: the agent's program, of which up to `most` processes
    run; None when agents come by themselves, with the owner's key. `url`: their OPENAI_BASE_URL.
    `timeout_s`: longest time of one trajectory with its agent, without that in which engines were
    started anew or took a version."""

    def __init__(
        self,
        sessions: Sessions,
        url: str,
        command: Sequence[str] | None,
        most: int,
        timeout_s: float,
    ):
        self.sessions, self.url, self.command = sessions, url, command
        self.most, self.timeout_s = most, timeout_s
        self.waiting: deque[Trajectory] = deque()
        self.mark = uuid.uuid4().hex
        self._claims: deque[asyncio.Future[Trajectory]] = deque()
        self._by_key: dict[str, Trajectory] = {}
        self._agents: dict[str, Agent] = {}  # by the keys that each was given
        self._alive: set[asyncio.Task[None]] = set()
        self._any_started = False
        self._marks: set[str] = set()  # of agents that may have left something behind
        self._left: set[str] = set()  # those of them that have ended
        self._sweeping: asyncio.Task[None] | None = None

    async def outcome(
        self, session: Session, task: dict[str, Any], held_up: Callable[[], float]
    ) -> Outcome:
        """The outcome of a new trajectory, once an agent has ended it. Nothing is sampled for it
        any more. `held_up`: seconds so far in which engines kept requests waiting
        (`Policy.held_up`)."""
        made = Trajectory(session, task, asyncio.get_running_loop().create_future(), held_up)
        self.sessions.add(session)
        self._by_key[session.key] = made
        self._offer(made)
        try:
            return await made.outcome
        finally:
            self.settle(made, Outcome("given_up"))
            if made in self.waiting:
                self.waiting.remove(made)
            async with session.lock:  # what was being answered has been given up
                pass

    def settle(self, one: Trajectory, outcome: Outcome) -> None:
        """Ends a trajectory, the first time. The agent of one that is given up need not go on."""
        if one.settled:
            return
        one.settled = True
        if one.timer is not None:
            one.timer.cancel()
        self._by_key.pop(one.session.key, None)
        self.sessions.end(one.session, f"its trajectory has ended ({outcome.end})")
        if not one.outcome.done():
            one.outcome.set_result(outcome)
        agent = one.agent
        if agent is not None and agent.at is one:
            agent.at = None
            if outcome.end in ("given_up", "timeout"):
                agent.kill()
            else:
                agent.idle = asyncio.get_running_loop().call_later(self.timeout_s, agent.kill)

    def broke(self, session: Session, error: BaseException) -> None:
        """What a session's engine has raised is raised where its trajectory is waited for."""
        one = self._by_key.get(session.key)
        if one is not None and not one.outcome.done():
            one.outcome.set_exception(error)

    def close(self) -> None:
        """Ends all processes, and what they have started."""
        if self._any_started:
            kill_marked(OF_RUN, self.mark)
            end_marked(*self._marks)

    def at(self, session: Session) -> Trajectory:
        """Raises Refused."""
        if (found := self._by_key.get(session.key)) is None:
            raise Refused(404, "no_trajectory", "this key is of no trajectory")
        return found

    async def next(self, key: str) -> Trajectory:
        """The next trajectory for the agent with this key, which has ended the one it is at."""
        agent = self._agents.get(key)
        if agent is None:
            self.sessions.check_owner(key)
        else:
            if agent.at is not None:
                self.settle(agent.at, Outcome("done"))
            agent.busy()
        while (one := await self._claimed()).settled:  # given up while it was handed over
            pass
        return self._given(one, agent)

    async def _claimed(self) -> Trajectory:
        if self.waiting:
            return self.waiting.popleft()
        claim = asyncio.get_running_loop().create_future()
        self._claims.append(claim)
        try:
            return await claim
        except asyncio.CancelledError:
            if claim.done() and not claim.cancelled():
                self._offer(claim.result())
            raise

    def _offer(self, one: Trajectory) -> None:
        while self._claims:
            claim = self._claims.popleft()
            if not claim.done():
                claim.set_result(one)
                return
        self.waiting.append(one)
        self._start_missing()

    def _start_missing(self) -> None:
        while self.command is not None and self.waiting and len(self._alive) < self.most:
            life = asyncio.create_task(self._live(self.command, self.waiting.popleft()))
            self._alive.add(life)
            life.add_done_callback(self._ended)
            self._any_started = True

    async def _live(self, command: Sequence[str], first: Trajectory) -> None:
        """One process of the agent's program, from its start to its end."""
        agent = None
        try:
            agent = await self._started(command, first.session.key)
            if first.settled:  # it was given up meanwhile
                return
            self._given(first, agent)
            code = await agent.process.wait()
            if agent.at is not None:
                failure = f"the agent ended with {code}{agent.last_words()}" if code else None
                end = "agent_error" if code else "done"
                self.settle(agent.at, Outcome(end, failure=failure))
        except OSError as error:
            failure = f"the agent could not be started: {error}"
            self.settle(first, Outcome("agent_error", failure=failure))
        except Exception as error:  # a fault of ours ends the run; nobody waits for ever
            for one in filter(None, (first, agent and agent.at)):
                self.broke(one.session, error)
            raise
        finally:
            if agent is not None:
                agent.kill()
                agent.close()
                for key in agent.keys:
                    del self._agents[key]
                self._left.add(agent.mark)

    async def _started(self, command: Sequence[str], key: str) -> Agent:
        """A process of the agent's program. Raises OSError."""
        mark = uuid.uuid4().hex
        self._marks.add(mark)
        given = {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": key}
        ours, theirs = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, **given, OF_RUN: self.mark, MARK: mark},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=theirs,
                start_new_session=True,  # Ctrl-C is ours to handle; killpg reaches its children
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(ours, False)
        agent = Agent(process, ours, mark, None)
        asyncio.get_running_loop().add_reader(ours, agent.hear)
        return agent

    async def _sweep(self) -> None:
        """Ends what agents that have ended have left behind, in sessions of its own too. Of many
        that end together all at once."""
        while self._left:
            marks, self._left = self._left, set()
            await asyncio.to_thread(end_marked, *marks)
            self._marks -= marks
            await asyncio.sleep(SWEEP_S)

    def _ended(self, life: asyncio.Task[None]) -> None:
        self._alive.discard(life)
        if not life.cancelled():
            if self._sweeping is None or self._sweeping.done():
                self._sweeping = asyncio.create_task(self._sweep())
            life.result()
            self._start_missing()

    def _given(self, one: Trajectory, agent: Agent | None) -> Trajectory:
        one.agent = agent
        if agent is not None:
            agent.at = one
            agent.keys.append(one.session.key)
            self._agents[one.session.key] = agent
        self._settle_later(one, self.timeout_s, one.held_up())
        return one

    def _settle_later(self, one: Trajectory, seconds: float, held_up: float) -> None:
        """Ends a trajectory after `seconds`, and as many more as engines keep requests waiting
        meanwhile; they did so for `held_up` by now."""

        def late() -> None:
            if (more := one.held_up() - held_up) > 0:
                self._settle_later(one, more, held_up + more)
                return
            why = f"took longer than environment.timeout_s={self.timeout_s:g}"
            self.settle(one, Outcome("timeout", failure=why))

        one.timer = asyncio.get_running_loop().call_later(seconds, late)

    def routes(self) -> tuple:
        return (
            ("GET", "/v1/task", self._task),
            ("POST", "/v1/reward", self._reward),
            ("POST", "/v1/next", self._next),
        )

    async def _task(self, endpoint: Endpoint, request: Request) -> Response:
        return Json(self.at(endpoint.session_of(request)).task)

    async def _reward(self, endpoint: Endpoint, request: Request) -> Response:
        session = endpoint.session_of(request)
        value, turns, states = _reward_in(await body_of(request))
        async with session.lock:  # after what is being answered
            one = self.at(session)
            if POLICY not in session.conversations:
                raise Refused(409, "nothing_sampled", "the policy was asked nothing yet")
            conversation = session.conversations[POLICY]
            number = conversation.num_turns
            if turns is not None and (fault := fault_of(turns, number, value)):
                raise bad_request(f"the agent {fault}")
            if states is not None:
                if len(states) != number:
                    raise bad_request(f"states of {len(states)} turns, and there were {number}")
                conversation.in_states(states)
            self.settle(one, Outcome("done", value, turns=turns))
        return Json({"reward": value})

    async def _next(self, endpoint: Endpoint, request: Request) -> Response:
        one = await unless_gone(request, self.next(key_of(request)))
        return Json({"api_key": one.session.key, "task": one.task})


def _reward_in(content: bytes) -> tuple[float, list[float] | None, list[str | None] | None]:
    """The reward, and those of turns and their states if they are told. Raises Refused for what is
    no finite number in float32, as rewards are kept."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict) and {"reward"} <= body.keys() <= {"reward", "turns", "states"}:
        value, turns, states = body["reward"], body.get("turns", []), body.get("states", [])
        if (
            _is_reward(value)
            and (isinstance(turns, list) and all(map(_is_reward, turns)))
            and (isinstance(states, list) and all(isinstance(one, str | None) for one in states))
        ):
            earned = [float(one) for one in turns] if "turns" in body else None
            told = [one and one.encode("utf-8", "replace").decode() for one in states]
            return float(value), earned, told if "states" in body else None
    raise bad_request(
        'send {"reward": NUMBER} and nothing else but "turns": [NUMBER, ...] and "states": [TEXT, '
        f"...], finite numbers in float32: of up to {LARGEST:.2g}"
    )


def _is_reward(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= LARGEST  # NaN is not
