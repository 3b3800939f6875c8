"""What a rank counts of the tokens of a step, and what the sums become, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import pack

pytestmark = pytest.mark.seconds  # imports Megatron


@pytest.mark.parametrize(
    ("updates", "judged", "of_age"), [(1, 1, {0: 1, 1: 2, 2: 1}), (2, 1, {0: 1, 1: 3, 2: 1})]
)
def test_a_tokens_age_is_in_steps_and_judged_is_what_is_of_this_version(updates, judged, of_age):
    """Samples of the versions 4, 3, 2 and 1, with a token that nobody sampled, in a step that
    updates version 4."""
    from lora_moe_rl.trainer.meter import WITH, WITHOUT, Meter

    versions = [[4], [3, 3, -1], [2], [1]]
    batch = TrainBatch.from_sequences([np.arange(len(one) + 1) for one in versions])
    batch.versions = [np.array(one) for one in versions]
    batch.logprobs = [np.full(len(one), -1, np.float32) for one in versions]
    meter = Meter(None, False, SimpleNamespace(metrics={}, learns_from="rollouts"), 2, 4, updates)
    data = pack(batch, range(4), multiple=4)
    for prefix in (WITH, WITHOUT):
        meter.mismatch(prefix, data, torch.full((len(data.labels),), -2.0))
    assert not meter.sums  # nothing has been waited for
    meter.settle()
    assert meter.sums["mismatch/judged"] == judged and meter.sums["mismatch/tokens"] == 5
    found = {age: meter.sums[f"mismatch/kl_age_{age}/tokens"] for age in range(3)}
    assert found == of_age
    for age, count in of_age.items():  # the log ratio is -1
        assert meter.sums[f"mismatch/kl_age_{age}/sum"] == pytest.approx(count * np.exp(-1))


@pytest.mark.parametrize(("splits", "of_age"), [({}, {0: 1, 1: 3}), ({0: (2,)}, {0: 3, 1: 1})])
def test_a_sample_that_went_on_is_as_old_as_its_oldest_token_unless_each_version_has_a_part(
    splits, of_age
):
    """Version 3 sampled a token, and 4 the next two; another sample is of version 4 alone."""
    from lora_moe_rl.trainer.meter import WITH, Meter

    batch = TrainBatch.from_sequences([np.arange(4), np.arange(2)])
    batch.versions, batch.splits = [np.array([3, 4, 4]), np.array([4])], splits
    meter = Meter(None, False, SimpleNamespace(metrics={}, learns_from="rollouts"), 1, 4)
    data = pack(batch, range(2), multiple=4)
    meter.mismatch(WITH, data, torch.zeros(len(data.labels)))
    meter.settle()
    assert {age: meter.sums[f"mismatch/kl_age_{age}/tokens"] for age in range(2)} == of_age
    assert meter.sums["mismatch/judged"] == of_age[0]


def test_means_over_samples_are_of_samples_in_whatever_micro_batch_they_are(monkeypatch):
    """Three samples in two micro-batches, of 1, 3 and 1 tokens; the engine gives each token of a
    sample 1/2, 1/4 and 1/8, the trainer 1/2."""
    from lora_moe_rl.trainer.meter import WITH, Meter

    lengths, engine = (1, 3, 1), (0.5, 0.25, 0.125)
    batch = TrainBatch.from_sequences([np.zeros(n + 1, np.int32) for n in lengths])
    batch.logprobs = [
        np.full(n, math.log(p), np.float32) for n, p in zip(lengths, engine, strict=True)
    ]
    algorithm = SimpleNamespace(metrics={}, summary=lambda metrics: {}, learns_from="rollouts")
    meter = Meter(None, is_last_stage=False, algorithm=algorithm)
    meter.reports = True
    monkeypatch.setattr(meter, "all_reduce", lambda values, op=None: values)
    monkeypatch.setattr(meter, "_worst_anywhere", lambda prefix: [0.0] * 5)
    for samples in ([0, 1], [2]):
        data = pack(batch, samples, multiple=4)
        meter.mismatch(WITH, data, torch.full((len(data.labels),), math.log(0.5)))
    found = meter.metrics([SimpleNamespace(grad_norm=1.0, lr=1.0, streamed=0.0)], compared=False)
    # Perplexities of 2, 4 and 8; products of ratios 1, 2^3 and 4.
    assert found["mismatch/rollout_ppl"] == pytest.approx(14 / 3, rel=1e-6)
    assert found["mismatch/trainer_ppl"] == pytest.approx(2, rel=1e-6)
    assert found["mismatch/chi2_sequence"] == pytest.approx((1 + 64 + 16) / 3 - 1, rel=1e-5)
    # Over tokens: ratios 1, 2 three times and 4.
    assert found["mismatch/chi2"] == pytest.approx((1 + 3 * 4 + 16) / 5 - 1, rel=1e-6)
    assert found["mismatch/kl_k1"] == pytest.approx(-(3 + 2) * math.log(2) / 5, rel=1e-6)


def test_what_no_engine_sampled_has_no_mismatch_and_its_means_are_over_the_tokens_in_the_loss(
    monkeypatch,
):
    """Rows' own answers of two tokens and one, of which one is not in the loss."""
    from lora_moe_rl.trainer.meter import WITH, Meter

    batch = TrainBatch.from_sequences([np.zeros(3, np.int32), np.zeros(2, np.int32)])
    batch.versions = [np.full(len(one), -1) for one in batch.versions]
    algorithm = SimpleNamespace(
        metrics={"nll": "token_mean"}, summary=lambda metrics: {}, learns_from="answers"
    )
    meter = Meter(None, is_last_stage=False, algorithm=algorithm)
    meter.reports, meter.of_step = True, {"logps/chosen": -3.0}
    monkeypatch.setattr(meter, "all_reduce", lambda values, op=None: values)
    data = pack(batch, [0, 1], multiple=4)
    meter.mismatch(WITH, data, torch.zeros(len(data.labels)))
    meter.add("tokens", 2)
    meter.add("entropy", 3.0)
    meter.add("loss/nll", 5.0)
    found = meter.metrics([SimpleNamespace(grad_norm=1.0, lr=1.0, streamed=0.0)], compared=False)
    assert found["policy/entropy"] == 1.5 and found["loss/nll"] == 2.5
    assert found["logps/chosen"] == -3.0 and found["loss/tokens"] == 2
    assert not any(name.startswith(("mismatch", "replay")) for name in found)


