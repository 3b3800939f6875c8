"""Ray: joined where a cluster is named, or started for one run alone.

Who can talk to Ray can run code (its protocol is pickle): on one machine it listens on the loopback
interface alone, and everywhere a token is asked for (see `security.py`).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker
from ray._private.node import Node

from lora_moe_rl.cluster.security import hide_sockets, make_token, only_loopback, require_token
from lora_moe_rl.cluster.watchdog import tell, watch
from lora_moe_rl.errors import ClusterError, ConfigError
from lora_moe_rl.upstream.checks import require_attributes

# Of Ray's store on one machine: bytes at least, and shares of the machine's memory, as Ray takes by
# itself, and of what is free in /dev/shm, where a held base stands too.
LEAST_STORE, OF_MEMORY, OF_SHM = 2 * 2**30, 0.3, 0.5
SHM = "/dev/shm"
RAY_STARTS = 3
# By what starts them: the autoscaler's monitor, the dashboard's server (which Ray starts without a
# dashboard too) and what copies logs to a driver. Each takes seconds of a core; nobody asks them.
UNASKED = ("start_monitor", "start_api_server", "start_log_monitor")
QUIET = {"logging_level": logging.ERROR, "log_to_driver": False}

log = logging.getLogger(__name__)


def prepare_ray() -> None:
    """Once, before `start_ray`: says who may talk to Ray, and from now on what this process starts
    ends with it. Raises ConfigError for a cluster without a token, and where Ray is there already,
    which a run would end with its own."""
    if ray.is_initialized():
        raise ConfigError(
            "Ray runs in this process already, and a run starts one of its own, and ends it: call "
            "ray.shutdown() before, or start the run in a process of its own (lora-moe-rl train)"
        )
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "RAY_ADDRESS" in os.environ:
        require_token()
        return
    watch(make_token() + hide_sockets())


def store_bytes() -> int:
    """How much of a step's routes, batch and copies Ray may hold before it writes them to the disk.
    Memory is taken as the store is filled."""
    room = shutil.disk_usage(SHM).free if os.path.isdir(SHM) else 0
    most = min(OF_MEMORY * psutil.virtual_memory().total, OF_SHM * room)
    return max(LEAST_STORE, int(most))


def start_ray(num_actors: int) -> None:
    """Joins the cluster of RAY_ADDRESS, or starts Ray in this process. May run in a thread.

    Raises ConfigError when the directory of its sockets has too long a name, ClusterError when it
    does not start.
    """
    if "RAY_ADDRESS" in os.environ:
        with _own_signals():
            init_ray(**QUIET)
        return
    try:
        with _own_signals():
            local_ray(num_actors, object_store_memory=store_bytes())
        tell()
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        raise ConfigError(
            f"Ray cannot make its sockets below {tempfile.gettempdir()}: the name is too long; set "
            "RAY_TMPDIR to a directory with a short one, such as /tmp"
        ) from error


def local_ray(num_actors: int, **options: Any) -> None:
    """Starts Ray for this process alone, with room for so many actors of one core each.

    They may outnumber the machine's cores, and take turns there. Nor is Ray told of more cores than
    are asked for: it starts a Python process for each of them, used or not. Raises ClusterError
    when it does not start.
    """
    with only_loopback(), _without_the_unasked():
        init_ray(address="local", num_cpus=num_actors, include_dashboard=False, **QUIET, **options)


def init_ray(**options: Any) -> None:
    """`ray.init`, tried a few times: on a machine that is busy with something else Ray gives up on
    its own agents after 15 seconds. Raises ClusterError when it does not start."""
    # By default Ray's workers stand back behind all else on the machine, its own agents included.
    os.environ.setdefault("RAY_worker_niceness", "0")
    require_attributes(ray_worker, ("print_to_stdstream", "_unhandled_error_handler"), __name__)
    ray_worker.print_to_stdstream = _to_the_log  # pyright: ignore[reportAttributeAccessIssue]
    ray_worker._unhandled_error_handler = _unread
    reason = ""
    for attempt in range(RAY_STARTS):
        try:
            ray.init(**options)
            return
        except Exception as error:
            if type(error) not in (Exception, RuntimeError):  # Ray raises Exception itself
                raise
            ray.shutdown()
            reason = str(error).strip().splitlines()[0].rstrip(".")
            log.warning("Ray did not start, attempt %d of %d: %s", attempt + 1, RAY_STARTS, reason)
    raise ClusterError(
        f"Ray did not start in {RAY_STARTS} attempts: {reason}. Its logs are in "
        f"{tempfile.gettempdir()}/ray/session_latest/logs; is the machine busy or its disk full?"
    )


@contextmanager
def _without_the_unasked() -> Iterator[None]:
    """Ray has no setting against them."""
    require_attributes(Node, UNASKED, __name__)
    kept = {name: getattr(Node, name) for name in UNASKED}
    for name in UNASKED:
        setattr(Node, name, lambda *args, **options: None)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


def _unread(error: Exception) -> None:
    """An error that is let go unread: of a call with several results each has it, and it was raised
    where the first was waited for."""
    lines = str(error).splitlines() or [type(error).__name__]
    log.info("Ray: a result that nobody read is an error: %s", lines[-1])


def _to_the_log(told: dict[str, Any], **_: Any) -> None:
    """What Ray would print to stdout, where `--json` has its lines. That an actor died is told by
    who waits for it."""
    for line in told["lines"]:
        log.info("Ray: %s", line)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Puts SIGTERM's handler back as it was before: Ray's prints a stack. Only the main thread can:
    who calls this from another does it himself."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
