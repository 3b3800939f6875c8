"""What replay adds to a training step: each of its own calls timed where it runs, on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lora_moe_rl.bench.model import deepseek_v3, save_random
from lora_moe_rl.cluster.ray_start import local_ray
from lora_moe_rl.config import RunConfig
from lora_moe_rl.router_replay.packed import PackedRoutes
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import Block, SentRoutes, send

DEMO = {"prompts": 16, "group": 8, "prompt_tokens": 12, "tokens": 8}  # of `make demo`
ROUNDS = 15
KIMI_LAYERS, KIMI_TOP_K, KIMI_EXPERTS, KIMI_PP = 60, 8, 384, 8
KIMI_SAMPLES, KIMI_TOKENS = 512, 16_384
STAGE_LAYERS = 8  # MoE layers of the largest of 8 stages
OBJECT_STORE = 1 << 30
# A stage's routers, to install routes on, and as little as possible of everything else: no forward
# is run, and how many experts there are shows in the routes alone.
KIMI_SHAPE = {
    "num_hidden_layers": 1 + STAGE_LAYERS,
    "n_routed_experts": KIMI_TOP_K,
    "num_experts_per_tok": KIMI_TOP_K,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
}


@dataclass
class Stopwatch:
    """Seconds spent in calls, by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def watching(self, *calls: tuple[str, Any, str]) -> Iterator[None]:
        """Times every call of (name, object or class, method)."""
        stock = [(owner, method, getattr(owner, method)) for _, owner, method in calls]
        for (name, owner, method), (_, _, call) in zip(calls, stock, strict=True):
            setattr(owner, method, self._timed(name, call))
        try:
            yield
        finally:
            for owner, method, call in stock:
                setattr(owner, method, call)

    def _timed(self, name: str, call):
        def timed(*args, **kwargs):
            with self.around(name):
                return call(*args, **kwargs)

        return timed


def measure_demo(model_dir: Path) -> dict[str, Any]:
    """Median seconds that replay adds to a step of the demo's size, by part: on the engine, and on
    one rank that has all samples. `pair`: a whole forward and backward, with and without."""
    from lora_moe_rl.verify.ranks import run_ranks

    config = RunConfig.model_validate(
        {"model": {"path": str(model_dir)}, "trainer": {"device": "cpu", "dtype": "float32"}}
    )
    (found,) = run_ranks(config, model_dir, demo_job, timeout_s=600)
    return found


def demo_job(worker, spec) -> dict[str, Any]:
    from lora_moe_rl.router_replay.audit import Audit

    batch, rows = demo_samples(spec)
    lengths = [len(ids) - 1 for ids in batch.token_ids]
    shape = spec.shape
    every = worker.config.replay.audit
    parts: list[dict[str, float]] = []
    pair: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(ROUNDS):
        watch = Stopwatch()
        with watch.around("build, pack and send"):
            table = RouteTable.build(
                rows, lengths, shape.moe_layers, shape.num_experts, shape.top_k
            )
            sent = send(table)
        batch.step = 2  # not audited, unlike the first of every ten
        with watch.around("with"), watch.watching(*_calls()):
            worker.gradients(batch, sent)
        with watch.around("without"):
            worker.gradients(batch)
        batch.step = 1
        audit = Stopwatch()
        with audit.watching(("all", Audit, "_compare")):
            worker.gradients(batch, sent)
        watch.seconds[f"audit, a step in {every}"] = audit.seconds["all"] / every
        for name in pair:
            pair[name].append(watch.seconds.pop(name))
        parts.append(watch.seconds)
    return {
        "seconds": {name: median(part[name] for part in parts) for name in parts[0]},
        "pair": {name: median(values) for name, values in pair.items()},
        "tokens": int(sum(lengths)),
    }


def _calls() -> tuple[tuple[str, Any, str], ...]:
    """All that a rank does for replay, and where."""
    from lora_moe_rl.router_replay.layer import LayerReplay
    from lora_moe_rl.router_replay.replay import Replay
    from lora_moe_rl.router_replay.routes import Routes
    from lora_moe_rl.trainer.engine import TrainingEngine

    return (
        ("check", TrainingEngine, "routes"),
        ("fetch and check bytes", Routes, "fetch"),
        ("cut to micro-batches", Routes, "micro"),
        ("missing rows", Routes, "complete"),
        ("install", Replay, "install"),
        ("unpack, and compare with the routers' choice", LayerReplay, "_choose"),
    )


def demo_samples(spec) -> tuple[Any, list[np.ndarray]]:
    """A batch of the demo's size, of random tokens, and random routes of each sample."""
    from lora_moe_rl.data.batch import TrainBatch

    rng = np.random.default_rng(0)
    shape = spec.shape
    samples, rows = [], []
    for _ in range(DEMO["prompts"]):
        for _ in range(DEMO["group"]):
            prompt = rng.integers(0, shape.vocab_size, DEMO["prompt_tokens"]).astype(np.int32)
            response = rng.integers(0, shape.vocab_size, DEMO["tokens"]).astype(np.int32)
            samples.append(np.concatenate([prompt, response]))
            size = (len(prompt) + len(response) - 1, len(shape.moe_layers), shape.top_k)
            rows.append(_distinct(rng, size, shape.num_experts).astype(np.uint8))
    prompts = [DEMO["prompt_tokens"]] * len(samples)
    return TrainBatch.from_sequences(samples, prompts, step=1), rows


