"""Under which address this machine is reached."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys

import psutil
import pytest
import ray

from lora_moe_rl.cluster import addresses
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.launch import address

OUTSIDE = "192.0.2.1"  # of a network that there is only in documents


def others() -> list[str]:
    """This machine's addresses but for loopback."""
    found = [a for every in psutil.net_if_addrs().values() for a in every]
    found = [a.address for a in found if a.family == socket.AF_INET]
    return [one for one in found if not ipaddress.ip_address(one).is_loopback]


def test_a_name_becomes_a_number_and_a_number_stays_as_it_is():
    assert addresses.numeric("localhost") == "127.0.0.1"
    assert addresses.numeric("10.1.2.3") == "10.1.2.3"
    assert addresses.numeric("fd00::7") == "fd00::7"


@pytest.mark.skipif(not others(), reason="a machine with no network but loopback")
def test_what_another_machine_sees_is_not_loopback_whatever_the_name_stands_for(capsys):
    try:
        found = addresses.towards(OUTSIDE)
    except OSError:
        pytest.skip("no way out of this machine")
    assert found in others()
    assert addresses.interface(found) in psutil.net_if_addrs()
    assert address.main(OUTSIDE) == 0 and capsys.readouterr().out == f"{found}\n"


def test_of_a_name_with_addresses_of_both_kinds_it_is_that_of_ipv4(monkeypatch):
    """Behind `$address:6379` nobody would find the port of the other."""
    usual = socket.getaddrinfo

    def resolve(host, *args, **more):
        found = usual("127.0.0.1" if host == "both" else host, *args, **more)
        six = socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", 9, 0, 0)
        return [six, *found] if host == "both" else found

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.0.1")
    assert addresses.towards("both") == "127.0.0.1"


def test_a_name_that_others_cannot_find_is_refused_where_there_are_others(monkeypatch):
    """As Debian's own name, which stands for 127.0.1.1."""
    told, nodes = ["n1"], [{"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(socket, "gethostbyname", {"n1": "127.0.1.1", "n2": "10.0.0.2"}.get)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: told[0])
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert addresses.own_address() == "127.0.1.1"  # there are none
    nodes.append({"Alive": True})
    with pytest.raises(ConfigError, match="started on n1 under this name, .* for 127.0.1.1 there"):
        addresses.own_address()
    for told[0], found in (("n2", "10.0.0.2"), ("127.0.0.1", "127.0.0.1")):
        assert addresses.own_address() == found


def test_a_node_whose_name_stands_for_this_machine_is_told(capsys):
    assert address.main("localhost") == 2
    assert "localhost stands for this machine itself (127.0.0.1)" in capsys.readouterr().err
    assert address.main("no-such-host.invalid") == 2
    assert "no-such-host.invalid has no address here" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", *others()[:1]])
def test_gloo_speaks_on_the_interface_towards_the_other(host):
    """In a process of its own, of whose environment nothing else comes to hear."""
    code = (
        "import os; from lora_moe_rl.cluster.addresses import speak_towards; "
        f"speak_towards({host!r}); print(*map(os.environ.get, ('GLOO_SOCKET_IFNAME', "
        "'NCCL_SOCKET_IFNAME')))"
    )
    plain = {key: one for key, one in os.environ.items() if "SOCKET_IFNAME" not in key}
    command = [sys.executable, "-c", code]
    gloo, nccl = subprocess.check_output(command, env=plain, text=True).split()
    assert any(a.address == host for a in psutil.net_if_addrs()[gloo])
    assert nccl == (gloo if host == "127.0.0.1" else "None")  # NCCL finds the fast ones
    chosen = plain | {"GLOO_SOCKET_IFNAME": "ib0"}
    assert subprocess.check_output(command, env=chosen, text=True).split()[0] == "ib0"
