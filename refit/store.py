"""torch.distributed's store, listening on one address. By itself it would on every interface."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def listen(host: str, port: int = 0, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """A store's server, at `port` or, for 0, at one that is free."""
    family, kind, *_, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    server.listen()
    port = server.getsockname()[1]
    own = {"wait_for_workers": False, "master_listen_fd": server.detach()}  # it closes that
    return TCPStore(host, port, None, True, timeout=timeout, **own)
