"""Which of this machine's addresses others reach it under. Its own name may stand for another one,
on Debian for 127.0.1.1."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from lora_moe_rl.errors import ConfigError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def numeric(host: str) -> str:
    """The address, by number, that a name stands for on this machine: of IPv4, as gloo and Ray are
    told it, where a name has both. Raises OSError."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return socket.gethostbyname(host)


def own_address() -> str:
    """This node's address, by number, as Ray has told it to the others. Raises ConfigError for a
    name that stands for this machine itself where there are others: they would wait for nobody."""
    import ray

    host = ray.util.get_node_ip_address()
    found = numeric(host)
    for_itself = host not in (found, "localhost") and ipaddress.ip_address(found).is_loopback
    if for_itself and sum(node["Alive"] for node in ray.nodes()) > 1:
        raise ConfigError(
            f"Ray was started on {host} under this name, which stands for {found} there, where no "
            "other node finds it: start it with --node-ip-address=NUMBER, or mend /etc/hosts"
        )
    return found


def towards(host: str) -> str:
    """This machine's address on the way to another one: what that one sees. Nothing is sent.
    Raises OSError when there is no way to it."""
    family, kind, *_, address = socket.getaddrinfo(numeric(host), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as one:
        one.connect(address)
        return one.getsockname()[0]


def reserve(host: str) -> socket.socket:
    """A socket that holds a port which is free at this address: as long as it lives the system
    gives the port to nobody, and who says SO_REUSEADDR may listen on it (`refit/store.py`). One
    that was only free a moment ago may be somebody's when it is wanted."""
    family, kind, *_, (address, *_) = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    held = socket.socket(family, kind)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    return held


def interface(address: str) -> str | None:
    """The name of the network interface that has this address."""
    found = psutil.net_if_addrs().items()
    return next((name for name, all_ in found if any(a.address == address for a in all_)), None)


def speak_towards(host: str) -> None:
    """From here on gloo in this process, and in those that it starts, is reached on the interface
    that `host` is reached by; on one machine NCCL too. Unless the environment says otherwise: by
    themselves they would go by the machine's name, and take the first interface there is."""
    mine = interface(towards(host))
    if mine is None:
        return
    os.environ.setdefault(GLOO, mine)
    if ipaddress.ip_address(numeric(host)).is_loopback:
        os.environ.setdefault(NCCL, mine)
