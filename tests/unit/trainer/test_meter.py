"""What a rank counts of the tokens of a step, and what the sums become, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lora_moe_rl.data.batch import TrainBatch, pack

pytestmark = pytest.mark.seconds  # imports Megatron


@pytest.mark.parametrize(
    ("updates", "judged", "of_age"), [(1, 1, {0: 1, 1: 2, 2: 1}), (2, 1, {0: 1, 1: 3, 2: 1})]
)
def test_a_tokens_age_is_in_steps_and_judged_is_what_is_of_this_version(updates, judged, of_age):
    """Tokens of the versions 4, 3, 3, 2 and 1, and one that nobody sampled, in a step that updates
    version 4."""
    from lora_moe_rl.trainer.meter import WITH, WITHOUT, Meter

    batch = TrainBatch.from_sequences([np.arange(7)])
    batch.versions = [np.array([4, 3, 3, -1, 2, 1])]
    batch.logprobs = [np.full(6, -1, np.float32)]
    meter = Meter(None, False, SimpleNamespace(metrics={}), 2, 4, updates)
    data = pack(batch, [0], multiple=4)
    for prefix in (WITH, WITHOUT):
        meter.mismatch(prefix, data, torch.full((len(data.labels),), -2.0))
    assert meter.sums["mismatch/judged"] == judged and meter.sums["mismatch/tokens"] == 5
    found = {age: meter.sums[f"mismatch/kl_age_{age}/tokens"] for age in range(3)}
    assert found == of_age
    for age, count in of_age.items():  # the log ratio is -1
        assert meter.sums[f"mismatch/kl_age_{age}/sum"] == pytest.approx(count * np.exp(-1))


def test_means_over_samples_are_of_samples_in_whatever_micro_batch_they_are(monkeypatch):
    """Three samples in two micro-batches, of 1, 3 and 1 tokens; the engine gives each token of a
    sample 1/2, 1/4 and 1/8, the trainer 1/2."""
    from lora_moe_rl.trainer.meter import WITH, Meter

    lengths, engine = (1, 3, 1), (0.5, 0.25, 0.125)
    batch = TrainBatch.from_sequences([np.zeros(n + 1, np.int32) for n in lengths])
    batch.logprobs = [
        np.full(n, math.log(p), np.float32) for n, p in zip(lengths, engine, strict=True)
    ]
    algorithm = SimpleNamespace(metrics={}, summary=lambda metrics: {})
    meter = Meter(None, is_last_stage=False, algorithm=algorithm)
    meter.reports = True
    monkeypatch.setattr(meter, "all_reduce", lambda values, op=None: values)
    monkeypatch.setattr(meter, "_worst_anywhere", lambda prefix: [0.0] * 5)
    for samples in ([0, 1], [2]):
        data = pack(batch, samples, multiple=4)
        meter.mismatch(WITH, data, torch.full((len(data.labels),), math.log(0.5)))
    found = meter.metrics([SimpleNamespace(grad_norm=1.0, lr=1.0)], compared=False)
    # Perplexities of 2, 4 and 8; products of ratios 1, 2^3 and 4.
    assert found["mismatch/rollout_ppl"] == pytest.approx(14 / 3, rel=1e-6)
    assert found["mismatch/trainer_ppl"] == pytest.approx(2, rel=1e-6)
    assert found["mismatch/chi2_sequence"] == pytest.approx((1 + 64 + 16) / 3 - 1, rel=1e-5)
    # Over tokens: ratios 1, 2 three times and 4.
    assert found["mismatch/chi2"] == pytest.approx((1 + 3 * 4 + 16) / 5 - 1, rel=1e-6)
    assert found["mismatch/kl_k1"] == pytest.approx(-(3 + 2) * math.log(2) / 5, rel=1e-6)
