"""Our adapters on Megatron's model against PEFT's, and merged ones, on Hugging Face's; one rank."""

from __future__ import annotations

import hf
import linear_loss
import numpy as np
import peft_lora
import pytest
import tiny_families
import torch
from ranks import random_adapter, run_ranks, spec_of

from lora_moe_rl.adapters.served import served
from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig

RELATIVE = 1e-5


def step(worker, spec):
    return linear_loss.our_step(worker, random_adapter(spec))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_one_rank_equals_peft(family, tmp_path):
    model = tiny_families.save(family, tmp_path)
    config = RunConfig(model=str(tmp_path), adapter=peft_lora.ADAPTER)
    spec = spec_of(tmp_path, config)
    vocab = spec.shape.vocab_size
    base = linear_loss.hugging_face_logits(model, vocab).detach().numpy()
    theirs = peft_lora.wrap(model, spec)
    peft_lora.load(theirs, spec, random_adapter(spec))
    expected = linear_loss.backward(linear_loss.hugging_face_logits(theirs, vocab))
    gradients = peft_lora.views(theirs, spec, lambda p: p.grad)

    ((logits, ours),) = run_ranks(config, tmp_path, step)

    assert linear_loss.relative(base, expected) > 0.01, "the adapter changes nothing"
    assert linear_loss.relative(logits, expected) < RELATIVE
    difference, name = linear_loss.worst(ours, {n: g.numpy() for n, g in gradients.items()})
    print(f"logits {linear_loss.relative(logits, expected):.1e}, {difference:.1e} ({name})")
    assert difference < RELATIVE, name


STEPS, LR = 3, 0.01
DENSE = {
    "qwen3_moe": ("*_proj", "mlp.*"),
    "deepseek_v3": ("*_proj", "mlp.*", "shared_expert.*"),
}


def descend(parameters) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter -= LR * parameter.grad
            parameter.grad.zero_()


def train_from_base(worker, spec):
    """(canonical start, logits before, logits after the steps, base's logits after them)."""
    model, adapters = worker.engine.chunks[0], worker.engine.adapters
    vocab = spec.shape.vocab_size
    start = {shard.name: shard.data for shard in adapters.export(lambda parameter: parameter)}
    adapters.gradients.zero()
    logits = []
    for _ in range(STEPS):
        logits.append(linear_loss.backward(linear_loss.megatron_logits(model, vocab)))
        descend(adapters.parameters())
    with torch.no_grad():
        logits.append(linear_loss.megatron_logits(model, vocab).numpy())
        with adapters.off():
            base = linear_loss.megatron_logits(model, vocab).numpy()
    return start, logits, base


@pytest.mark.parametrize("init", ["olora", "pissa"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_start_from_the_base_trains_the_function_that_pefts_trains(family, init, tmp_path):
    """On dense sites: PEFT 0.21.2 has neither for stacked experts."""
    model = tiny_families.save(family, tmp_path)
    adapter = {"rank": peft_lora.RANK, "alpha": peft_lora.ALPHA, "init": init}
    config = RunConfig(model=str(tmp_path), adapter=adapter | {"targets": DENSE[family]})
    spec = spec_of(tmp_path, config)
    vocab = spec.shape.vocab_size
    untouched = linear_loss.hugging_face_logits(model, vocab).detach().numpy()
    theirs = peft_lora.wrap(model, spec, init_lora_weights=init)
    expected_start = {n: v.clone().numpy() for n, v in peft_lora.views(theirs, spec).items()}
    expected = []
    for _ in range(STEPS):
        expected.append(linear_loss.backward(linear_loss.hugging_face_logits(theirs, vocab)))
        descend(p for p in theirs.parameters() if p.requires_grad)
    expected.append(linear_loss.hugging_face_logits(theirs, vocab).detach().numpy())

    ((start, logits, base),) = run_ranks(config, tmp_path, train_from_base)

    limit = RELATIVE
    if init == "pissa":  # PEFT's are of an SVD in float32, and a pair may have either sign
        limit, both = 1e-3, (start, expected_start)
        start, expected_start = ({n: np.abs(v) for n, v in one.items()} for one in both)
    difference, name = linear_loss.worst(start, expected_start)
    assert difference < limit, name
    assert linear_loss.relative(logits[0], untouched) < RELATIVE, "it does not start as the base"
    assert linear_loss.relative(expected[-1], expected[0]) > 0.01, "nothing was trained"
    differences = [linear_loss.relative(a, b) for a, b in zip(logits, expected, strict=True)]
    change = linear_loss.relative(expected[-1], expected[0])
    print(f"start {difference:.1e}, logits by step {max(differences):.1e}, trained {change:.2f}")
    assert max(differences) < RELATIVE
    assert linear_loss.relative(base, untouched) < RELATIVE, "the base has moved"


def train_and_export(worker, spec):
    """(whole canonical tensors after the steps, as they are served; logits)."""
    _, logits, _ = train_from_base(worker, spec)
    tensors = assemble(spec.tensor_shapes, worker.engine.adapters.export())
    return {name: served(spec, name, whole) for name, whole in tensors.items()}, logits


@pytest.mark.parametrize(
    ("family", "init"),
    [
        ("qwen3_moe", "olora"), ("deepseek_v3", "olora"), ("qwen3_moe", "olora_tail"),
        ("deepseek_v3", "pissa"), ("qwen3_moe", "milora"),
    ],
)  # fmt: skip
def test_all_sites_export_what_merges_into_the_untouched_base(family, init, tmp_path):
    model = tiny_families.save(family, tmp_path)
    adapter = {"rank": peft_lora.RANK, "alpha": peft_lora.ALPHA, "init": init}
    config = RunConfig(model=str(tmp_path), adapter=adapter)
    spec = spec_of(tmp_path, config)
    untouched = linear_loss.hugging_face_logits(model, spec.shape.vocab_size).detach().numpy()
    ((tensors, logits),) = run_ranks(config, tmp_path, train_and_export)
    assert {name: tensor.shape for name, tensor in tensors.items()} == spec.tensor_shapes
    hf.merge(model, spec, tensors)
    merged = linear_loss.hugging_face_logits(model, spec.shape.vocab_size).detach().numpy()
    assert linear_loss.relative(logits[0], untouched) < RELATIVE, "it does not start as the base"
    assert linear_loss.relative(untouched, merged) > 0.01, "nothing was trained"
    assert linear_loss.relative(logits[-1], merged) < RELATIVE
