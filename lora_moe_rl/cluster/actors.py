"""Ray: started or joined, actors created by name, their failures turned into ours."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from lora_moe_rl.cluster.process_end import Watched
from lora_moe_rl.cluster.security import make_token, only_loopback, require_token
from lora_moe_rl.cluster.stacks import Place
from lora_moe_rl.cluster.watchdog import tell, watch
from lora_moe_rl.errors import (
    ActorFailed,
    ActorSilent,
    ClusterError,
    ConfigError,
    LoraMoeRlError,
)
from lora_moe_rl.files.run_dir import RunDir

LOCAL_OBJECT_STORE = 2 * 2**30
RAY_STARTS = 3
PEER_GRACE_S = 5.0  # within which Ray tells of an actor's death

log = logging.getLogger(__name__)


def start_ray(num_actors: int) -> None:
    """Joins the cluster of RAY_ADDRESS, or starts Ray in this process.

    Who can talk to Ray can run code (its protocol is pickle): on one machine it listens on the
    loopback interface alone, and everywhere a token is asked for (see `security.py`).

    On one machine actors outnumber cores on purpose (they take turns); Ray is told of enough.
    Raises ConfigError when the directory of its sockets has too long a name, and for a cluster
    without a token.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if "RAY_ADDRESS" in os.environ:
        require_token()
        with _own_signals():
            init_ray(**quiet)
        return
    make_token()
    watch()
    try:
        with only_loopback(), _own_signals():
            init_ray(
                address="local",
                num_cpus=max(num_actors + 1, os.cpu_count() or 1),
                object_store_memory=LOCAL_OBJECT_STORE,
                include_dashboard=False,
                **quiet,
            )
        tell()
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        raise ConfigError(
            f"Ray cannot make its sockets below {tempfile.gettempdir()}: the name is too long; set "
            "RAY_TMPDIR to a directory with a short one, such as /tmp"
        ) from error


def init_ray(**options: Any) -> None:
    """`ray.init`, tried a few times: on a machine that is busy with something else Ray gives up on
    its own agents after 15 seconds. Raises ClusterError when it does not start."""
    # By default Ray's workers stand back behind all else on the machine, its own agents included.
    os.environ.setdefault("RAY_worker_niceness", "0")
    reason = ""
    for attempt in range(RAY_STARTS):
        try:
            ray.init(**options)
            return
        except Exception as error:
            if type(error) not in (Exception, RuntimeError):  # Ray raises Exception itself
                raise
            ray.shutdown()
            reason = str(error).strip().splitlines()[0]
            log.warning("Ray did not start, attempt %d of %d: %s", attempt + 1, RAY_STARTS, reason)
    raise ClusterError(
        f"Ray did not start in {RAY_STARTS} attempts: {reason}. Its logs are in "
        f"{tempfile.gettempdir()}/ray/session_latest/logs; is the machine busy or its disk full?"
    )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Puts SIGTERM's handler back as it was before: Ray's prints a stack."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


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