def _distinct(rng: np.random.Generator, size: tuple[int, int, int], num_experts: int) -> np.ndarray:
    """int16 ids, different ones within a token and layer, anywhere among the experts."""
    tokens, layers, top_k = size
    first = rng.integers(0, num_experts, (tokens, layers, 1), dtype=np.int16)
    apart = np.arange(top_k, dtype=np.int16) * (num_experts // top_k)
    return (first + apart) % np.int16(num_experts)


def measure_kimi(folder: Path) -> dict[str, Any]:
    """Seconds of a rank that gets its stage's routes of every sample (data-parallel size 1, no
    tensor parallelism): fetched from Ray's object store, checked, cut to micro-batches, unpacked
    and installed."""
    from lora_moe_rl.tiny.shapes import EXTRA_CONFIG
    from lora_moe_rl.verify.ranks import run_ranks

    save_random(folder / "kimi", lambda: deepseek_v3(**KIMI_SHAPE), EXTRA_CONFIG["deepseek_v3"])
    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder / "kimi"), "max_length": KIMI_TOKENS + 1},
            "adapter": {"rank": 1, "targets": ("o_proj",)},
            "trainer": {
                "device": "cpu",
                "dtype": "float32",
                "micro_batch_tokens": KIMI_TOKENS,
            },
        }
    )
    (found,) = run_ranks(config, folder / "kimi", kimi_job, timeout_s=600)
    return found


def kimi_job(worker, spec) -> dict[str, Any]:
    import ray

    from lora_moe_rl.data.batch import TrainBatch
    from lora_moe_rl.router_replay.routes import Routes

    engine = worker.engine
    local_ray(1, object_store_memory=OBJECT_STORE)
    try:
        sent, packed_bytes, pack_seconds = _kimi_routes(ray.put, engine.replay.chunk_layers[0])
        batch = TrainBatch.from_sequences([np.zeros(KIMI_TOKENS + 1, np.int32)] * KIMI_SAMPLES)
        everything = range(KIMI_SAMPLES)
        watch, cpu = Stopwatch(), time.process_time()
        with watch.around("check"):
            # As `engine.routes`, but for the check of the whole model, of which this is a stage.
            routes = Routes((sent,), engine.replay.chunk_layers)
            routes.check_samples(batch.lengths())
            routes.check_missing(engine.config.replay.missing)
        parts = [("fetch, check and cut", Routes, name) for name in ("fetch", "micro", "complete")]
        with watch.watching(*parts):
            works = engine.my_work(batch, everything, routes, 1, 0)
        assert len(works) == KIMI_SAMPLES
        with engine.replay.step(), watch.around("install and unpack"):
            for work in works:
                engine.replay.install(0, work.routes[0], work.data, engine.device.torch_device)
                for layer in engine.replay.layers.values():
                    layer.target()  # as its router does in a forward
        cpu = time.process_time() - cpu
        del works, routes
    finally:
        ray.shutdown()
    return {
        "samples": KIMI_SAMPLES,
        "tokens": KIMI_TOKENS,
        "layers": STAGE_LAYERS,
        "bytes": packed_bytes,
        "engine_pack_seconds": pack_seconds,
        "seconds": watch.seconds,
        "total": sum(watch.seconds.values()),
        "cpu_seconds": cpu,  # with the packing of micro-batches, which replay does not add
    }


def _kimi_routes(put, layers: tuple[int, ...]) -> tuple[SentRoutes, int, float]:
    """(one stage's share of all samples as an engine sends it, its bytes, seconds of one sample's
    packing). The other stages' parts are not made."""
    assert len(layers) == STAGE_LAYERS
    rng = np.random.default_rng(0)
    offsets = np.array([0, KIMI_TOKENS])
    rest = range(layers[-1] + 1, layers[0] + KIMI_LAYERS)
    blocks, total, seconds = [], 0, []
    for i in range(KIMI_SAMPLES):
        size = (KIMI_TOKENS, STAGE_LAYERS, KIMI_TOP_K)
        ids = _distinct(rng, size, KIMI_EXPERTS)
        started = time.perf_counter()
        valid = np.ones(ids.shape[:2], bool)
        table = RouteTable(ids.view(np.uint16), valid, offsets, layers, KIMI_EXPERTS)
        part = PackedRoutes.pack(table).to_bytes()
        seconds.append(time.perf_counter() - started)
        total += part.nbytes
        blocks.append(Block(i, i + 1, (put(part), None)))
    return (
        SentRoutes(
            (*layers, *rest),
            KIMI_TOP_K,
            KIMI_EXPERTS,
            np.arange(KIMI_SAMPLES + 1, dtype=np.int64) * KIMI_TOKENS,
            (layers, tuple(rest)),
            tuple(blocks),
            np.zeros(KIMI_LAYERS, np.int64),
            np.zeros(0, np.int64),
            None,
        ),
        total,
        median(seconds),
    )
