"""The routed experts in one copy: real Megatron ranks and real vLLM on one read-only file."""

from __future__ import annotations

import functools
import gc
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from ranks import FileJob, random_adapter, random_batch, spec_of

from lora_moe_rl.base.adopt import adopt
from lora_moe_rl.base.held import Held
from lora_moe_rl.base.owner import owned
from lora_moe_rl.base.store import BIN
from lora_moe_rl.bench.model import save_random
from lora_moe_rl.bench.process import mapped_bytes
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ActorFailed, HeldBaseError
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, build_model
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from lora_moe_rl.verify.engine import EngineProcess
from lora_moe_rl.verify.ranks import Ranks

pytestmark = pytest.mark.slow
LOGPROBS, GRADIENTS = 5e-6, 1e-5
TP2EP2 = {"world_size": 2, "tp": 2, "ep": 2}
LAYOUTS = {
    "tp1 each": ({}, {}),
    "tp2ep2 each": (TP2EP2, {"tp": 2, "ep": True}),
    "pp2 beside tp1": ({"world_size": 2, "pp": 2}, {}),
    "tp2etp2 beside tp2": ({"world_size": 2, "tp": 2, "etp": 2}, {"tp": 2}),
}


def saved(name: str, folder: Path) -> Path:
    save_random(folder, lambda: build_model(name), EXTRA_CONFIG[name])
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def model(request, tmp_path_factory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def one_model(tmp_path_factory) -> Path:
    return saved("qwen3_moe", tmp_path_factory.mktemp("one"))


def config_of(model: Path, trainer: dict, rollout: dict) -> RunConfig:
    return RunConfig(
        model={"path": str(model), "max_length": 128},
        adapter={"rank": 4, "alpha": 8},
        trainer={"dtype": "float32", "device": "cpu", "micro_batch_tokens": 40, **trainer},
        rollout={"cpu_kv_cache_gib": 0.06, **rollout},
    )


def computed(worker, spec):
    batch, table = random_batch(spec)
    worker.set_adapter(random_adapter(spec))
    sequences = [row.tolist() for row in batch.token_ids]
    scores = worker.score(sequences, None, adapters=True)
    return scores, [shard.data for shard in worker.gradients(batch, table)[2]]


def grouped(worker):
    for chunk in worker.engine.chunks:
        for module in getattr(chunk, "module", chunk).modules():
            if hasattr(module, "stacked"):
                yield module


def own_then_shared(worker, spec, folder):
    """What a rank computes before and after; addresses of its private experts that are left."""
    own = computed(worker, spec)
    private = {module.stacked.data_ptr() for module in grouped(worker)}
    held = Held.of_run(folder, worker.model_dir, "float32", worker.config)
    worker.engine.held = adopt(worker.engine.chunks, worker.config.trainer, held)
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    left = private & {one.untyped_storage().data_ptr() for one in tensors}
    return own, computed(worker, spec), left, os.getpid()


def change_one(worker, spec, folder):
    """A rank whose experts differ in one bit of one element from what the engines hold."""
    one = next(module for module in grouped(worker)).stacked
    one.view(torch.int32)[1, 2, 3] ^= 1
    held = Held.of_run(folder, worker.model_dir, "float32", worker.config)
    adopt(worker.engine.chunks, worker.config.trainer, held)


def train_one(worker, spec, folder):
    next(module for module in grouped(worker)).weight0.requires_grad_()
    held = Held.of_run(folder, worker.model_dir, "float32", worker.config)
    adopt(worker.engine.chunks, worker.config.trainer, held)


def engine_of(model: Path, config: RunConfig, log: Path, held: str | None) -> EngineProcess:
    made = functools.partial(RolloutEngine, held=held)
    return EngineProcess(config, spec_of(model, config), model, log, made)


def scores_of(engine: EngineProcess, sequences) -> list[np.ndarray]:
    engine.start()
    return engine.ask("score", sequences, None)[0]


def assert_close(ours, theirs, tolerance, relative=False) -> None:
    for a, b in zip(ours, theirs, strict=True):
        largest = np.abs(b).max() if relative else 1.0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(largest, 1e-30))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_both_hold_computes_what_two_copies_do(model, layout, tmp_path):
    config = config_of(model, *LAYOUTS[layout])
    batch, _ = random_batch(spec_of(model, config))
    sequences = [row.tolist() for row in batch.token_ids]
    with engine_of(model, config, tmp_path / "own.log", None) as engine:
        own_scores = scores_of(engine, sequences)
    job = FileJob(__file__, "own_then_shared")
    with owned("/dev/shm") as folder:
        file = Path(folder) / BIN
        with Ranks(config, model, False, 400) as ranks:
            found = ranks.run(job, folder)
            for own, shared, left, _ in found:
                assert not left, "a private copy is still there"
                assert (own[0] is None) == (shared[0] is None)
                assert_close(shared[0] or [], own[0] or [], LOGPROBS)
                assert_close(shared[1], own[1], GRADIENTS, relative=True)
            written = file.stat().st_mtime_ns
            # Where both have one rank, a second engine after the first has ended.
            for log in ("held.log", "again.log")[: 1 + (layout == "tp1 each")]:
                with engine_of(model, config, tmp_path / log, folder) as engine:
                    assert_close(scores_of(engine, sequences), own_scores, LOGPROBS)
                    process = psutil.Process(engine.pid)
                    engines = [process, *process.children(recursive=True)]
                    pids = [pid for *_, pid in found] + [one.pid for one in engines]
                    shares = [mapped_bytes(pid, file) for pid in pids]
            assert file.stat().st_mtime_ns == written
            assert sum(map(bool, shares)) == config.trainer.world_size + config.rollout.tp
            assert 0.9 * file.stat().st_size < sum(shares) <= 1.05 * file.stat().st_size
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("job", "message"),
    [(change_one, "has loaded other values than are held"), (train_one, "is trained")],
)
def test_a_rank_whose_experts_are_not_those_refuses(one_model, job, message):
    config = config_of(one_model, {}, {})
    with (
        owned("/dev/shm") as folder,
        Ranks(config, one_model, False, 400) as ranks,
        pytest.raises(ActorFailed, match=message),
    ):
        ranks.run(FileJob(__file__, job.__name__), folder)


def test_an_engine_of_another_kind_refuses(one_model, tmp_path):
    config = config_of(one_model, {}, {})
    with owned("/dev/shm") as folder:
        Held.of_run(folder, one_model, "bfloat16", config).open()
        with (
            engine_of(one_model, config, tmp_path / "log", folder) as engine,
            pytest.raises(ActorFailed),
        ):
            engine.start()
    said = (tmp_path / "log").read_text()
    assert "dtype is bfloat16 there and float32 here" in said
    assert HeldBaseError.__name__ in said
