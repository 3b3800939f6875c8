"""How the trainer's ranks find each other, and on which sockets they listen meanwhile.

torch.distributed's store takes messages from whoever reaches it. So rank 0's listens on the address
that it was given alone: on one machine that is the loopback interface, and so are gloo's and NCCL's
own connections, which would choose an interface by the machine's name.
"""

from __future__ import annotations

import ipaddress
import os

import psutil
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout

from lora_moe_rl.refit.store import listen

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def join(backend: str, rank: int, world_size: int, address: str) -> None:
    """torch.distributed's default group. `address`: host:port of rank 0, the host by number."""
    host, _, port = address.rpartition(":")
    if ipaddress.ip_address(host).is_loopback:
        for variable in INTERFACES:
            os.environ.setdefault(variable, _interface(host))
    timeout = default_pg_timeout
    if rank == 0:
        store = listen(host, int(port), timeout)
    else:
        store = dist.TCPStore(host, int(port), None, False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _interface(host: str) -> str:
    """The name of the network interface that has this address."""
    found = psutil.net_if_addrs().items()
    return next(name for name, addresses in found if any(a.address == host for a in addresses))
