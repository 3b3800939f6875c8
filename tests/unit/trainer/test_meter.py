"""What a rank counts of the tokens of a step, by hand."""

from __future__ import annotations

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
