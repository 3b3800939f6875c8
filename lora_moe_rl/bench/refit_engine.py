"""The engine of `bench refit`: ours, that can also take adapters in vLLM's own ways."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lora_moe_rl.refit.parts import SentPart
from lora_moe_rl.verify.engine import FILES_ID, FilesEngine


class BenchEngine(FilesEngine):
    worker = "lora_moe_rl.bench.refit_worker.BenchReceiver"

    async def timed_load(self, directory: str) -> float:
        """Seconds of vLLM's own path: files, parsed and registered in place of the last."""
        started = time.perf_counter()
        await self.load_files(directory)
        return time.perf_counter() - started

    async def load_in_memory(self, directory: str) -> float:
        """Seconds in the worker, of tensors that are there already."""
        (answer,) = await self._workers("bench_in_memory", directory, FILES_ID)
        return answer["seconds"]

    async def score_version(
        self, sequences: list[list[int]], version: int | None
    ) -> list[np.ndarray]:
        """Logprobs under a version of ours, or of the base, one sequence after the other."""
        return (await self._score_each(sequences, version))[0]

    async def copies(self, rounds: int, *sent: SentPart) -> dict[str, list[float]]:
        """Seconds of the receiver's write alone, and of a plain copy of the same bytes."""
        (answer,) = await self._workers("bench_copies", _to_json(sent), rounds)
        return answer

    async def staging_memory(self, version: int, *sent: SentPart) -> dict[str, int]:
        """Bytes of a worker while it stages a version, which is dropped again."""
        await self.drop(min(self.receipts))
        (answer,) = await self._workers("bench_memory", version, _to_json(sent))
        await self._workers("refit_drop", version)
        return answer

    async def stream(
        self, prompts: list[list[int]], version: int, tokens: int
    ) -> tuple[list[tuple[float, int]], list[str]]:
        """Generates `tokens` for each prompt. ((monotonic second, new tokens) of each output; why
        each request ended)."""
        from vllm.sampling_params import RequestOutputKind

        params = self.sampling.clone()
        params.max_tokens = tokens
        params.output_kind = RequestOutputKind.DELTA
        events: list[tuple[float, int]] = []
        request = self._lora_request(version)

        async def one(ids: list[int]) -> str:
            final = None
            self.running[version] = self.running.get(version, 0) + 1
            try:
                name = f"stream-{next(self.request_ids)}"
                prompt: Any = {"prompt_token_ids": ids}
                async for final in self.llm.generate(prompt, params, name, lora_request=request):
                    events.append((time.monotonic(), len(final.outputs[0].token_ids)))
            finally:
                self.running[version] -= 1
            return str(final and final.outputs[0].finish_reason)

        return events, await asyncio.gather(*(one(ids) for ids in prompts))


def _to_json(sent: Sequence[SentPart]) -> str:
    return json.dumps([asdict(part) for part in sent])
