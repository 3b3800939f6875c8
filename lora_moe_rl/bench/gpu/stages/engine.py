"""One vLLM engine, without Ray and without a trainer: it starts, takes versions into its slots,
gives the logprobs that Hugging Face gives, and generates with an adapter and without.

The models have the tiny shapes and random weights; the speed is also that of some layers of
Qwen3-30B-A3B at full width.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.bench.gpu.parts import Parts
from lora_moe_rl.bench.gpu.stages.slices import hf_config
from lora_moe_rl.bench.model import save_tiny
from lora_moe_rl.config import RefitConfig, RunConfig
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.refit import transports
from lora_moe_rl.refit.parts import STORAGE, part_layouts
from lora_moe_rl.refit.plan import EngineLayout, make_plan
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.rollout.facts import Dtype, slot_rank
from lora_moe_rl.verify.comparisons import largest

if TYPE_CHECKING:
    from lora_moe_rl.bench.refit_model import SendingRank

Expected = dict[str, list[np.ndarray]]  # logprobs of each sequence, without the adapter and with it
SHAPES = ("qwen3_moe", "deepseek_v3")
WIDE, WIDE_LAYERS = "qwen3_30b_a3b", {"cuda": 8, "cpu": 2}
VERSIONS = 4  # by each transport
TRANSPORTS = {"cuda": ("shm", "cuda_ipc", "nixl"), "cpu": ("shm", "nixl")}
SEQUENCES, LENGTH = 4, 40
STREAMS, RESPONSE = {"cuda": 256, "cpu": 8}, {"cuda": 64, "cpu": 8}
# Largest difference from Hugging Face's logprobs in float32, where a rounding in a router may take
# another expert; and the least that the adapter must change.
TOLERANCE: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.3}
LEAST_EFFECT = 0.5


def run(parts: Parts, device: str, graphs: str = "") -> None:
    """`graphs`: with CUDA graphs."""
    for name in (*SHAPES, WIDE):
        parts.part(name, lambda name=name: measure(parts, name, device, bool(graphs)))


def measure(parts: Parts, name: str, device: str, graphs: bool) -> dict[str, float]:
    """Puts the parts of one engine, and returns the seconds of all together."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as loop:
        if name == WIDE:
            save_config(Path(folder), hf_config(WIDE, WIDE_LAYERS[device], device))
        else:
            save_tiny(Path(folder), name)
        kind = WideEngine if name == WIDE else RolloutEngine
        bench = Bench(Path(folder), device, graphs, kind)
        # First: the engine takes the cores. The weights of a wide one nobody else has.
        expected = None if name == WIDE else bench.of_hugging_face()
        try:
            put_parts(parts, name, bench, expected, loop)
        finally:
            loop.run(bench.shutdown())
    return {"seconds": time.perf_counter() - started}


