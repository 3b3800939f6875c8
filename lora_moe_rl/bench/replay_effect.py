"""What replay is worth in bfloat16: mismatch with and without it, on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.bench.model import deepseek_v3, save_random
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.router_replay.table import RouteTable

SHAPE = {
    "num_hidden_layers": 8,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
}
INITIALIZER_RANGE = 0.05
SAMPLES, PROMPT, RESPONSE = 32, 16, 48

Recorded = tuple[list[list[int]], list[np.ndarray], RouteTable]


def measure(folder: Path) -> dict[str, Any]:
    """k3 KL, mean and largest |logprob difference|, and the share of tokens off by more than a
    factor of two, between vLLM and Megatron, both in bfloat16.

    Raises BenchmarkError when they are equal without replay.
    """
    from lora_moe_rl.algorithms.parts.kl import MISMATCH
    from lora_moe_rl.verify.processes import apart
    from lora_moe_rl.verify.ranks import run_ranks

    parameters = save_model(folder / "model")
    config = make_config(folder / "model")
    sequences, logprobs, table = apart("vLLM", record, config, folder / "model", timeout_s=1200)
    (results,) = run_ranks(config, folder / "model", score, sequences, table, timeout_s=600)
    found = {name: compare(logprobs, theirs) for name, theirs in results["logprobs"].items()}
    if not found["off"]["kl"] > 0:
        raise BenchmarkError(f"without replay the KL is {found['off']['kl']}: nothing to compare")
    return {
        "shape": SHAPE,
        "parameters": parameters,
        "samples": len(sequences),
        "tokens": int(sum(map(len, logprobs))),
        "coverage": table.coverage,
        "disagreement": results["disagreement"],
        "on": found["on"],
        "off": found["off"],
        "on_over_off": {name: _ratio(found["on"][name], found["off"][name]) for name in MISMATCH},
    }


def make_config(model_dir: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model_dir), "max_length": PROMPT + RESPONSE},
            "trainer": {"dtype": "bfloat16", "device": "cpu", "micro_batch_tokens": 1024},
            "rollout": {"max_response_tokens": RESPONSE},
        }
    )


def save_model(folder: Path) -> int:
    """Random weights of a DeepSeek-V3 shape; the number of parameters."""
    from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, draw_biases

    def make():
        model = deepseek_v3(**SHAPE, initializer_range=INITIALIZER_RANGE).bfloat16()
        draw_biases(model)
        return model

    return save_random(folder, make, EXTRA_CONFIG["deepseek_v3"])


def record(config: RunConfig, model_dir: Path) -> Recorded:
    """(sequences, vLLM's logprobs of the response tokens, routes)."""
    from lora_moe_rl.rollout import outputs
    from lora_moe_rl.rollout.device import check_cpu_build
    from lora_moe_rl.verify.ranks import spec_of
    from lora_moe_rl.verify.replay_engine import (
        SteppedEngine,
        prepare_process,
        samples_and_routes,
    )

    check_cpu_build("bench replay")
    prepare_process(config)
    spec = spec_of(model_dir, config)
    engine = SteppedEngine(config, spec, model_dir)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, spec.shape.vocab_size, (SAMPLES, PROMPT)).tolist()
    params = outputs.sampling_params(config, set())
    params.ignore_eos = True
    samples, table = samples_and_routes(engine.generate(prompts, params), spec.shape)
    return [s.token_ids.tolist() for s in samples], [s.logprobs for s in samples], table


def score(worker, spec, sequences: list[list[int]], table: RouteTable) -> dict[str, Any]:
    """A trainer rank's job: logprobs with and without replay, and the share of routes that the
    routers choose otherwise without."""
    from lora_moe_rl.data.batch import TrainBatch
    from lora_moe_rl.verify import replay_ranks

    engine, batch = worker.engine, TrainBatch.from_sequences(sequences)
    task = replay_ranks.Replayed("off", sequences, table, table)
    with engine.adapters.off():
        on = engine.score(batch, table)
        with replay_ranks.watched(engine, False) as calls:
            off = engine.score(batch)
    used = replay_ranks.compare(replay_ranks.tokens(worker, task), calls, task, False)
    return {"logprobs": {"on": on, "off": off}, "disagreement": used.wrong / used.routes}


def compare(rollout: Sequence[np.ndarray], trainer: Sequence[np.ndarray]) -> dict[str, float]:
    """Mismatch of the response tokens, which are the last of each sequence."""
    from lora_moe_rl.algorithms.parts.kl import mismatch

    ours = np.concatenate([t[len(t) - len(r) :] for r, t in zip(rollout, trainer, strict=True)])
    return mismatch(np.concatenate(rollout), ours, np.ones(len(ours), bool))


def _ratio(on: float, off: float) -> float | None:
    return on / off if off else None
