"""The run's end of a connection to a process that calls a user's code. That process may be stopped
or keep Python's lock, end in the middle of an answer, or send what it likes: nothing here blocks
the event loop, and no answer is longer than LONGEST."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import struct
from typing import Any

LONGEST = 1 << 26  # bytes of an answer
LENGTH = struct.Struct("!i")  # in front of what is sent, as multiprocessing's connections have it
AT_ONCE = 1 << 20  # bytes that are read at once


class Nonsense(Exception):
    """Raised for what is no answer; the message goes on from the name of who has sent it."""


def framed(message: Any) -> bytes:
    """A message as it is sent. Raises what pickle raises, and ValueError for 2 GiB or more."""
    data = pickle.dumps(message)
    try:
        return LENGTH.pack(len(data)) + data
    except struct.error as error:
        raise ValueError(f"{len(data):,} bytes are too many to be sent to a process") from error


class Wire:
    """One at a time may send, and one may receive."""

    def __init__(self, ours: socket.socket):
        self._socket = ours
        ours.setblocking(False)

    async def send(self, frame: bytes) -> None:
        """What `framed` has made. Raises OSError when the process is gone."""
        await asyncio.get_running_loop().sock_sendall(self._socket, frame)

    async def receive(self) -> dict[str, Any]:
        """The next answer, a JSON object. Raises OSError when the process is gone, Nonsense for
        anything else."""
        (length,) = LENGTH.unpack(await self._read(LENGTH.size))
        if not 0 < length <= LONGEST:
            raise Nonsense(f"sent {length:,} bytes; an answer may have up to {LONGEST:,}")
        data = await self._read(length)
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Nonsense("sent what is no JSON") from error
        if not isinstance(answer, dict):
            raise Nonsense("sent what is no JSON object")
        return answer

    def close(self) -> None:
        self._socket.close()

    async def _read(self, length: int) -> bytes:
        loop, found = asyncio.get_running_loop(), bytearray()
        while len(found) < length:
            part = await loop.sock_recv(self._socket, min(length - len(found), AT_ONCE))
            if not part:
                raise ConnectionError("its connection closed")
            found += part
        return bytes(found)
