"""Data of a client as what the trainer takes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from lora_moe_rl.data.packing import pack
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service.backend import Datum, Facts, LossCall
from lora_moe_rl.service.batches import batch_of, check_data

FACTS = Facts("base", "base", 8, 4)
VOCAB = 50
SFT, RL = LossCall("cross_entropy"), LossCall("importance_sampling")


def ints(*values) -> np.ndarray:
    return np.array(values, np.int32)


def floats(*values) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_micro_batch_has_the_targets_where_their_tokens_are_fed():
    data = [
        Datum(ints(5, 6, 7), ints(0, 9, 8), {"advantages": floats(1, 2, 3),
                                             "logprobs": floats(-1, -2, -3)}),
        Datum(ints(4), ints(2), {"advantages": floats(4), "logprobs": floats(-4)}),
    ]  # fmt: skip
    batch = pickle.loads(pickle.dumps(batch_of(data, RL, 3)))
    one = pack(batch, [0, 1], multiple=6)
    np.testing.assert_array_equal(one.input_ids, [5, 6, 7, 4, 0, 0])
    np.testing.assert_array_equal(one.labels, [0, 9, 8, 2, 0, 0])
    np.testing.assert_array_equal(one.advantages, [1, 2, 3, 4, 0, 0])
    np.testing.assert_array_equal(one.rollout_logprobs, [-1, -2, -3, -4, 0, 0])
    np.testing.assert_array_equal(one.response, [True] * 4 + [False] * 2)
    share = batch.share([1], batch.known())
    np.testing.assert_array_equal(pack(share, [1], multiple=1).labels, [2])
    with pytest.raises(ValueError, match="sample 0 is trained by another rank"):
        share.targets[0]


def test_a_weight_may_be_negative_or_zero_and_each_token_counts():
    """As the gradient of a client's own loss has them."""
    weights = floats(-1, 0, 2)
    batch = batch_of([Datum(ints(1, 2, 3), ints(2, 3, 4), {"weights": weights})], SFT, 1)
    np.testing.assert_array_equal(batch.advantages[0], weights)
    assert batch.num_weighted().tolist() == [3]


GOOD = {"advantages": floats(1, 1), "logprobs": floats(-1, -1)}


@pytest.mark.parametrize(
    ("datum", "call", "says"),
    [
        (Datum(ints(), ints(), {}), SFT, "datum 1: it has 0 tokens, .* takes 1 to 8"),
        (Datum(ints(*range(9)), ints(*range(9)), {}), SFT, "it has 9 tokens, .* takes 1 to 8"),
        (Datum(ints(1, 2), ints(1), GOOD), RL, "it has 2 tokens and 1 target_tokens"),
        (Datum(ints(1, -2), ints(1, 2), GOOD), RL, "the token -2, and the model's are 0 to 49"),
        (Datum(ints(1, 2), ints(1, 50), GOOD), RL, "the target token 50"),
        (Datum(ints(1, 2), ints(1, 2), {}), SFT, "are target_tokens, and .* takes .*, weights"),
        (Datum(ints(1, 2), ints(1, 2), GOOD), SFT, "are target_tokens, advantages, logprobs, and"),
        (Datum(ints(1, 2), ints(1, 2), GOOD | {"mask": floats(1, 1)}), RL, "mask, and loss_fn=imp"),
        (Datum(ints(1, 2), ints(1, 2), GOOD | {"logprobs": floats(1)}), RL, "2 tokens and 1 logpr"),
        (
            Datum(ints(1, 2), ints(1, 2), GOOD | {"logprobs": floats(1, np.nan)}),
            RL,
            "its logprobs hold nan",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_named(datum, call, says):
    rl = {"advantages": floats(0), "logprobs": floats(0)}
    good = Datum(ints(1), ints(2), {"weights": floats(1)} if call is SFT else rl)
    with pytest.raises(ServiceError, match=says):
        check_data([good, datum], call, FACTS, VOCAB)
    check_data([good], call, FACTS, VOCAB)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (LossCall("gspo"), "no loss_fn=gspo here; there are cross_entropy, importance"),
        (LossCall("ppo", {"epsilon": 0.2}), "no epsilon; it takes clip_low_threshold, clip_high"),
        (LossCall("cross_entropy", {"beta": 1.0}), "no beta; it takes no settings"),
    ],
)
def test_a_loss_that_is_not_there_is_named(call, says):
    with pytest.raises(ServiceError, match=says):
        check_data([], call, FACTS, VOCAB)


def test_no_data_is_no_request():
    with pytest.raises(ServiceError, match="there is no datum"):
        check_data([], SFT, FACTS, VOCAB)
