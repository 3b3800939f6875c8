"""The base in one copy: real Megatron ranks and real vLLM on one read-only file."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import psutil
import pytest
import torch
from held_bases import assert_close, scores_of
from quantised import make_pair
from ranks import FileJob, random_adapter, random_batch, spec_of

from lora_moe_rl.base.held import Held
from lora_moe_rl.base.owner import owned
from lora_moe_rl.base.store import BIN, open_store
from lora_moe_rl.bench.model import save_random
from lora_moe_rl.bench.own_base import CountingEngine, outside
from lora_moe_rl.bench.process import mapped_bytes
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ActorFailed, HeldBaseError
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.models.quantised import form_in
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, build_model
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from lora_moe_rl.verify.engine import EngineProcess
from lora_moe_rl.verify.processes import run_processes
from lora_moe_rl.verify.ranks import Ranks, free_address

pytestmark = pytest.mark.slow
LOGPROBS, GRADIENTS, MOST_HELD = 5e-6, 1e-5, 1.05
TP2EP2 = {"world_size": 2, "tp": 2, "ep": 2}
LAYOUTS = {
    "tp1 each": ({}, {}),
    "tp2ep2 each": (TP2EP2, {"tp": 2, "ep": True}),
    "ep2 beside tp2ep2": ({"world_size": 2, "ep": 2}, {"tp": 2, "ep": True}),
    "pp2 beside tp1": ({"world_size": 2, "pp": 2}, {}),
    "cp2ep2 beside tp2ep2": ({"world_size": 2, "cp": 2, "ep": 2}, {"tp": 2, "ep": True}),
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
def one_packed(tmp_path_factory) -> Path:
    return make_pair("qwen3_moe", tmp_path_factory.mktemp("packed"), "int4")[0]


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


def computed_and_held(worker, spec):
    """Also the rank's process, and what it holds of the base beside the file."""
    found = computed(worker, spec)
    frozen = (
        p for chunk in worker.engine.chunks for p in chunk.parameters() if not p.requires_grad
    )
    return found, os.getpid(), outside(frozen, Path(worker.held or "") / BIN)


def engine_of(model: Path, config: RunConfig, log: Path, held: str | None) -> EngineProcess:
    made = functools.partial(CountingEngine, held=held)
    return EngineProcess(config, spec_of(model, config), model, log, made)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_both_hold_computes_what_two_copies_do(model, layout, tmp_path):
    check(model, layout, tmp_path)


@pytest.mark.parametrize(
    ("name", "form", "layout"),
    [
        ("qwen3_moe", "int4", "tp1 each"),
        ("qwen3_moe", "int4", "tp2ep2 each"),
        ("deepseek_v3", "fp8", "tp1 each"),
        ("qwen3_moe", "mxfp4", "tp2etp2 beside tp2"),
    ],
)
def test_packed_experts_too(name, form, layout, tmp_path):
    check(make_pair(name, tmp_path, form)[0], layout, tmp_path)


def check(model: Path, layout: str, tmp_path: Path) -> None:
    config = config_of(model, *LAYOUTS[layout])
    batch, _ = random_batch(spec_of(model, config))
    sequences = [row.tolist() for row in batch.token_ids]
    with engine_of(model, config, tmp_path / "own.log", None) as engine:
        own_scores = scores_of(engine, sequences)
    job = FileJob(__file__, "computed_and_held")
    with Ranks(config, model, False, 400) as ranks:
        private = [own for own, *_ in ranks.run(job)]
    with owned("/dev/shm") as folder:
        file = Path(folder) / BIN
        with Ranks(config, model, False, 400, folder) as ranks:
            found = ranks.run(job)
            for own, (shared, *_) in zip(private, found, strict=True):
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
                    pids = [pid for _, pid, _ in found] + [one.pid for one in engines]
                    shares = [mapped_bytes(pid, file) for pid in pids]
                    beside = engine.ask("own_base", str(file)) + sum(own for *_, own in found)
            assert file.stat().st_mtime_ns == written
            assert sum(map(bool, shares)) == config.trainer.world_size + config.rollout.tp
            assert 0.9 * file.stat().st_size < sum(shares) <= 1.05 * file.stat().st_size
            if form_in(model) is None:
                whole = sum(one.stat().st_size for one in model.glob("*.safetensors"))
                assert sum(shares) + beside <= MOST_HELD * whole
    assert not Path(folder).exists()


