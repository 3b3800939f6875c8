"""Environments of TRL's kind, each in a process of its own that may be lost.

begin      a process that holds one, an idle one of its factory if there is any
ask        what it answers; a process that is late or ends has failed, and is ended
give_back  it is idle again: the next conversation resets it, as TRL does
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from lora_moe_rl.calls.ending import end_marked
from lora_moe_rl.calls.pool import START_TIMEOUT_S
from lora_moe_rl.calls.wire import Nonsense, Wire, framed
from lora_moe_rl.cluster.in_thread import in_thread
from lora_moe_rl.cluster.watchdog import KILL_S, kill_marked
from lora_moe_rl.environments.parts.endings import Failed
from lora_moe_rl.errors import ConfigError

MODULE = "lora_moe_rl.environments.parts.instance_worker"
# In the environment of them all, and of what they start: by it they are found at the end.
OF_RUN = "LORA_MOE_RL_ENVIRONMENTS"
TIMEOUT = "environment.tool_timeout_s"


@dataclass(frozen=True)
class Described:
    """What an environment is: the name of its class, whether it gives rewards, at its end and of
    turns, whether it tells of the states that turns begin in, and its tools."""

    kind: str
    rewards: bool
    rewards_turns: bool
    tells_states: bool
    schemas: list[dict[str, Any]]

    @property
    def gives_rewards(self) -> bool:
        return self.rewards or self.rewards_turns


class Instance:
    """One environment that lives in a process of its own. `factory` is how it was named."""

    def __init__(self, factory: str, connection: socket.socket, timeout_s: float):
        self.factory, self.timeout_s, self._wire = factory, timeout_s, Wire(connection)
        self._process: psutil.Process | None = None
        self.mark = ""

    async def make(self) -> None:
        """Raises Failed."""
        hello = await self._within("its process", START_TIMEOUT_S, None)
        with suppress(psutil.Error):  # it has ended already, which is seen when it is asked
            self._process = psutil.Process(hello["pid"])
        self.mark = hello["mark"]
        await self.ask("make", START_TIMEOUT_S, factory=self.factory)

    async def ask(self, do: str, timeout_s: float | None = None, **asked: Any) -> dict[str, Any]:
        """Raises Failed for what raises or returns nonsense, and when the process ends or is
        late."""
        frame = framed({"do": do, **asked})
        told = await self._within(do, timeout_s or self.timeout_s, frame)
        if "error" in told:
            raise Failed("environment_error", f"{self.factory}: {do} {told['error']}")
        return told

    async def _within(self, what: str, timeout_s: float, frame: bytes | None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                if frame is not None:
                    await self._wire.send(frame)
                return await self._wire.receive()
        except TimeoutError:
            bound = (
                f"{TIMEOUT}={timeout_s:g}" if timeout_s == self.timeout_s else f"{timeout_s:g} s"
            )
            late = f"{self.factory}: {what} took longer than {bound}"
            raise Failed("timeout", late) from None
        except Nonsense as error:
            told = f"{self.factory}: the process {error}, in {what}"
            raise Failed("environment_error", told) from error
        except OSError as error:
            ended = f"{self.factory}: the process ended in {what}"
            raise Failed("environment_error", ended) from error

    @property
    def alive(self) -> bool:
        """Whether its process is there, which nobody may have noticed while it was idle."""
        return self._process is not None and self._process.is_running()

    def leave(self) -> None:
        """Closes the connection, at which the process ends by itself if it can."""
        self._wire.close()

    def end(self) -> None:
        """Ends the process and what it has started."""
        if self._process is not None and self._process.is_running():  # no other of its number
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.leave()
        if self.mark:
            end_marked(self.mark)


class Instances:
    """The environments of a run, of some factories (`file.py:Class`). Of each factory one is made
    at once: `described` says what they are. Not more than `most` are there at the same time.

    Raises ConfigError for what cannot be imported, made, or called as tools.
    """

    def __init__(self, factories: Sequence[str], most: int, timeout_s: float, max_chars: int):
        self._words = [str(max_chars), *dict.fromkeys(factories)]
        self._timeout_s, self._room = timeout_s, asyncio.Semaphore(most)
        self._most, self._in_use = most, 0
        self._idle: defaultdict[str, list[Instance]] = defaultdict(list)
        self._live: set[Instance] = set()
        self._mark = uuid.uuid4().hex
        self._again: asyncio.Task[None] | None = None  # starts the process that forks again
        self._to_fork, self._process = self._start()
        self.described: dict[str, Described] = {}
        try:
            for factory in dict.fromkeys(factories):
                with ThreadPoolExecutor(1) as thread:  # a loop may be running here
                    told = thread.submit(asyncio.run, self._describe(factory)).result()
                self.described[factory] = told
        except Failed as error:
            self.close()
            raise ConfigError(f"environment.factory={error}") from error

    async def begin(self, factory: str) -> Instance:
        """Waits while there are as many as there may be; an idle one of another factory makes room.
        Raises Failed."""
        await self._room.acquire()
        self._in_use += 1
        try:
            while self._idle[factory]:
                if (found := self._idle[factory].pop()).alive:
                    return found
                await self._end(found)  # the kernel has ended it, for want of memory perhaps
            idle = [one for several in self._idle.values() for one in several]
            if self._in_use + len(idle) > self._most:
                self._idle[idle[0].factory].remove(idle[0])
                await self._end(idle[0])
            return await self._made(factory)
        except BaseException:
            self._leave()
            raise

    async def give_back(self, instance: Instance, usable: bool) -> None:
        """One that is not usable is ended."""
        self._leave()
        if usable:
            self._idle[instance.factory].append(instance)
        else:
            await self._end(instance)

    def _leave(self) -> None:
        self._in_use -= 1
        self._room.release()

    def close(self) -> None:
        """Ends them all, and what they have started."""
        marks = [instance.mark for instance in self._live if instance.mark]
        for instance in self._live:
            instance.leave()
        self._live, self._idle = set(), defaultdict(list)
        self._to_fork.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # then it is named by what follows
            self._process.wait(KILL_S)
        kill_marked(OF_RUN, self._mark)
        end_marked(*marks)

    async def _describe(self, factory: str) -> Described:
        instance = await self._made(factory)
        # transformers is imported there, which takes its time.
        described = Described(**await instance.ask("describe", START_TIMEOUT_S))
        await self._end(instance)
        return described

    async def _end(self, instance: Instance) -> None:
        """In a thread: the kernel may take its time."""
        self._live.discard(instance)
        await asyncio.to_thread(instance.end)

    async def _made(self, factory: str) -> Instance:
        instance = Instance(factory, await self._fork(), self._timeout_s)
        self._live.add(instance)
        try:
            await instance.make()
        except BaseException:
            await self._end(instance)
            raise
        return instance

    async def _fork(self) -> socket.socket:
        """The connection to a new process. Where the process that forks was lost, it is started
        again. Raises Failed."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                await self._send(theirs.fileno())
            except (ConfigError, OSError) as error:
                ours.close()
                why = f"no process could be started: {error}"
                raise Failed("environment_error", why) from error
            except BaseException:
                ours.close()
                raise
        return ours

    async def _send(self, descriptor: int) -> None:
        """Hands a new process its end of the connection. Raises OSError and what `_start` does."""
        try:
            socket.send_fds(self._to_fork, [b"1"], [descriptor])
            return
        except OSError:  # it was lost, which others may have found too
            self._again = self._again or asyncio.create_task(self._start_again())
        await asyncio.shield(self._again)
        socket.send_fds(self._to_fork, [b"1"], [descriptor])

    async def _start_again(self) -> None:
        """In a thread: it imports the factories' files anew, while all else goes on."""
        lost = self._to_fork
        try:
            self._to_fork, self._process = await in_thread("environments", self._start)
            lost.close()
        finally:
            self._again = None

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Starts the process that imports the factories' files, and forks. Returns how it is asked,
        once it is ready."""
        to_fork, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(theirs.fileno()), *self._words],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": path, OF_RUN: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        theirs.close()
        to_fork.settimeout(START_TIMEOUT_S)
        named = f"environment.factory={', '.join(self._words[1:])}"
        try:
            with to_fork.makefile("rb") as file:
                told = json.loads(file.readline() or b'{"error": "its process ended at start"}')
        except TimeoutError:
            told = {"error": f"its process was not ready within {START_TIMEOUT_S:g} s"}
        if "error" in told:
            to_fork.close()
            process.kill()
            process.wait()
            raise ConfigError(f"{named}: {told['error']}")
        return to_fork, process
