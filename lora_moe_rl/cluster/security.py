"""Who may talk to Ray and to engines: nobody from another machine, or only who has the token.

Written against Ray 2.60. `tests/unit/cluster/test_ray_doors.py` looks at the sockets that it opens.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config

from lora_moe_rl.errors import ConfigError

MODE, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
VLLM_SOCKETS = "VLLM_RPC_BASE_PATH"
LOOPBACK = "127.0.0.1"


def make_token() -> list[str]:
    """A token for this run, in a file that only its owner can read and that goes with the process.
    A mode of authentication that the user has set stays as it is. Returns what was made."""
    if MODE in os.environ:
        return []
    descriptor, path = tempfile.mkstemp(prefix="lora-moe-rl-ray-")  # with mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    atexit.register(Path(path).unlink, missing_ok=True)
    os.environ[TOKEN_PATH] = path
    _use_token()
    return [path]


def hide_sockets() -> list[str]:
    """vLLM's processes talk through sockets, in part in pickles: those of this run's engines are in
    a directory that only its owner can enter, and that goes with the process. Another that the user
    has set stays. Returns what was made."""
    if VLLM_SOCKETS in os.environ:
        return []
    # Shorter than the names that Ray gives its own sockets, for which there has to be room.
    path = tempfile.mkdtemp(prefix="lora-moe-rl-")  # with mode 0700
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    os.environ[VLLM_SOCKETS] = path
    return [path]


def require_token() -> None:
    """Raises ConfigError unless there is a token for the cluster, or the user has set the mode."""
    if MODE in os.environ:
        return
    if not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        raise ConfigError(
            f"there is no token for the Ray cluster of RAY_ADDRESS={os.environ['RAY_ADDRESS']}: "
            f"without one, whoever reaches its ports can run code on it. Start its nodes with "
            f"{MODE}=token and one token ({TOKEN_PATH}=FILE; docs/cluster.md), and give the run "
            f"that too; or set {MODE}=disabled for a cluster that nobody else can reach"
        )
    _use_token()


def _use_token() -> None:
    os.environ[MODE] = "token"
    Config.initialize("")  # Ray has read its settings when it was imported
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def only_loopback() -> Iterator[None]:
    """Ray that is started inside listens on the loopback interface alone.

    `ray.init` takes an address of this machine for the wish to be reached by others
    (services.resolve_ip_for_localhost). What decides is whether Ray may form clusters, as it may
    not by default on macOS and Windows. Raises RuntimeError when Ray does not care any more.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
    if (address := ray.util.get_node_ip_address()) != LOOPBACK:
        ray.shutdown()
        raise RuntimeError(f"Ray {ray.__version__} listens on {address}, not on {LOOPBACK} alone")