def write_otherwise(folder: str, model: Path, config: RunConfig, changed: str) -> None:
    """A store with one bit of one element of one tensor changed."""
    held, base = Held.of_run(folder, model, "float32", config), Base(str(model))
    write = held.filler(base)

    def change(name: str, out: torch.Tensor) -> None:
        write(name, out)
        if name.endswith(changed):
            out.view(torch.int32).flatten()[123] ^= 1

    open_store(folder, held.contents(base), change)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("one_model", "layers.1.mlp.experts.routed_experts.w2_weight"),
        ("one_model", "layers.3.self_attn.qkv_proj.weight"),
        ("one_model", "embed_tokens.weight"),
        ("one_packed", "layers.0.mlp.experts.routed_experts.w13_weight_packed"),
    ],
)
def test_a_rank_whose_checkpoint_has_other_values_refuses(name, changed, request):
    model = request.getfixturevalue(name)
    config = config_of(model, {}, {})
    with owned("/dev/shm") as folder:
        write_otherwise(folder, model, config, changed)
        with (
            pytest.raises(ActorFailed, match="has other values than are held"),
            Ranks(config, model, False, 400, folder) as ranks,
        ):
            ranks.run(FileJob(__file__, "computed_and_held"))


@pytest.mark.parametrize(
    "changed",
    [
        "layers.1.mlp.experts.routed_experts.w2_weight",
        "layers.3.self_attn.qkv_proj.weight",
        "lm_head.weight",
    ],
)
def test_a_file_that_was_changed_is_refused_by_both(changed, one_model, tmp_path):
    config = config_of(one_model, {}, {})
    with owned("/dev/shm") as folder:
        store = Held.of_run(folder, one_model, "float32", config).open()
        (name,) = (one for one in store.contents.tensors if one.endswith(changed))
        path = Path(folder) / BIN
        path.chmod(0o600)
        data = bytearray(path.read_bytes())
        data[store.contents.places[name] + 492] ^= 1
        path.write_bytes(data)
        message = f"{BIN}: {name} is not what was written there"
        with (
            pytest.raises(ActorFailed, match=message),
            Ranks(config, one_model, False, 400, folder) as ranks,
        ):
            ranks.run(FileJob(__file__, "computed_and_held"))
        with (
            engine_of(one_model, config, tmp_path / "log", folder) as engine,
            pytest.raises(ActorFailed),
        ):
            engine.start()
    assert message in (tmp_path / "log").read_text()


def names_read(rank: int, address: str, config: RunConfig, folder: Path, held: str) -> list[str]:
    """Of the checkpoint's tensors, those that a trainer rank reads while it starts."""
    from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource

    from lora_moe_rl.trainer.worker import TrainerWorker

    found: list[str] = []
    upstream = SafeTensorsStateSource.load_tensors

    def load_tensors(self, keys):
        found.extend(keys)
        return upstream(self, keys)

    SafeTensorsStateSource.load_tensors = load_tensors
    SafeWeights.read = lambda self, name: found.append(name)
    TrainerWorker(config, spec_of(folder, config), folder, rank, held).start(address, 1)
    return found


@pytest.mark.parametrize("layout", ["tp1 each", "tp2ep2 each"])
def test_a_second_user_reads_norms_and_routers_alone(model, layout, tmp_path):
    config = config_of(model, *LAYOUTS[layout])
    with owned("/dev/shm") as folder:
        Held.of_run(folder, model, "float32", config).open()
        job, arguments = FileJob(__file__, "names_read"), (free_address(), config, model, folder)
        for names in run_processes(config.trainer.world_size, job, *arguments, timeout_s=400):
            kinds = {name.split(".")[-2] for name in names}
            assert "gate" in kinds
            assert not [kind for kind in kinds - {"gate"} if not kind.endswith("norm")]


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
