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
from lora_moe_rl.rollout import outputs
from lora_moe_rl.rollout.engine import RolloutEngine

VLLM_ID = 1_000_000  # far from those of our versions


class BenchEngine(RolloutEngine):
    """`answers` holds what the workers last said, by method."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.answers: dict[str, list[dict[str, Any]]] = {}

    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        worker = "lora_moe_rl.bench.refit_worker.BenchReceiver"
        return super()._engine_args(cpu) | {"worker_extension_cls": worker}

    async def _workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        self.answers[method] = await super()._workers(method, *args)
        return self.answers[method]

    async def load_from_disk(self, directory: str) -> float:
        """Seconds of vLLM's own path: files, parsed and registered in place of the last."""
        started = time.perf_counter()
        await self.llm.add_lora(self._vllm_request(directory, load_inplace=True))
        return time.perf_counter() - started

    async def load_in_memory(self, directory: str) -> float:
        """Seconds in the worker, of tensors that are there already."""
        (answer,) = await self._workers("bench_in_memory", directory, VLLM_ID)
        return answer["seconds"]

    async def score_loaded(self, sequences: list[list[int]], directory: str) -> list[np.ndarray]:
        """Logprobs under the adapter that vLLM itself took."""
        params = outputs.scoring_params()
        request = self._vllm_request(directory)
        return self._scores([await self._request(ids, params, request, None) for ids in sequences])

    async def score_version(
        self, sequences: list[list[int]], version: int | None
    ) -> list[np.ndarray]:
        """Logprobs under a version of ours, or of the base, one sequence after the other."""
        params = outputs.scoring_params()
        request = None if version is None else self._lora_request(version)
        return self._scores(
            [await self._request(ids, params, request, version) for ids in sequences]
        )

    async def unload(self) -> None:
        await self.llm.remove_lora(VLLM_ID)

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

    def _scores(self, answers: list[Any]) -> list[np.ndarray]:
        return outputs.scores_and_routes(answers, self.spec.shape)[0]

    def _vllm_request(self, directory: str, load_inplace: bool = False):
        from vllm.lora.request import LoRARequest

        return LoRARequest("from disk", VLLM_ID, directory, load_inplace=load_inplace)


def _to_json(sent: Sequence[SentPart]) -> str:
    return json.dumps([asdict(part) for part in sent])
