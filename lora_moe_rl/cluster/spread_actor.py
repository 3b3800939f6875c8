"""The Ray actors of one engine that stands on several nodes: its own, and its ranks' elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

from ray.exceptions import RayError

from lora_moe_rl.cluster.actors import Actor
from lora_moe_rl.files.run_dir import RunDir

log = logging.getLogger(__name__)


class SpreadActor(Actor):
    """The engine's own actor, which is asked. It ends when one of `ranks` does: vLLM's front would
    wait for them for ever."""

    def __init__(self, handle: Any, name: str, run_dir: RunDir, ranks: Sequence[Actor]):
        super().__init__(handle, name, run_dir)
        self.ranks = ranks
        self.places: list[str] = []  # of the ranks, once they have started
        self._ending = False

    def start(self) -> Any:
        """All of them, together: they wait for each other."""
        meeting = self.remote("meeting")
        for one in self.ranks:
            started = one.remote("start", meeting)
            started.future().add_done_callback(lambda found, one=one: self._started(one, found))
        begun = self.remote("start", meeting)
        begun.future().add_done_callback(self._all_there)
        return begun

    def _all_there(self, begun: Future) -> None:
        """The front has met all ranks: what those elsewhere share needs its names no more."""
        if begun.exception() is not None:
            return
        for one in self.ranks:
            told = one.remote("forget_names").future()
            told.add_done_callback(lambda found, one=one: self._forgotten(one, found))

    def _forgotten(self, one: Actor, found: Future) -> None:
        if (error := found.exception()) is not None and not self._ending:
            log.warning("%s may leave files in /dev/shm behind: %s", one.name, error)

    def _started(self, one: Actor, found: Future) -> None:
        try:
            self.places.append(found.result())
        except Exception as error:  # whatever it raises, the front would wait for it
            self._end_with(one, error)
            return
        ended = one.remote("ended").future()
        ended.add_done_callback(lambda end: self._end_with(one, end.exception() or end.result()))

    def _end_with(self, one: Actor, why: object) -> None:
        """Ends one actor over another, in a thread of its own: Ray calls this from the thread that
        its own calls wait for."""
        Thread(target=self._lost, args=(one, why), daemon=True).start()

    def _lost(self, one: Actor, why: object) -> None:
        if self._ending:
            return
        lines = str(getattr(why, "cause", None) or why).strip().splitlines()
        log.warning(
            "%s has ended (%s), and %s with it; its log: %s",
            *(one.name, lines[0] if lines else type(why).__name__),
            *(self.name, one.run_dir.log_path(one.name)),
        )
        try:
            self.end()
        except RayError:  # Ray itself has ended
            return

    def end(self) -> None:
        self._ending = True
        for one in self.ranks:
            one.end()
        super().end()
