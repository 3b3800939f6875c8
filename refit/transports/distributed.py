"""torch.distributed over gloo: each trainer rank straight to each engine worker.

vLLM's workers have a torch.distributed world of their own, so every pair gets a process group of
two, over a store that the trainer rank holds. The worker asks, the trainer rank answers from a
thread, the part's bytes follow from buffer to buffer:

    worker                                     trainer rank (its TCPStore: SentPart.path)
    ask {link, rank, version}  ── queue ──>    a thread of the link
    <── "ok", "new", or why not ── store ──
    <── the worker's runs of the buffer ── group of the link; "new": made for this ask

A worker that hangs keeps its own link waiting and no other. A link that failed is given up by its
worker, whose next ask is on another. The trainer rank ends a link on which nobody has asked for the
last UNASKED versions: its worker has left it, or is gone. One that is not may ask on it again.

The store listens on the rank's own address, and asks go into a queue with a secret name, which the
workers learn through Ray (SentPart.path): who merely reaches the port gets no part. Nothing is
encrypted on the way.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import socket
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
from torch.distributed import DistStoreError, PrefixStore, ProcessGroupGloo, Store, TCPStore

from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit import transports
from lora_moe_rl.refit.parts import PartLayout, SentPart, host_memory
from lora_moe_rl.refit.store import listen

IDLE = timedelta(days=1)  # then the thread asks its store again
CONNECT_S = 20.0  # a machine that is there accepts at once
READY, NEW = "ok", "new"
ASK = {"ask": str, "link": str, "rank": int, "version": int}
UNASKED = 2  # every worker asks for each version
SENDER, RECEIVER = 0, 1  # ranks in a link's group

log = logging.getLogger(__name__)


class Channel(transports.Channel):
    def outgoing(self, layout: PartLayout, host: str) -> Outgoing:
        return Outgoing(layout, host, self.settings.timeout_s)

    def incoming(self, rank: int) -> Incoming:
        return Incoming(rank, self.settings.timeout_s)


class Outgoing:
    """A trainer rank's end. Its threads end with the process."""

    def __init__(self, layout: PartLayout, host: str, timeout_s: float):
        self.layout, self.host, self.timeout_s = layout, host, timeout_s
        self.store, self.secret = listen(host, timeout=IDLE), secrets.token_hex(16)
        self.links: dict[str, queue.SimpleQueue[dict | None]] = {}  # what their threads answer
        self.asked: dict[str, int] = {}  # by link: how many versions were offered by then
        self.offered: int | None = None  # a version
        self.offers = 0
        threading.Thread(target=self._serve, name="refit", daemon=True).start()

    def memory(self, nbytes: int, device: torch.device) -> np.ndarray:
        buffer = host_memory(nbytes)
        self.whole = torch.from_numpy(buffer)
        return buffer

    def offer(self, sent: SentPart) -> SentPart:
        self.offers += sent.version != self.offered
        self.offered = sent.version
        return replace(sent, path=f"{self.host}:{self.store.port}/{self.secret}")

    def _serve(self) -> None:
        while True:
            try:
                message = self.store.queue_pop(self.secret)
            except DistStoreError:  # nobody asked
                continue
            if (ask := _read_ask(message)) is None:
                log.warning("what is no request for an adapter was left alone: %r", message[:200])
                continue
            self.asked[ask["link"]] = self.offers
            self._end_unasked()
            asks = self.links.get(ask["link"])  # its thread may leave it at any time
            if asks is None:
                asks = self.links[ask["link"]] = queue.SimpleQueue()
                told = (ask["link"], asks)
                threading.Thread(target=self._link, args=told, name="refit", daemon=True).start()
            asks.put(ask)

    def _end_unasked(self) -> None:
        for name, offers in list(self.asked.items()):
            if offers <= self.offers - UNASKED:
                del self.asked[name]
                if (asks := self.links.pop(name, None)) is not None:
                    asks.put(None)

    def _link(self, link: str, asks: queue.SimpleQueue[dict | None]) -> None:
        """Answers one worker, until the link is ended or something fails. A store's client is one
        thread's: others would wait for what it waits for."""
        group: ProcessGroupGloo | None = None
        try:
            store = _connect(self.host, self.store.port, self.timeout_s)
            while (ask := asks.get()) is not None:
                if (why := self._refused(ask["version"])) is not None:
                    store.set(ask["ask"], why)
                    continue
                store.set(ask["ask"], NEW if group is None else READY)
                if group is None:
                    group = _group(store, ask["ask"], SENDER, self.host, self.timeout_s)
                for start, stop in self.layout.runs(ask["rank"]):
                    group.send([self.whole[start:stop]], RECEIVER, 0).wait()
        except (RuntimeError, TimeoutError) as error:  # the worker is gone, or gave up
            if self.links.get(link) is asks:  # and not of a worker that came back to it
                del self.links[link]
            log.warning("an engine worker left while it fetched an adapter: %s", error)

    def _refused(self, version: int) -> str | None:
        if self.offered == version:
            return None
        has = "none" if self.offered is None else f"version {self.offered}"
        return f"asked for adapter version {version}, it has {has}"


