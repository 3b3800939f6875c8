"""Ray as a run starts it: which sockets it listens on, and who is let in."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from lora_moe_rl import cli
from lora_moe_rl.cluster import security
from lora_moe_rl.errors import ConfigError

OWN_VARIABLES = (
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "VLLM_RPC_BASE_PATH",
)

DRIVER = """
import json, os, stat, sys, time
from contextlib import suppress
import psutil, ray
from lora_moe_rl.cli import exit_code_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.run.own_ray import OwnRay
from lora_moe_rl.run.signals import interrupts

class One:
    def pid(self):
        return os.getpid()

def run():
    with OwnRay(RunConfig()) as own_ray:
        own_ray.begin()
        own_ray.wait()
        time.sleep(1)  # in which Ray would end with what has started it
        return look()

def look():
    ray.get(ray.remote(One).remote().pid.remote())
    listening, words = [], []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # Ray's own come and go
            words += (command := process.cmdline())
            listening += [
                (connection.laddr.ip, " ".join(command)[:100])
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
    token = os.environ["RAY_AUTH_TOKEN_PATH"]
    found = {"listening": listening, "mode": stat.S_IMODE(os.stat(token).st_mode), "token": token}
    found["unasked"] = [w for w in words if w.endswith(("monitor.py", "dashboard.py"))]
    sockets = os.environ["VLLM_RPC_BASE_PATH"]
    found |= {"sockets": sockets, "mode of sockets": stat.S_IMODE(os.stat(sockets).st_mode)}
    found["address"] = ray.get_runtime_context().gcs_address
    print(json.dumps(found), flush=True)
    sys.stdin.readline()  # until SIGTERM comes
    return 0

with interrupts():
    sys.exit(exit_code_of(run, []))
"""

STRANGER = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", namespace=None, timeout=20))
"""


def environment(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in OWN_VARIABLES} | more


def stranger(address: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", STRANGER, address]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True)


def start_driver() -> tuple[subprocess.Popen, dict]:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    line = driver.stdout.readline()
    assert line, driver.communicate(timeout=60)[1]  # it ended, and says why
    return driver, json.loads(line)


def test_a_driver_that_is_killed_leaves_no_process():
    driver, _ = start_driver()
    started = psutil.Process(driver.pid).children(recursive=True)
    assert len(started) >= 5
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(started, timeout=30)
    alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, [p.cmdline() for p in alive]


def test_ray_of_a_run_listens_on_loopback_alone_wants_the_token_and_ends_at_sigterm():
    driver, found = start_driver()
    assert len(found["listening"]) >= 5  # gcs, raylet, its agent, driver, actor
    for address, command in found["listening"]:
        assert ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback, command
    assert found["mode"] == 0o600
    assert found["unasked"] == []
    assert found["mode of sockets"] == 0o700

    has_it = stranger(found["address"], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=found["token"])
    assert has_it.returncode == 0, has_it.stderr
    for variables in (
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
    ):
        refused = stranger(found["address"], **variables)
        assert refused.returncode != 0 and "AuthenticationError" in refused.stderr
    driver.send_signal(signal.SIGTERM)
    _, error = driver.communicate(timeout=60)
    assert (driver.returncode, error) == (cli.INTERRUPTED, "error: interrupted\n")
    assert not os.path.exists(found["token"])
    assert not os.path.exists(found["sockets"])


def test_a_cluster_without_a_token_is_refused(monkeypatch, tmp_path):
    for name in OWN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray looks for one
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    security.AuthenticationTokenLoader.instance().reset_cache()
    with pytest.raises(ConfigError, match=r"no token for the Ray cluster of RAY_ADDRESS=10.0.0.7"):
        security.require_token()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    security.require_token()


def test_vllm_still_asks_where_its_sockets_go(monkeypatch, tmp_path):
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    monkeypatch.setenv(security.VLLM_SOCKETS, str(tmp_path))
    assert get_open_zmq_ipc_path().startswith(f"ipc://{tmp_path}/")
