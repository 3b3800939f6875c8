"""The entropy bonus on real Megatron-core ranks: loss and gradient against Hugging Face with PEFT's
adapters and torch's own entropy of whole logits, with micro-batches, masks and layouts."""

from __future__ import annotations

import linear_loss
import numpy as np
import peft_lora
import pytest
import tiny_families
import torch
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig

RELATIVE = 1e-5
COEF, TEMPERATURE = 0.3, 0.7
LAYOUTS = {
    "one rank": {},
    "tp2": {"world_size": 2, "tp": 2},
    "dp2": {"world_size": 2},
    "cp2": {"world_size": 2, "cp": 2},
}


def make_config(folder, **trainer) -> RunConfig:
    """Small micro-batches, so that every rank has several of uneven size."""
    return RunConfig(
        model=str(folder),
        adapter=peft_lora.ADAPTER,
        trainer={"micro_batch_tokens": 40, **trainer},
        rollout={"temperature": TEMPERATURE},
        replay={"mode": "off"},
        algorithm={"entropy_coef": COEF, "aggregation": "seq-mean-token-mean"},
    )


def of_entropy_alone(spec):
    """No advantage of any token, and of two samples tokens that are not in the loss."""
    batch, _ = random_batch(spec)
    batch.advantages = [0 * one for one in batch.advantages]
    batch.weights[2] = 0 * batch.weights[2]
    batch.weights[4][::2] = 0
    return batch


def gradients(worker, spec):
    worker.set_adapter(random_adapter(spec))
    return worker.gradients(of_entropy_alone(spec))


def by_hugging_face(model, spec):
    theirs = peft_lora.wrap(model, spec)
    peft_lora.load(theirs, spec, random_adapter(spec))
    means, batch = [], of_entropy_alone(spec)
    for ids, weights in zip(batch.token_ids, batch.weights, strict=True):
        inside = torch.from_numpy(weights > 0)
        if inside.any():
            fed = torch.from_numpy(ids[:-1].astype(np.int64))[None]
            logits = theirs(fed).logits[0, -len(weights) :]
            entropy = torch.distributions.Categorical(logits=logits / TEMPERATURE).entropy()
            means.append(entropy[inside].mean())
    loss = -COEF * torch.stack(means).mean()
    loss.backward()
    found = peft_lora.views(theirs, spec, lambda parameter: parameter.grad)
    return loss.item(), {name: gradient.numpy() for name, gradient in found.items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = tiny_families.save("qwen3_moe", folder)
    spec = spec_of(folder, make_config(folder))
    return folder, spec, *by_hugging_face(model, spec)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_the_mean_entropy_is_that_of_torch_on_hugging_face(expected, layout):
    folder, spec, loss, theirs = expected
    ranks = run_ranks(make_config(folder, **LAYOUTS[layout]), folder, gradients)
    ours = assemble(spec.tensor_shapes, [shard for _, _, shards in ranks for shard in shards])
    assert loss < -0.1
    for found, _, _ in ranks:
        assert found == pytest.approx(loss, rel=RELATIVE)
    difference, name = linear_loss.worst(ours, theirs)
    assert difference < RELATIVE, name
