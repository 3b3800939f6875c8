"""The trainer's values of single tokens on real Megatron-core ranks, against Hugging Face's forward
of one sample at a time."""

from __future__ import annotations

import hf
import numpy as np
import pytest
import tiny_families
import torch
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl.config import RunConfig

KEPT, TEMPERATURE = [0, 2, 5, 8], 0.7  # of eleven samples
LAYOUTS = {
    "one": ({}, {}),
    "tp2ep2dp2": ({"world_size": 4, "tp": 2, "ep": 2}, {}),
    "cp2": ({"world_size": 2, "cp": 2}, {}),
    "pp2vpp2": ({"world_size": 2, "pp": 2, "vpp": 2}, {}),
    # The logprobs are of a forward of their own, before the first of two optimizer steps.
    "dp2, several updates": ({"world_size": 2}, {"epochs": 2}),
}


def make_config(folder, trainer, algorithm) -> RunConfig:
    """Small micro-batches: every rank has several, whose samples are in another order than the
    step's. A learning rate at which a second update would show."""
    return RunConfig(
        model=str(folder),
        adapter={"rank": 5, "expert_rank": 3},
        trainer={"lr": 1e-2, "micro_batch_tokens": 40, **trainer},
        algorithm=algorithm,
        rollout={"temperature": TEMPERATURE},
        replay={"mode": "off"},
        logging={"tokens": True, "samples_per_step": len(KEPT)},
    )


def train(worker, spec):
    worker.set_adapter(random_adapter(spec))
    return worker.update(random_batch(spec)[0]).tokens


@torch.no_grad()
def by_hugging_face(model, batch, sample: int) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs and entropy of a sample's tokens after its prompt."""
    ids = torch.from_numpy(batch.token_ids[sample].astype(np.int64))[None]
    scores = torch.log_softmax(model(ids).logits[0, :-1].double() / TEMPERATURE, dim=-1)
    logprobs = scores.gather(1, ids[0, 1:, None])[:, 0]
    entropy = -(scores.exp() * scores).sum(-1)
    first = int(batch.prompt_lengths[sample]) - 1
    return logprobs[first:].numpy(), entropy[first:].numpy()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = tiny_families.save("qwen3_moe", folder, num_hidden_layers=4)
    spec = spec_of(folder, make_config(folder, {}, {}))
    hf.merge(model, spec, random_adapter(spec))
    batch, _ = random_batch(spec)
    return folder, {sample: by_hugging_face(model, batch, sample) for sample in KEPT}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kept_token_has_the_logprob_and_entropy_that_hugging_face_gives_it(expected, layout):
    folder, wanted = expected
    everyone = run_ranks(make_config(folder, *LAYOUTS[layout]), folder, train)
    for found in everyone:
        assert list(found) == KEPT
        for sample, (logprobs, entropy) in wanted.items():
            np.testing.assert_allclose(found[sample].logprobs, logprobs, atol=1e-5)
            np.testing.assert_allclose(found[sample].entropy, entropy, atol=1e-5)
    spread = max(np.ptp(entropy) for _, entropy in wanted.values())
    assert spread > 0.01, "all entropies are alike: a token in another's place would not show"
