"""A checkpoint goes on under another topology, and at other ranks, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_families
import torch
from checkpoints import write_checkpoint
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import RunDirError
from lora_moe_rl.files import adapter_source as source
from lora_moe_rl.files.checkpoint import newest_valid
from lora_moe_rl.models.fingerprint import base_record
from lora_moe_rl.run import adapter_start as starting

LAYOUTS = {
    "one": {},
    "tp2ep2": {"world_size": 2, "tp": 2, "ep": 2},
    "ep4": {"world_size": 4, "ep": 4},
    "pp2": {"world_size": 2, "pp": 2},
    "tp2": {"world_size": 2, "tp": 2},
    "cp2": {"world_size": 2, "cp": 2},
    "pp2vpp2": {"world_size": 2, "pp": 2, "vpp": 2},
    "etp2": {"world_size": 2, "tp": 2, "etp": 2},
}
STEPS = 2


def config_of(folder, layout="one", **adapter) -> RunConfig:
    return RunConfig(
        model=str(folder),
        adapter={"rank": 5, "expert_rank": 3} | adapter,
        trainer={"lr": 1e-3, "micro_batch_tokens": 40, "warmup_steps": 6, **LAYOUTS[layout]},
        algorithm={"kl_coef": 0.1},
    )


def losses(worker, spec) -> list[dict]:
    return [worker.update(*random_batch(spec)).metrics for _ in range(STEPS)]


def train_and_save(worker, spec, directory):
    worker.set_adapter(random_adapter(spec))
    for _ in range(STEPS):
        worker.update(*random_batch(spec))
    return worker.save(Path(directory)).meta, losses(worker, spec)


def resume(worker, spec, directory, meta):
    worker.load(Path(directory), meta)
    return losses(worker, spec)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_families.save("deepseek_v3", folder, num_hidden_layers=4)
    return folder


def same(got: list[dict], expected: list[dict], name: str) -> None:
    for one, other in zip(got, expected, strict=True):
        for key in ("loss/policy", "loss/kl", "optim/grad_norm", "optim/lr"):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6), (name, key)


def same_function(got: dict, expected: dict) -> None:
    """Before the next update; the gradients of other ranks are others."""
    assert expected["loss/kl"] > 0.01
    assert got["loss/kl"] == pytest.approx(expected["loss/kl"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("written_by", "others"),
    [
        ("tp2ep2", [name for name in LAYOUTS if name not in ("tp2ep2", "tp2")]),
        ("one", ["tp2ep2"]),
        ("cp2", ["tp2"]),
        ("tp2", ["cp2"]),
    ],
)
def test_losses_go_on_under_every_topology(written_by, others, model, tmp_path):
    saved = run_ranks(config_of(model, written_by), model, train_and_save, str(tmp_path))
    meta, expected = saved[0]
    for name in others:
        got = run_ranks(config_of(model, name), model, resume, str(tmp_path), meta)
        same(got[0], expected, name)


def resume_and_export(worker, spec, directory, meta):
    """(loss of the next step, moments that were loaded, Adam's steps of each slice, largest change
    of each in that step, in learning rates, and Adam's steps after another checkpoint)."""
    worker.load(Path(directory), meta)
    optimizer, adapters = worker.engine.optimizer, worker.engine.adapters
    moments = adapters.export(optimizer.state("exp_avg"))
    steps, before = adam_steps(worker), adapters.export()
    metrics = worker.update(*random_batch(spec)).metrics
    changes = {
        new.name: np.abs(new.data - old.data).max() / metrics["optim/lr"]
        for old, new in zip(before, adapters.export(), strict=True)
    }
    again = Path(directory) / "again"
    again.mkdir(exist_ok=True)
    meta = worker.save(again).meta
    torch.distributed.barrier()
    worker.load(again, meta)
    return metrics, moments, steps, changes, adam_steps(worker)


def adam_steps(worker) -> dict[str, float]:
    state = worker.engine.optimizer.adam.state
    return {s.name: float(state[s.tensor]["step"]) for s in worker.engine.adapters.slices()}


def start_and_step(worker, spec, tensors):
    worker.set_adapter(tensors)
    return worker.update(*random_batch(spec)).metrics


def test_other_ranks_go_on_with_the_same_function(model, tmp_path):
    """Growing is exact, in a resumed run and in one that starts from it."""
    config = config_of(model)
    metadata = {
        "step": 2,
        "adapter": config.adapter.model_dump(mode="json"),
        "base": base_record(str(model), model),
    }
    with write_checkpoint(tmp_path / "checkpoints", 2, 2, metadata) as directory:
        ((meta, expected),) = run_ranks(config, model, train_and_save, str(directory))
        metadata["trainer"] = meta
    found = newest_valid(tmp_path / "checkpoints")

    other = config_of(model, "tp2ep2", rank=5, expert_rank=8, alpha_pattern={"q_b_proj": 3.0})
    spec = spec_of(model, other)
    with pytest.raises(ValueError, match="experts.gate 3 -> 8.*With adapter.resize=true"):
        starting.other_ranks(found, other, spec)
    other = other.model_copy(update={"adapter": other.adapter.model_copy(update={"resize": True})})
    old = starting.other_ranks(found, other, spec)
    with starting.resized(found, old, spec, 0) as (directory, notes):
        got = run_ranks(other, model, resume_and_export, str(directory), found.metadata["trainer"])
    assert not list((tmp_path / "checkpoints").glob("tmp-*"))
    same_function(got[0][0], expected[0])
    kept = {s.name: np.abs(s.data).max() > 0 for rank in got for s in rank[1]}
    for name, filled in kept.items():
        assert filled == (".experts." not in name and "q_b_proj" not in name), name
    for _, _, steps, changes, later in got:
        assert steps == {name: STEPS * kept[name] for name in steps}
        assert later == {name: count + 1 for name, count in steps.items()}
        assert all(0.9 < change < 1.01 for name, change in changes.items() if not kept[name])
    changed = 3 * 3 + 4  # gate, up and down of 3 layers; q_b_proj of 4
    assert any(f"Adam begins anew for {changed} sites" in note for note in notes)
    assert starting.other_ranks(found, config, spec_of(model, config)) is None
    with_critic = with_settings(config, {"algorithm": {"name": "ppo"}})
    with pytest.raises(RunDirError, match="holds no critic, and algorithm=ppo trains one"):
        starting.other_ranks(found, with_critic, spec_of(model, config))

    init = other.adapter.model_copy(update={"init_from": str(tmp_path)})
    start = starting.init_from(SimpleNamespace(adapter=init, seed=0), spec, model)
    metrics = run_ranks(other, model, start_and_step, start.tensors)
    same_function(metrics[0], expected[0])
    assert source.load(tmp_path).spec == old


def test_init_from_loses_nothing_and_fills_the_rest(model, tmp_path):
    from lora_moe_rl.adapters import peft

    attention = config_of(model, targets=("*_proj",), expert_rank=None)
    spec = spec_of(model, attention)
    peft.write(tmp_path / "a", spec, random_adapter(spec), attention)
    config = config_of(model, init_from=str(tmp_path / "a"))
    start = starting.init_from(config, spec_of(model, config), model)
    assert {name: array.shape for name, array in start.tensors.items()} == (
        spec_of(model, config).tensor_shapes
    )
    np.testing.assert_array_equal(
        start.tensors["layers.1.o_proj.A"], random_adapter(spec)["layers.1.o_proj.A"]
    )
    assert not start.tensors["layers.1.experts.up.B"].any()
    assert start.tensors["layers.1.experts.up.A"].any()
    narrow = config_of(model, init_from=str(tmp_path / "a"), targets=("o_proj", "experts.*"))
    with pytest.raises(ValueError, match="would be lost: layers.0.q_a_proj.*adapter.targets=q_a"):
        starting.init_from(narrow, spec_of(model, narrow), model)
