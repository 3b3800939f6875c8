"""Every family in real Megatron-core: the forward of Hugging Face, base and adapted, on one rank.

The models (`tiny_families.py`) have awkward sizes and routing; routers choose for themselves.
"""

from __future__ import annotations

import hf
import numpy as np
import pytest
import tiny_families
import torch
from ranks import random_batch, run_ranks, spec_of
from safetensors.torch import load_file, save_file

from lora_moe_rl import cli
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ActorFailed

FLOAT32 = {"rtol": 3e-6, "atol": 1e-5}
LENGTHS = (5, 17, 40, 200)  # the last goes beyond YaRN's original positions


def sequences() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, tiny_families.VOCAB_SIZE, n).tolist() for n in LENGTHS]


def settings(name: str) -> dict:
    """Of adapter and replay."""
    if name in tiny_families.DENSE:
        return {"adapter": {"rank": 5}, "replay": {"mode": "off"}}
    return {"adapter": {"rank": 5, "expert_rank": 3}}


def make_config(name: str, folder) -> RunConfig:
    trainer = {"micro_batch_tokens": 60, "lr": 1e-3}
    return RunConfig(model=str(folder), trainer=trainer, **settings(name))


def random_adapter(spec) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        name: rng.normal(0, 0.05 if name.endswith("B") else shape[-1] ** -0.5, shape).astype("f4")
        for name, shape in spec.tensor_shapes.items()
    }


def score(worker, spec, adapter):
    base = worker.score(sequences(), None, False)
    worker.set_adapter(adapter)
    return base, worker.score(sequences(), None, True)


# Where a matrix of an expert is square, its shape does not say which way round it is.
GATE_UP_SQUARE = {"hidden_size": 96, "intermediate_size": 48}
DOWN_SQUARE = {"hidden_size": 64, "intermediate_size": 64}  # as published


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, {}) for name in tiny_families.FAMILIES),
        ("gpt_oss", GATE_UP_SQUARE),
        ("gpt_oss", DOWN_SQUARE),
    ],
    ids=str,
)
def test_forward_equals_hugging_face(name, sizes, tmp_path):
    tiny_families.save(name, tmp_path, **sizes)
    config = make_config(name, tmp_path)
    spec = spec_of(tmp_path, config)
    adapter = random_adapter(spec)
    ((base, adapted),) = run_ranks(config, tmp_path, score, adapter)
    reference = hf.load(tmp_path)
    plain = [hf.logprobs(reference, ids) for ids in sequences()]
    hf.merge(reference, spec, adapter)
    merged = [hf.logprobs(reference, ids) for ids in sequences()]
    for ours, theirs in zip(base + adapted, plain + merged, strict=True):
        np.testing.assert_allclose(ours, theirs, **FLOAT32)
    changed = [np.abs(a - b).max() for a, b in zip(plain, merged, strict=True)]
    assert min(changed) > 0.01, "the adapter changes nothing"


def one_step(worker, spec):
    """A step without replay on samples that come with a table of no routes, as engines send it."""
    batch, table = random_batch(spec)
    before = worker.export()
    result = worker.update(batch, table)
    moved = [np.abs(a.data - b.data).max() for a, b in zip(before, worker.export(), strict=True)]
    return result.metrics, result.version, max(moved)


def test_a_dense_model_is_trained(tmp_path):
    tiny_families.save("qwen3", tmp_path)
    ((metrics, version, moved),) = run_ranks(make_config("qwen3", tmp_path), tmp_path, one_step)
    assert version == 1 and moved > 1e-4
    assert np.isfinite(metrics["loss/policy"]) and metrics["optim/grad_norm"] > 0
    assert metrics["replay/coverage"] == metrics["replay/disagreement"] == 0.0


def drop_a_norm(tensors: dict) -> None:
    del tensors["model.layers.0.self_attn.k_norm.weight"]


def drop_a_correction(tensors: dict) -> None:
    """Which would be 0 in the trainer, and whatever memory holds in the engine."""
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]


def add_a_bias(tensors: dict) -> None:
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.ones(128)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_moe", drop_a_norm, "no weight of the checkpoint belongs to 1 parameters"),
        ("moonlight", drop_a_correction, r"no weight .* 1 parameters .*router\.expert_bias"),
        ("qwen3_moe", add_a_bias, r"1 weights of the checkpoint have no place .*q_proj\.bias"),
    ],
)
def test_a_checkpoint_of_an_unknown_variant_is_refused(name, change, message, tmp_path):
    """Upstream logs such weights and goes on with another model."""
    tiny_families.save(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ActorFailed, match=message):
        run_ranks(make_config(name, tmp_path), tmp_path, score, {})


# Qwen3-MoE and DeepSeek-V3: test_verify_layout.py.
OTHERS = [name for name in tiny_families.FAMILIES if name not in ("qwen3_moe", "deepseek_v3")]
# Context parallelism exchanges heads: behind norms over all of them, with the sinks of each, and of
# linear attention with the convolution of each.
CP = ("olmoe", "minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5_moe_published")
LAYOUTS = {"qwen3": "tp2pp2"} | dict.fromkeys(CP, "tp2ep2,cp2")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_layouts_train_the_same_function(name, tmp_path, capsys):
    tiny_families.save(name, tmp_path)
    options = ["--model", str(tmp_path), "--layouts", LAYOUTS.get(name, "tp2ep2"), "--json"]
    overrides = [f"adapter.{key}={value}" for key, value in settings(name)["adapter"].items()]
    code = cli.main(["verify", "layout", *options, *overrides])
    assert code == 0, capsys.readouterr().out
