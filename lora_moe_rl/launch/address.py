"""`python -m lora_moe_rl.launch.address [HOST]`: this node's address, as HOST, another node, sees
it; without HOST, what its own name stands for."""

from __future__ import annotations

import ipaddress
import socket
import sys

from lora_moe_rl.cluster.addresses import numeric, towards


def main(other: str | None = None) -> int:
    """Prints it. Returns 2 when there is none that others can reach."""
    here = socket.gethostname()
    try:
        found = numeric(here) if other is None else towards(other)
    except OSError as error:
        return _failed(f"{other or here} has no address here: {error}; mend DNS or /etc/hosts")
    if other is not None and ipaddress.ip_address(found).is_loopback:
        return _failed(
            f"the name {other} stands for this machine itself ({numeric(other)}): mend DNS or "
            "/etc/hosts, or name another node"
        )
    print(found)
    return 0


def _failed(why: str) -> int:
    print(f"error: {socket.gethostname()}: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