def put_parts(
    parts: Parts, name: str, bench: Bench, expected: Expected | None, loop: asyncio.Runner
) -> None:
    """There is no speed of an engine whose logprobs are not those that are expected."""

    def part(which: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        return parts.part(f"{name}: {which}", lambda: loop.run(call()))

    if not part("start", bench.start):
        return
    for transport in bench.transports():
        part(f"publish by {transport}", lambda one=transport: bench.publish(one))
    if expected is None or part("logprobs", lambda: bench.compare(expected)):
        part("tokens_per_s", bench.speeds)


class WideEngine(RolloutEngine):
    """An engine of a model without weights on disk."""

    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        return super()._engine_args(cpu) | {"load_format": "dummy"}


class Bench:
    """A model, its adapter and its engine, of the class `kind`."""

    def __init__(self, folder: Path, device: str, graphs: bool, kind: type[RolloutEngine]):
        self.device, self.folder = device, folder
        self.dtype: Dtype = "bfloat16" if device == "cuda" else "float32"
        rollout: dict[str, Any] = {
            "max_response_tokens": RESPONSE[device], "gpu_memory_utilization": 0.3
        }  # fmt: skip
        if device == "cuda":
            rollout["enforce_eager"] = not graphs
        self.config = RunConfig.model_validate(
            {
                "model": {"path": str(folder), "max_length": 256},
                "adapter": {"rank": 16, "alpha": 32},
                "trainer": {"dtype": self.dtype},
                "rollout": rollout,
            }
        )
        shape = ModelShape.from_hf_config(json.loads((folder / "config.json").read_text()))
        self.spec = AdapterSpec.build(shape, self.config.adapter)
        rng = np.random.default_rng(1)
        self.sequences = rng.integers(16, shape.vocab_size, (SEQUENCES, LENGTH)).tolist()
        self.engine = kind(self.config, str(folder), self.spec, 0)
        self.rank: SendingRank | None = None
        self.sent = -1
        self.version: int | None = None  # the last whose slots hold what was sent

    async def start(self) -> dict[str, Any]:
        return {"started": await self.engine.start()}

    async def shutdown(self) -> None:
        if hasattr(self.engine, "llm"):
            await self.engine.shutdown()

    def of_hugging_face(self) -> Expected:
        from lora_moe_rl.bench.refit_model import random_tensors
        from lora_moe_rl.verify import hf

        model = hf.load(self.folder)
        base = [hf.logprobs(model, ids) for ids in self.sequences]
        tensors: dict[str, np.ndarray] = {}
        for layer in range(self.spec.shape.num_layers):
            tensors |= random_tensors(self.spec, layer)
        hf.merge(model, self.spec, tensors)
        return {"base": base, "adapter": [hf.logprobs(model, ids) for ids in self.sequences]}

    def transports(self) -> list[str]:
        """Those that are installed here."""
        channels = (
            (n, transports.channel(RefitConfig(transport=n))) for n in TRANSPORTS[self.device]
        )
        return [name for name, channel in channels if not transports.lacking(channel)]

    async def publish(self, transport: str) -> list[dict[str, float]]:
        """Seconds of each version, by stage: of adapters on the device. Raises BenchmarkError when
        slots hold something else than was sent."""
        from lora_moe_rl.bench.refit_model import SendingRank

        plan = make_plan(
            self.spec, self.config.trainer, EngineLayout(slot_rank(self.spec)),
            STORAGE[self.dtype].itemsize,
        )  # fmt: skip
        layouts = part_layouts(plan, self.spec, self.dtype)
        channel = transports.channel(RefitConfig(transport=transport))
        if self.rank is None:
            self.rank = SendingRank(self.config, self.spec, 0, self.device)
        self.rank.prepare_refit(layouts, channel)
        await self.engine.prepare_refit(layouts, channel)
        return [await self._publish(self.rank) for _ in range(VERSIONS)]

    async def _publish(self, rank: SendingRank) -> dict[str, float]:
        self.sent += 1
        started = time.perf_counter()
        sent = rank.send(self.sent)
        packed = time.perf_counter() - started
        receipt = await self.engine.publish(self.sent, sent)
        total = time.perf_counter() - started
        if differing := await self.engine.differing(self.sent, sent):
            raise BenchmarkError(f"slots do not hold what was sent: {', '.join(differing[:5])}")
        self.version = self.sent
        return receipt.seconds | {"pack": packed, "total": total}

    async def compare(self, expected: Expected) -> dict[str, float]:
        """Largest differences of a logprob. Raises BenchmarkError when they are too large."""
        base, _ = await self.engine.score(self.sequences, None)
        if self.version is None:
            off = largest(base, expected["base"])
            raise BenchmarkError(f"no version is served; the base's logprobs are off by {off:g}")
        adapter, _ = await self.engine.score(self.sequences, self.version)
        found = {
            "base": largest(base, expected["base"]),
            "adapter": largest(adapter, expected["adapter"]),
            "effect": largest(adapter, base),
        }
        off = max(found["base"], found["adapter"])
        if not (off <= TOLERANCE[self.dtype] and found["effect"] >= LEAST_EFFECT):
            raise BenchmarkError(
                f"no speed to report: logprobs are {off:g} from Hugging Face's, and the adapter "
                f"changes them by {found['effect']:g}"
            )
        return found

    async def speeds(self) -> dict[str, float]:
        """Tokens generated a second, all requests at once; after a first time, which compiles."""
        found = {}
        served = {} if self.version is None else {"adapter": self.version}
        for name, version in {"base": None, **served}.items():
            await self._speed(version)
            found[name] = await self._speed(version)
        return found

    async def _speed(self, version: int | None) -> float:
        engine = self.engine
        params = engine.sampling.clone()
        params.max_tokens, params.ignore_eos = RESPONSE[self.device], True
        prompts = [self.sequences[i % SEQUENCES] for i in range(STREAMS[self.device])]
        started = time.perf_counter()
        answers = await asyncio.gather(*(engine._request(ids, params, version) for ids in prompts))
        made = sum(len(one.token_ids) for answer in answers for one in answer.outputs)
        return made / (time.perf_counter() - started)


def save_config(folder: Path, config: dict[str, Any]) -> None:
    """A directory of a model without weights."""
    from lora_moe_rl.tiny.tokenizer import make_tokenizer

    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer().save_pretrained(folder)
