"""The trainer on experts that vLLM has laid out for its Marlin kernels: the numbers of those that
stand as in the checkpoint, to the bit; and no other weights than the checkpoint's."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mapped_files import Files
from quantised import make_pair
from ranks import random_adapter, random_batch, run_ranks

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.kernels.dequant import Form

# On a CPU without AMX one element of all gradients was seen to be rounded otherwise, in the last
# layer; on others none. How far, of a tensor's largest, and how many of all elements may be.
ROUNDED, FEW = 1e-3, 1e-5
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128}
LAYOUTS = {
    "tp1": ({}, {}),
    "recompute": ({"recompute": "full"}, {}),
    "ep2": ({"world_size": 2, "ep": 2}, {"tp": 2, "ep": True}),
    "etp2": ({"world_size": 2, "tp": 2, "etp": 2}, {"tp": 2}),
}


@cache
def model(name: str, form: Form) -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return make_pair(name, folder, form, **SIZES)[0]


def config_of(folder: Path, trainer: dict, rollout: dict) -> RunConfig:
    return RunConfig(
        model=str(folder),
        trainer={"micro_batch_tokens": 60, "dtype": "bfloat16", "device": "cpu", **trainer},
        rollout=rollout,
    )


def computed(worker, spec):
    """Logprobs and gradients."""
    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec)
    scored = worker.score([ids.tolist() for ids in batch.token_ids], table, True)
    return scored, [shard.data for shard in worker.gradients(batch, table)[2] or ()]


def on_what_an_engine_holds(worker, spec, folder: str, change: str = ""):
    """(computed, of an engine of ours; the same on what stands on this rank's GPU, a directory; the
    forms; bytes that this rank has itself). `change`: what is wrong of what stands there."""
    from lora_moe_rl.base import shared
    from lora_moe_rl.trainer import engine, packed_experts

    own = computed(worker, spec)
    place = Path(folder) / f"memory-{worker.rank}"
    place.mkdir()
    port = Files(place, f"GPU-{worker.rank}")
    config, device = worker.config, worker.engine.device
    held = engine.Held.of_run(folder, worker.model_dir, "bfloat16", config, gpu=True)
    owner = held.share(port, worker.rank, wrong(held, worker.rank, change))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "Cuda", lambda: Files(place, port.gpu))
        real = shared.Shared.of
        made = SimpleNamespace(
            of=lambda base, trainer, kind: real(replace(base, gpu=True), trainer, "cuda")
        )
        patch.setattr(engine, "Shared", made)
        try:
            worker.use(engine.TrainingEngine(config, spec, worker.model_dir, device, folder))
        except HeldBaseError as error:
            return str(error)
    worker.engine.shared.check()
    linears = [one for *_, one in packed_experts._linears(worker.engine.chunks)]
    mapped = {
        one.untyped_storage().data_ptr() for one in worker.engine.shared.store.tensors.values()
    }
    mine = {
        t.untyped_storage().data_ptr() for o in linears for t in (o.packed.data, o.packed.scales)
    }
    found = computed(worker, spec)
    owner.close()
    return own, found, {one.packed.form for one in linears}, mine <= mapped


def wrong(held, rank: int, change: str):
    """An engine's rank, with something wrong in the third stack that it writes of its kind."""
    from marlin import engine_rank

    write = engine_rank(held, rank)

    def fill(name: str, out: torch.Tensor) -> None:
        write(name, out)
        if change == "order" and name.endswith("1.mlp.experts.routed_experts.w2_weight_packed"):
            out[0] = out[0].roll(1, 0)
        if change == "scales" and name.endswith("1.mlp.experts.routed_experts.w13_weight_scale"):
            out[0] = out[0].unflatten(-1, (-1, 8, 8)).transpose(-1, -2).flatten(-3)
        if change == "bit" and name.endswith("0.mlp.experts.routed_experts.w13_weight_packed"):
            out[0, -1, 3, 70] ^= 1 << 9

    return fill


@pytest.mark.parametrize(
    ("form", "name", "layout"),
    [
        ("int4", "qwen3_moe", "tp1"),
        ("int4", "qwen3_moe", "recompute"),
        ("int4", "deepseek_v3", "ep2"),
        ("mxfp4", "qwen3_moe", "etp2"),
    ],
)
def test_the_numbers_are_those_of_the_checkpoints_layout(form, name, layout, tmp_path):
    folder = model(name, form)
    found = run_ranks(
        config_of(folder, *LAYOUTS[layout]), folder, on_what_an_engine_holds, str(tmp_path)
    )
    for own, held, forms, all_held in found:
        assert forms == {f"{form}_marlin"} and all_held
        for a, b in zip(own[0] or (), held[0] or (), strict=True):
            assert np.abs(a).max() > 0 and np.array_equal(a, b)
        assert own[1] and len(own[1]) == len(held[1])
        pairs = list(zip(own[1], held[1], strict=True))
        for a, b in pairs:
            assert np.abs(a - b).max() <= ROUNDED * np.abs(a).max()
        assert sum((a != b).sum() for a, b in pairs) <= FEW * sum(a.size for a, _ in pairs)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ("order", "model.layers.1.mlp.experts.0.down_proj: the checkpoint has other values"),
        ("scales", "model.layers.1.mlp.experts.0.gate_proj: the checkpoint has other values"),
        ("bit", "model.layers.0.mlp.experts.7.gate_proj: the checkpoint has other values"),
    ],
)
def test_other_weights_than_the_checkpoints_are_refused_by_name(change, path, tmp_path):
    folder = model("qwen3_moe", "int4")
    (said,) = run_ranks(
        config_of(folder, {}, {}), folder, on_what_an_engine_holds, str(tmp_path), change
    )
    assert path in said
