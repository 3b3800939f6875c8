"""The runs below a directory, each by its path from there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_moe_rl.config.files import read_config_file
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.jsonl import LINE_BYTES, tail
from lora_moe_rl.files.run_dir import (
    CONFIG,
    METRICS,
    ROUTES,
    SAMPLES,
    TIMELINE,
    TIMELINE_TRACE,
    TOKENS,
)
from lora_moe_rl.page.growing import parse
from lora_moe_rl.page.metrics import MetricsTable
from lora_moe_rl.page.routes import RouteLines
from lora_moe_rl.page.samples import Samples
from lora_moe_rl.page.spans import Spans
from lora_moe_rl.page.tokens import TokenLines, pieces, tokenizer_of

DEPTH = 4  # folders below the directory that is viewed
READ = (CONFIG, METRICS, SAMPLES, TOKENS, ROUTES, TIMELINE, TIMELINE_TRACE, "checkpoints")


class Run:
    """A run directory that is looked at; what was read of it is kept."""

    def __init__(self, name: str, path: Path):
        self.name, self.path = name, path
        self.metrics = MetricsTable(path / METRICS)
        self.samples = Samples(path / SAMPLES)
        self.tokens = TokenLines(path / TOKENS)
        self.routes = RouteLines(path / ROUTES)
        self.spans = Spans(path / TIMELINE)
        self._config: tuple[float, dict[str, Any]] = (-1.0, {})

    @property
    def config(self) -> dict[str, Any]:
        """config.yaml as it stands; {} when it cannot be read."""
        path = self.path / CONFIG
        try:
            changed = path.stat().st_mtime
            if changed != self._config[0]:
                self._config = (changed, read_config_file(path))
        except (OSError, ConfigError):
            return {}
        return self._config[1]

    def sample(self, number: int) -> dict[str, Any] | None:
        """JSON: a sample by its place in the file, with its tokens where the run has kept them
        (`token_data`); None when there is none."""
        record = self.samples.record(number)
        if record is None:
            return None
        tokens = self.tokens.of(record.get("step"), record.get("sample"))
        if tokens is not None:
            model = (self.config.get("model") or {}).get("path")
            tokens["pieces"] = pieces(tokenizer_of(model), tokens["ids"])
        return record | {"token_data": tokens}

    def summary(self) -> dict[str, Any]:
        """JSON: what a list of runs shows. Reads the end of metrics.jsonl alone."""
        config, path = self.config, self.path / METRICS
        last = _last(path)
        return {
            "name": self.name,
            "changed": path.stat().st_mtime if path.exists() else 0,
            "step": last.get("step", 0),
            "steps": (config.get("trainer") or {}).get("steps"),
            "model": (config.get("model") or {}).get("path"),
            "algorithm": (config.get("algorithm") or {}).get("name"),
        }


class Runs:
    """The runs below `root`. A name that a browser sends is looked up among those that were found:
    it is never made a path of."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self._known: dict[str, Run] = {}
        self._lock = threading.Lock()

    def look(self) -> list[Run]:
        """All runs that are there now, the newest first."""
        found = dict(find(self.root))
        with self._lock:
            self._known = {
                name: self._known.get(name) or Run(name, path) for name, path in found.items()
            }
            return sorted(self._known.values(), key=_changed, reverse=True)

    def get(self, name: str) -> Run | None:
        with self._lock:
            run = self._known.get(name)
        if run is None:
            self.look()
            with self._lock:
                run = self._known.get(name)
        return run


def find(root: Path) -> Iterator[tuple[str, Path]]:
    """(name, directory) of each run: a folder with config.yaml, and with metrics.jsonl or the
    checkpoints of one. The name of `root` itself is "."; links out of `root` are not followed."""
    for folder, folders, files in os.walk(root):
        path = Path(folder)
        depth = len(path.relative_to(root).parts)
        if CONFIG in files and (METRICS in files or "checkpoints" in folders):
            if all(_inside(path / name, root) for name in READ):
                yield path.relative_to(root).as_posix(), path
            folders.clear()
        elif depth == DEPTH:
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]


def _inside(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root)


def _changed(run: Run) -> float:
    path = run.path / METRICS
    return path.stat().st_mtime if path.exists() else 0.0


def _last(path: Path) -> dict[str, Any]:
    """The record of the latest step near the end of a file of lines: that of an evaluation may come
    after those of later steps."""
    whole = path.stat().st_size if path.exists() else 0
    lines = 100
    while True:  # a line may be longer than anybody thinks
        records = filter(None, map(parse, tail(path, lines).encode().splitlines()))
        found = [one for one in records if "step" in one]
        if found or lines * LINE_BYTES >= whole:
            return max(found, key=lambda one: one["step"], default={})
        lines *= 8
