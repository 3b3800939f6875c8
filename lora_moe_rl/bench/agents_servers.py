"""The two servers of `bench agents`: our endpoint around one engine, and vLLM's own, of one model
and one adapter."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.config import RunConfig
from lora_moe_rl.endpoint.admission import Admission
from lora_moe_rl.endpoint.app import Endpoint
from lora_moe_rl.endpoint.bodies import Asked
from lora_moe_rl.endpoint.engine import Served, ServingEngine
from lora_moe_rl.endpoint.listening import Listening
from lora_moe_rl.endpoint.owning import ROUTES
from lora_moe_rl.endpoint.rendering import Chats
from lora_moe_rl.endpoint.sessions import Sessions
from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.models.tokenizer import load_tokenizer
from lora_moe_rl.ports import Turn
from lora_moe_rl.rollout.facts import slot_rank
from lora_moe_rl.verify import serving

LONGEST, SEQUENCES = 2048, 64  # tokens of a trajectory; turns that an engine decodes at a time
KV_BYTES = 2**28
START_S = 600.0
PRINTABLE = range(0x20, 0x7F)
SHARP = 40.0  # so that what is not printable is as good as never sampled
METRICS_S = 60.0
# Prompt tokens, as vLLM counts them.
CACHE = {"asked_of_cache": "vllm:prefix_cache_queries", "had_by_cache": "vllm:prefix_cache_hits"}


def save_model(folder: Path) -> AdapterSpec:
    """The tiny Qwen3-MoE shape, which writes printable ASCII for ever: what it says is as many
    tokens as characters, for a server that tokenises it again too."""
    from lora_moe_rl.bench.model import save_random
    from lora_moe_rl.tiny.tokenizer import make_tokenizer

    save_random(folder, _printing_model, {"eos_token_id": None, "max_position_embeddings": LONGEST})
    make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    shape = ModelShape.from_hf_config(json.loads((folder / "config.json").read_text()))
    return AdapterSpec.build(shape, RunConfig().adapter)


def _printing_model() -> Any:
    from lora_moe_rl.tiny.shapes import build_model

    model = build_model("qwen3_moe")
    weight = model.lm_head.weight.data
    kept = weight[list(PRINTABLE)] * SHARP
    weight.zero_()
    weight[list(PRINTABLE)] = kept
    return model


def config_of(folder: Path) -> RunConfig:
    rollout = {"max_num_seqs": SEQUENCES, "cpu_kv_cache_gib": KV_BYTES / 2**30}
    model = {"path": str(folder), "max_length": LONGEST}
    return RunConfig.model_validate({"model": model, "rollout": rollout})


class CountingEngine(ServingEngine):
    """Listens as `lora-moe-rl serve` does, and counts what it does."""

    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        return super()._engine_args(cpu) | {"disable_log_stats": False}

    async def listen(self, tensors: dict[str, np.ndarray], dtype: Any) -> str:
        """Serves the adapter as version 0; returns where, before the path."""
        await self.take(self.config, {0: tensors}, dtype)
        self.counts: dict[str, float] = defaultdict(float)
        self.sessions = Sessions(None, Served(self, self.config, _raise))
        listening = Listening(serving.HOST, 0)
        chats = Chats(load_tokenizer(self.model_dir, False))
        endpoint = Endpoint(self.sessions, chats, Admission(256, 4096), ROUTES)
        self._listens = asyncio.create_task(listening.serve(endpoint.app()))
        await listening.started()
        return listening.root

    async def counted(self) -> dict[str, float]:
        """Turns, forks, seconds in the engine, bytes of routes; prompt tokens and the cache."""
        from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

        found = [one for one in get_metrics_snapshot() if isinstance(one, Counter)]
        cache = {
            key: float(sum(one.value for one in found if one.name == name))
            for key, name in CACHE.items()
        }
        return {**self.counts, **cache}

    async def reply(self, token_ids: Any, version: int | None, turn: Turn, asked: Asked) -> Any:
        sample, routes = await super().reply(token_ids, version, turn, asked)
        sent = sum(part.nbytes for block in routes.blocks for part in block.parts)
        every = len(sample.token_ids) - 1
        self.counts["turns"] += 1
        self.counts["forks"] += turn.number > 0 and not turn.recorded
        self.counts["route_bytes"] += sent
        self.counts["full_route_bytes"] += sent * every / (every - turn.recorded)
        return sample, routes

    async def _request(self, *asked: Any, **more: Any) -> Any:
        started = time.perf_counter()
        try:
            return await super()._request(*asked, **more)
        finally:
            self.counts["engine_seconds"] += time.perf_counter() - started


def _raise(error: LoraMoeRlError) -> None:
    raise error


def counts_of_server(root: str) -> dict[str, float]:
    """The counts of the prefix cache of a `vllm serve`."""
    with urllib.request.urlopen(f"{root}/metrics", timeout=METRICS_S) as answer:
        return cache_counts(answer.read().decode())


def cache_counts(metrics: str) -> dict[str, float]:
    """What vLLM's metrics count of its prefix cache: prompt tokens that it was asked for, and
    had."""
    lines = [line.partition("{") for line in metrics.splitlines()]
    return {
        key: sum(float(rest.rpartition(" ")[2]) for name, _, rest in lines if name == f"{of}_total")
        for key, of in CACHE.items()
    }


@contextmanager
def vllm_server(
    model: Path, adapter: Path, spec: AdapterSpec, config: RunConfig
) -> Iterator[serving.Server]:
    """vLLM's own, with as much cache and as many sequences as ours."""
    from lora_moe_rl.rollout import device

    peft.write(adapter, spec, adapter_of(spec), config)
    dtype = device.serving_dtype(config, device.is_cpu())
    own = ["--max-model-len", str(LONGEST), "--enable-prefix-caching"]
    own += ["--max-num-seqs", str(SEQUENCES), "--kv-cache-memory-bytes", str(KV_BYTES)]
    own += ["--disable-uvicorn-access-log"]
    with serving.start(model, adapter, slot_rank(spec), spec.shape, dtype, START_S, own) as server:
        yield server


def adapter_of(spec: AdapterSpec) -> dict[str, np.ndarray]:
    from lora_moe_rl.verify.inputs import random_adapter

    return random_adapter(spec, 1)
