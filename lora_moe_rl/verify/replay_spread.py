"""What an engine of several data-parallel ranks records, whose experts are spread over them.

Each rank has a scheduler, a KV cache and a route recorder of its own; half of the experts
are the other's. Ranks end at different times, so that one takes part in the other's steps without a
request of its own, and records nothing of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.rollout import device as engine_device
from lora_moe_rl.rollout import outputs
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.verify.engine import EngineProcess
from lora_moe_rl.verify.replay_engine import VERSION, sender_of
from lora_moe_rl.verify.replay_record import Recording, proven_to_move, random_prompts, recorded

SPREAD = "dp2ep"
COUNTER = "vllm:generation_tokens"
UNEVEN = 4  # the second rank gets one of so many requests
COUNTED_S, POLL_S = 10.0, 0.01  # vLLM counts after it has answered


def record(
    config: RunConfig,
    spec: AdapterSpec,
    model_dir: Path,
    tensors: Mapping[str, np.ndarray],
    samples: int,
    log: Path,
    timeout_s: float,
) -> list[Recording]:
    """All conditions of an engine of two data-parallel ranks, as `config` lays it out. Raises a
    LoraMoeRlError when it fails."""
    with EngineProcess(config, spec, model_dir, log, SpreadEngine) as engine:
        engine.start()
        return engine.ask("record", tensors, samples, timeout_s=timeout_s)


def counted(sampled: np.ndarray, expected: np.ndarray) -> tuple[str, str | None]:
    """The proof that every rank had requests and sampled what they were answered with, and what
    there is against it. Tokens `[ranks]`, by vLLM's counters and in its answers."""
    proof = f"ranks sampled {' and '.join(map(str, sampled))} tokens"
    if (sampled != expected).any():
        return proof, f"{proof} instead of {' and '.join(map(str, expected))}"
    return proof, None if expected.all() else f"{proof}: one was asked for nothing"


class SpreadEngine(RolloutEngine):
    """Asked on a rank of the caller's choice, and tells what each rank sampled."""

    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        return super()._engine_args(cpu) | {
            "disable_log_stats": False
        }  # its counters are the proof

    async def record(self, tensors: Mapping[str, np.ndarray], samples: int) -> list[Recording]:
        """Requests on the base, then under an adapter beside requests on the base."""
        dtype = engine_device.serving_dtype(self.config, engine_device.is_cpu())
        layouts, self.sender = sender_of(self.config, self.spec, dtype, tensors)
        await self.prepare_refit(layouts)
        await self.publish(VERSION, self.sender.send(VERSION))
        rng = np.random.default_rng(self.config.seed)
        prompts = random_prompts(rng, samples, self.spec.shape.vocab_size)
        started = time.perf_counter()
        (plain,) = await self._recorded(prompts, {"dp 2": None})
        between = time.perf_counter()
        adapted, beside = await self._recorded(prompts, {"dp 2, experts' LoRA": VERSION, "": None})
        adapted.proof += "; "
        plain.seconds, adapted.seconds = between - started, time.perf_counter() - between
        return [plain, proven_to_move(adapted, beside)]

    async def _recorded(
        self, prompts: Sequence[Sequence[int]], versions: Mapping[str, int | None]
    ) -> list[Recording]:
        """A recording of the prompts for each name, under its version, all of them at once."""
        ranks = [int(number % UNEVEN == 0) for number in range(len(prompts))]
        before = self._sampled()
        groups = await asyncio.gather(
            *(self._answers(prompts, ranks, version) for version in versions.values())
        )
        expected = np.zeros_like(before)
        for answers in groups:
            for rank, answer in zip(ranks, answers, strict=True):
                expected[rank] += len(answer.outputs[0].token_ids)
        sampled = await self._counted(before, expected)
        found = []
        for (name, version), answers in zip(versions.items(), groups, strict=True):
            one = recorded(name, answers, self.spec.shape, version is not None)
            one.proof, one.failure = counted(sampled, expected)
            found.append(one)
        return found

    async def _answers(
        self, prompts: Sequence[Sequence[int]], ranks: Sequence[int], version: int | None
    ) -> list[Any]:
        params = outputs.sampling_params(self.config, set())
        params.ignore_eos = True
        asked = (
            self._request(prompt, params, version, rank=rank)
            for prompt, rank in zip(prompts, ranks, strict=True)
        )
        return await asyncio.gather(*asked)

    async def _counted(self, before: np.ndarray, expected: np.ndarray) -> np.ndarray:
        """Tokens that each rank has sampled since `before`, once as many as expected are."""
        deadline = time.monotonic() + COUNTED_S
        while (sampled := self._sampled() - before).sum() < expected.sum():
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_S)
        return sampled

    def _sampled(self) -> np.ndarray:
        """Tokens that each data-parallel rank has sampled, by vLLM's own counter, int64 `[ranks]`.
        Raises RuntimeError where it counts otherwise."""
        from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

        counts = {
            int(metric.labels["engine"]): metric.value
            for metric in get_metrics_snapshot()
            if isinstance(metric, Counter) and metric.name == COUNTER
        }
        if sorted(counts) != list(range(self.config.rollout.dp)):
            raise RuntimeError(f"vLLM has {COUNTER} of ranks {sorted(counts)} only")
        return np.array([counts[rank] for rank in sorted(counts)])
