"""A recipe: the demo on two engines, the first of which loses vLLM's process in two refits, after
the new version is written into its slot and before it is switched to; with FATE=suspend it is
stopped there instead, and lives. With AFTER_A_JOIN it is lost in the first refit after one in which
the other engine took part.

Only this recipe dies: a run that is resumed from its config.yaml has none of it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil

from lora_moe_rl.cluster import engine_actor
from lora_moe_rl.cluster import engines as group
from lora_moe_rl.config.recipes import load_config

DEATHS = (2, 4)  # versions at whose commit it dies, once each
ROOT = Path(__file__).parents[2]
config = load_config(str(ROOT / "recipes/tiny_arithmetic.py"))


def dying(engine_class: type, marks: Path) -> type:
    class DyingEngine(engine_class):
        async def _workers(self, method: str, *args: Any):
            if method == "refit_stage":
                self.written = asyncio.Event()
            if method == "refit_commit" and self._is_due(args[0]):
                await self.written.wait()
                for child in psutil.Process().children(recursive=True):
                    getattr(child, os.environ.get("FATE", "kill"))()
            answers = await super()._workers(method, *args)
            if method == "refit_stage":
                self.written.set()
            return answers

        def _is_due(self, version: int) -> bool:
            """Once each, of the first engine."""
            mark = marks / f"died-at-{version}"
            due = version in DEATHS
            if "AFTER_A_JOIN" in os.environ:
                mark, joined = marks / "died", marks / "joined"
                due = joined.exists() and version > int(joined.read_text())
                if self.index == 1 and not joined.exists():
                    joined.write_text(str(version))
            if self.index or not due or mark.exists():
                return False
            mark.touch()
            return True

    return DyingEngine


class WatchedEngines(group.RolloutEngines):
    """Says whether the other engine serves the version before, while one is down."""

    async def _start_anew(self, index: int) -> None:
        other = self.actors[1 - index]
        (old, *_) = (await other.remote("state"))["versions"]
        scores, _ = await asyncio.gather(*other.remote("score", [[20, 21, 22]], old, num_returns=2))
        print(f"meanwhile {other.name} serves version {old}: {len(scores[0])} logprobs", flush=True)
        await super()._start_anew(index)


if "MARKS" in os.environ:
    made = dying(engine_actor.RolloutEngine, Path(os.environ["MARKS"]))
    engine_actor.RolloutEngine = made
    group.RolloutEngines = WatchedEngines