def test_figures_of_tensors_are_those_of_their_numbers_and_are_read_when_one_is_asked_for(
    monkeypatch,
):
    from lora_moe_rl.trainer.meter import Meter

    declared = {"ratio": "token_mean", "largest": "max", "least": "min"}
    algorithm = SimpleNamespace(metrics=declared, learns_from="answers")
    meter = Meter(None, is_last_stage=False, algorithm=algorithm)
    meter.reports = True
    monkeypatch.setattr(meter, "all_reduce", lambda values, op=None: values)
    read = []
    for values in ([0.1, 7.0, 9.0], [0.3, -2.0, -9.0]):  # the third is not in the loss
        stream = torch.tensor(values)
        found = dict.fromkeys(declared, stream)
        meter.add_metrics(found, torch.tensor([1, 2, 0]))
        meter.later(lambda: read.append(1))
    assert not meter.sums and not meter.extremes and not read
    (total,) = meter.summed(["loss/ratio"])
    sums = [float(np.float32(0.1)) + 14, float(np.float32(0.3)) - 4]  # in float64
    assert total == sums[0] + sums[1] and len(read) == 2
    assert meter.extremes == {"largest": 7.0, "least": -2.0}
    assert meter.summed(["loss/ratio"]) == [total] and len(read) == 2  # nothing twice
