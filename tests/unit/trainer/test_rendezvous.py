"""Which sockets the trainer's ranks listen on."""

from __future__ import annotations

import ipaddress
import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
from torch.distributed import TCPStore

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.addresses import reserve
from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.facts import find
from lora_moe_rl.refit.store import listen
from lora_moe_rl.trainer.worker import TrainerWorker
from lora_moe_rl.verify.ranks import free_address

RANK = """
import json, os, sys
import psutil, torch
from torch import distributed as dist
from lora_moe_rl.trainer.rendezvous import join

rank, address = int(sys.argv[1]), sys.argv[2]
join("gloo", rank, 2, address)
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
other = dist.new_group([0, 1], backend="gloo")
dist.all_reduce(value, group=other)
listening = [
    connection.laddr.ip
    for connection in psutil.Process().net_connections("inet")
    if connection.status == psutil.CONN_LISTEN
]
dist.barrier()
by = os.environ["GLOO_SOCKET_IFNAME"]
print(json.dumps({"value": value.item(), "listening": listening, "by": by}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_the_address_of_ranks_is_a_number_where_ray_was_started_with_a_name(monkeypatch):
    """`ray start --node-ip-address=NAME` keeps the name."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "localhost")
    spec = AdapterSpec.build(find("qwen3-30b-a3b").shape, RunConfig().adapter)
    worker = TrainerWorker(RunConfig(), spec, Path("model"), 0)
    host, _, port = worker.address().partition(":")
    assert host == "127.0.0.1"
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind((host, int(port)))  # until rank 0 listens there, the port is its own


def test_a_port_that_is_held_is_listened_on():
    held = reserve("127.0.0.1")
    port = held.getsockname()[1]
    store = listen("127.0.0.1", port)
    held.close()
    store.set("key", "value")
    assert TCPStore("127.0.0.1", port, None, False).get("key") == b"value"


def test_ranks_on_one_machine_listen_on_loopback_alone():
    command = [sys.executable, "-c", RANK]
    address = free_address()
    ranks = [
        subprocess.Popen([*command, str(rank), address], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    found = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert [one["value"] for one in found] == [6.0, 6.0]
    listening = [ip for one in found for ip in one["listening"]]
    assert len(listening) >= 3  # the store, and gloo in each rank
    for ip in listening:
        assert ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback, listening
    # Where a machine's name stands for another address, as this one's may not, gloo goes by this.
    loopback = [psutil.net_if_addrs()[one["by"]] for one in found]
    assert all(addresses[0].address == "127.0.0.1" for addresses in loopback)
