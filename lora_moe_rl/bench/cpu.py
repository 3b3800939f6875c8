"""Seconds of a core that the processes of a run take a step, while others measure its seconds."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import psutil

POLL_S = 0.02

# What a process is called in a table, by how its own name begins; the others are what remains.
WHO = {
    "VLLM::": "vLLM's core",
    "ray::RolloutEng": "engine",
    "ray::LoggedWork": "trainer",
    "raylet": "Ray",
    "gcs_server": "Ray",
    "ray::": "Ray",
}
CONTROLLER, OTHERS = "controller", "others"


class CpuPerStep:
    """Watches this process and all that it starts, from the step `first` in metrics.jsonl on until
    one step before `last`, after which processes may be gone.

        with CpuPerStep(metrics, first=3, last=23) as cpu:
            run(...)
        cpu.seconds  # {"trainer": 0.124, ...}; empty where the run ended before that
    """

    def __init__(self, metrics: Path, first: int, last: int):
        self.metrics, self.first, self.last = metrics, first, last
        self.seconds: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CpuPerStep:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        first = self._at(self.first)
        last = self._at(self.last - 1)
        if first is None or last is None or last[0] == first[0]:
            return
        steps, grown = last[0] - first[0], last[1] - first[1]
        self.seconds = {who: taken / steps for who, taken in grown.most_common()}

    def _at(self, step: int) -> tuple[int, Counter[str]] | None:
        """(steps that have ended, seconds so far) when `step` of them have; None when the run ends
        before that."""
        while not self._ended.wait(POLL_S):
            if (ended := _lines(self.metrics)) >= step:
                return ended, _seconds()
        return None


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _seconds() -> Counter[str]:
    """The processor seconds, user and system, of this process and those that it has started, by who
    they are."""
    this, found = psutil.Process(), Counter[str]()
    for process in (this, *this.children(recursive=True)):
        try:
            times, name = process.cpu_times(), process.name()
        except psutil.NoSuchProcess:
            continue
        who = next((who for start, who in WHO.items() if name.startswith(start)), OTHERS)
        found[CONTROLLER if process == this else who] += times.user + times.system
    return found
