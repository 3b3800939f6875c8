"""An engine that does what a file tells it. It stands alone, so that its actors, of which the tests
start many, import no torch."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from lora_moe_rl.errors import EngineDied, EngineSilent, NotServed, RefitError


@dataclass(frozen=True)
class Block:
    parts: tuple


@dataclass(frozen=True)
class Sent:
    """Routes as they travel, of one part."""

    blocks: tuple


class Engine:
    """Writes down what it is asked. What is to happen to it stands in a file that is named after
    its number and the method, once for each line."""

    def __init__(self, config, model_dir, spec, index, log_path, held=None):
        self.folder, self.index = Path(log_path).parent, index
        self.beats, self.works = 0, True
        self.took = False  # any version

    def _do(self, method: str, *args):
        with open(self.folder / f"asked-{self.index}", "a") as file:
            print(method, *args, file=file)
        fate = self.folder / f"fate-{self.index}-{method}"
        lines = fate.read_text().split() if fate.exists() else []
        if lines:
            fate.write_text("\n".join(lines[1:]))
            if lines[0] == "exit":
                os._exit(1)
            if lines[0] == "dead":
                raise EngineDied(f"vLLM's processes of engine {self.index} have ended")
            if lines[0] == "silent":
                raise EngineSilent(f"the workers of engine {self.index} gave no answer")
            if lines[0] == "refuse":
                raise RefitError("no")
            time.sleep(60)
        return method, args

    async def start(self):
        return self._do("start")

    async def prepare_refit(self, *args):
        self._do("prepare_refit")

    async def publish(self, version, *sent):
        found = self._do("publish", version, *sent)
        self.took = True
        return found

    async def give_way(self):
        self._do("give_way")
        return 1.5

    async def wake(self, what):
        self._do("wake", what)

    async def move_on(self, version):
        self._do("move_on", version)

    async def probe(self, sequences, version):
        await self._idle("probe")
        return (self._do("probe", version), "checksum", True), f"table-{self.index}"

    async def differing(self, version, *sent):
        return [f"tensor-{self.index}", "tensor"] if self._do("differing", version) else []

    async def pin(self, version):
        return self._do("pin", version)

    async def sample_in_parts(self, places, token_ids, n, version, seed, turn, manner):
        await self._idle("sample")
        if not self.took:
            raise NotServed(f"engine {self.index} serves none: publish it first")
        routes = Sent((Block((f"table-{self.index}",)),))
        answer = self._do("sample", token_ids, version, seed), routes
        return answer, *[None] * places

    async def pulse(self):
        self.beats += self.works
        return self.beats

    async def _idle(self, method: str) -> None:
        """Takes long if it is told so, and answers other questions meanwhile: for ever, or some
        seconds with a beat now and then."""
        fate = self.folder / f"fate-{self.index}-{method}"
        lines = fate.read_text().split() if fate.exists() else []
        if lines and lines[0] in ("idle", "slow"):
            fate.write_text("\n".join(lines[1:]))
            self.works = lines[0] == "slow"
            try:
                await asyncio.sleep(3 if self.works else 600)
            except asyncio.CancelledError:
                self._do(f"gave {method} up")
                raise

    async def say(self, token_ids, version, turn, seed, manner):
        await self._idle("say")
        return self._do("say", token_ids, version, seed)

    async def sample_each(self, places, token_ids, version, seeds, manner, top):
        await self._idle("sample_each")
        self._do("sample_each", token_ids, version, seeds)
        each = places // len(seeds)
        told = [(f"told-{seed}", Sent((Block((f"table-{seed}",)),))) for seed in seeds]
        return told, *[f"beside-{seed}" for seed in seeds for _ in range(each)]

    async def score_prompt(self, token_ids, version, top):
        await self._idle("score_prompt")
        return self._do("score_prompt", token_ids, version, top)

    async def write(self, token_ids, max_tokens, temperature, seed):
        self._do("write", token_ids)
        return f"by engine-{self.index}", "stop", max_tokens
