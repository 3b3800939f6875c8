"""Ray's actors: created by name, their failures turned into ours."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from lora_moe_rl.cluster.process_end import Watched
from lora_moe_rl.cluster.stacks import Place
from lora_moe_rl.errors import ActorFailed, ActorSilent, LoraMoeRlError
from lora_moe_rl.files.run_dir import RunDir

PEER_GRACE_S = 5.0  # within which Ray tells of an actor's death


class Actor:
    """A named Ray actor of a run."""

    def __init__(self, handle: Any, name: str, run_dir: RunDir):
        self.handle, self.name, self.run_dir = handle, name, run_dir
        self._process: Watched | None = None
        self.pid: int | None = None  # once it has started, if it is on this machine
        here = ray.get_runtime_context().get_node_id()
        where = handle.__ray_call__.remote(_where).future()
        where.add_done_callback(lambda answer: self._watch(answer, here))

    def _watch(self, answer: Future, here: str) -> None:
        """Watches the actor's process from when it has started, if it is on this machine."""
        with suppress(RayError, OSError, psutil.Error):  # it did not start, or has ended already
            node, pid = answer.result()
            if node == here:
                self._process, self.pid = Watched(pid), pid

    def remote(self, method: str, *args: Any, num_returns: int = 1):
        """Calls a method; returns its ObjectRef, or a list of them."""
        return getattr(self.handle, method).options(num_returns=num_returns).remote(*args)

    def start(self) -> Any:
        """The call that starts it."""
        return self.remote("start")

    @property
    def place(self) -> Place:
        return self.name, self.pid, self.run_dir.log_path(self.name)

    def end(self) -> None:
        """Ends its process at once, also one that hangs or is stopped, which cannot hear Ray."""
        ray.kill(self.handle)
        if self._process is not None:
            self._process.kill()

    def failed(self, error: BaseException) -> ActorFailed:
        """The error that says what happened to this actor, with the last lines of its log."""
        lines = str(error).strip().splitlines()
        reason = (lines[0] if lines else type(error).__name__) + self._end(error)
        return ActorFailed(self.name, reason, self.run_dir.tail(self.name))

    def _end(self, error: BaseException) -> str:
        """How its process has ended: by the kernel's word, or else by what Ray makes of it."""
        if not isinstance(error, RayActorError):
            return ""
        how = self._process.how_it_ended() if self._process else None
        if how is None:
            how = str(error).partition("Worker exit detail: ")[2].partition("\n")[0]
        return f" ({how})" if how else ""


def _where(actor: Any) -> tuple[str, int]:
    """The node and the process in which an actor runs. Called in the actor."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


def states(calls: dict[str, Any | None]) -> dict[str, str]:
    """What each actor is doing, by its call that starts it; None: it has not been called yet. Does
    not wait."""
    refs = [ref for ref in calls.values() if ref is not None]
    done = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
    return {name: "ready" if ref in done else "starting" for name, ref in calls.items()}


def get(
    actors: Sequence[Actor],
    refs: Sequence[Any],
    timeout: float | None = None,
    said: float | None = None,
) -> list[Any]:
    """The results of one call on each actor.

    As soon as one has failed, raises our own errors as they are, and ActorFailed (which names the
    actor) for everything else; ActorSilent names those from which nothing was heard for `timeout`
    seconds. `said`: the time-out that the error names, if not this one.
    """
    pending, found = dict(zip(refs, actors, strict=True)), dict[Any, Any]()
    if not refs:
        return []
    done, waiting = ray.wait(list(refs), num_returns=1, timeout=timeout)
    while done:
        if failures := _taken(pending, done, found):
            if waiting and not any(_explains(error) for _, error in failures):
                done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=PEER_GRACE_S)
                failures += _taken(pending, done, found)
            _raise_one_of(failures)
        if not waiting:
            return [found[ref] for ref in refs]
        done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
    names = ", ".join(pending[ref].name for ref in waiting)
    tail = pending[waiting[0]].run_dir.tail(pending[waiting[0]].name)
    raise ActorSilent(names, f"no answer within {said or timeout:.0f} s", tail)


async def answers(
    actors: Sequence[Actor], refs: Sequence[Any], timeout: float | None = None
) -> list[Any]:
    """Waits for answers as `get` does, while other tasks of the event loop go on."""
    found = dict[Any, Any]()
    waiting = {asyncio.ensure_future(_settled(ref, found)) for ref in refs}
    failed = False
    try:
        while waiting and not failed:
            done, waiting = await asyncio.wait(
                waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            failed = not all(task.result() for task in done)
    finally:
        for task in waiting:
            task.cancel()
    if len(found) == len(refs):  # as they came: what is large is not unpacked once more
        return [found[ref] for ref in refs]
    silent = waiting and not failed
    return get(actors, refs, 0 if silent else None, said=timeout)


async def answer(actor: Actor, ref: Any, timeout: float | None = None) -> Any:
    """The result of one call: see `answers`."""
    return (await answers([actor], [ref], timeout))[0]


async def _settled(ref: Any, found: dict[Any, Any]) -> bool:
    """Waits for a call to end. Returns True when it ended well: its result is in `found` then."""
    try:
        found[ref] = await ref
    except Exception:  # which one it is, `get` finds out
        return False
    return True


Failure = tuple[Actor, BaseException]


def _taken(pending: dict[Any, Actor], done: Sequence[Any], found: dict[Any, Any]) -> list[Failure]:
    """Puts the results of calls into `found`. Returns those that failed."""
    failures: list[Failure] = []
    for ref in done:
        try:
            found[ref] = ray.get(ref)
        except RayTaskError as error:
            failures.append((pending[ref], error.cause or error))
        except RayError as error:
            failures.append((pending[ref], error))
    return failures


def _explains(error: BaseException) -> bool:
    """False for what may follow from another's failure: an actor that dies makes its peers fail,
    often before its own death is known."""
    return isinstance(error, LoraMoeRlError | RayActorError)


def _raise_one_of(failures: list[Failure]) -> NoReturn:
    actor, error = next((f for f in failures if _explains(f[1])), failures[0])
    if isinstance(error, LoraMoeRlError):
        raise error from None
    raise actor.failed(error) from error