class Incoming:
    """An engine worker's end: a link to each trainer rank that sends to it."""

    def __init__(self, rank: int, timeout_s: float):
        self.rank, self.timeout_s = rank, timeout_s
        self.links: dict[str, _Link] = {}

    def open(self, layout: PartLayout, sent: SentPart) -> np.ndarray:
        buffer = np.empty(layout.nbytes, dtype=np.uint8)  # memory is taken where bytes arrive
        whole = torch.from_numpy(buffer)
        try:
            if sent.path not in self.links:
                self.links[sent.path] = _Link(sent.path, self.timeout_s)
            pieces = [whole[start:stop] for start, stop in layout.runs(self.rank)]
            self.links[sent.path].fetch(pieces, self.rank, sent.version)
        except (RuntimeError, OSError) as error:
            self.links.pop(sent.path, None)
            reason = str(error).partition("\n")[0]
            place, _, _ = sent.path.rpartition("/")
            raise RefitError(
                f"adapter version {sent.version}: trainer rank {sent.source} at {place} did "
                f"not send its part; it is gone, cannot be reached, or took longer than "
                f"refit.timeout_s={self.timeout_s:g} ({reason})"
            ) from error
        return buffer


class _Link:
    """One worker's connection to one trainer rank."""

    def __init__(self, path: str, timeout_s: float):
        self.place, _, self.secret = path.rpartition("/")
        host, _, port = self.place.rpartition(":")
        # Fails at once where nobody listens, which the store would take its whole timeout for.
        limit = min(CONNECT_S, timeout_s)
        with socket.create_connection((host, int(port)), timeout=limit) as connection:
            self.host = connection.getsockname()[0]
        self.timeout_s, self.name = timeout_s, uuid.uuid4().hex
        self.store = _connect(host, int(port), timeout_s)
        self.group: ProcessGroupGloo | None = None
        self.asks = 0

    def fetch(self, pieces: Iterable[torch.Tensor], rank: int, version: int) -> None:
        self.asks += 1
        ask = f"{self.name}/{self.asks}"
        fields = {"ask": ask, "link": self.name, "rank": rank, "version": version}
        answer = _within(self.timeout_s, lambda: self._answer(ask, json.dumps(fields)))
        if answer not in (READY, NEW):
            raise RefitError(f"the trainer rank at {self.place} was {answer}")
        if answer == NEW:
            parts = self.store, ask, RECEIVER, self.host, self.timeout_s
            self.group = _within(self.timeout_s, lambda: _group(*parts))
        assert self.group is not None
        for work in [self.group.recv([piece], SENDER, 0) for piece in pieces]:
            work.wait()

    def _answer(self, ask: str, message: str) -> str:
        self.store.queue_push(self.secret, message)
        answer = self.store.get(ask).decode()
        self.store.delete_key(ask)
        return answer


def _read_ask(message: bytes) -> dict | None:
    """What a worker sends (see ASK), or None for anything else."""
    try:
        ask = json.loads(message)
    except (ValueError, RecursionError):
        return None
    if not isinstance(ask, dict) or ask.keys() != ASK.keys():
        return None
    return ask if all(isinstance(ask[key], kind) for key, kind in ASK.items()) else None


def _connect(host: str, port: int, timeout_s: float) -> TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return _within(timeout_s, lambda: TCPStore(host, port, None, False, timeout=timeout))


def _within[Found](timeout_s: float, call: Callable[[], Found]) -> Found:
    """What `call` returns or raises. It asks a store, whose time-outs are its server's: a client
    would wait for ever for a process that hangs. Raises TimeoutError."""
    found: queue.SimpleQueue[tuple[Found | None, RuntimeError | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put((call(), None))
        except RuntimeError as error:
            found.put((None, error))

    threading.Thread(target=run, name="refit", daemon=True).start()
    try:
        value, error = found.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return value  # pyright: ignore[reportReturnType]


def _group(store: Store, name: str, rank: int, host: str, timeout_s: float) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    # By address: a machine's name may stand for an address that others do not reach.
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(PrefixStore(name, store), rank, 2, options)
