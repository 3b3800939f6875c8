"""Data of a client as what the trainer takes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from lora_moe_rl.data.packing import pack
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service.backend import Datum, Facts, LossCall
from lora_moe_rl.service.batches import batch_of, check_data, logprobs_of

FACTS = Facts("base", "base", 8, 4)
VOCAB = 50
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
GSPO = LossCall("gspo", CLIP)
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


def test_several_targets_at_a_place_are_as_wide_as_the_widest_datum():
    data = [
        Datum(ints(5, 6), np.array([[0, 9], [8, 7]]), {"weights": np.float32([[1, 2], [3, 4]])}),
        Datum(ints(4), ints(2), {"weights": floats(5)}),
        Datum(ints(3), np.array([[1, 2, 3]]), {"weights": np.float32([[6, 7, 8]])}),
    ]
    check_data(data, SFT, FACTS, VOCAB)
    batch = pickle.loads(pickle.dumps(batch_of(data, SFT, 3)))
    assert batch.wide
    one = pack(batch, [0, 1, 2], multiple=5)
    zeros = [0, 0, 0]
    np.testing.assert_array_equal(one.input_ids, [5, 6, 4, 3, 0])
    np.testing.assert_array_equal(one.labels, [[0, 9, 0], [8, 7, 0], [2, 0, 0], [1, 2, 3], zeros])
    np.testing.assert_array_equal(
        one.advantages, [[1, 2, 0], [3, 4, 0], [5, 0, 0], [6, 7, 8], zeros]
    )
    found = [np.arange(3 * len(d.tokens)).reshape(-1, 3) for d in data]
    ours = logprobs_of(data, found)
    np.testing.assert_array_equal(ours[0], [[0, 1], [3, 4]])
    assert ours[1].tolist() == [0] and ours[2].tolist() == [[0, 1, 2]]


def test_marks_are_of_what_is_not_zero():
    inputs = {"advantages": floats(1, 1, 1), "logprobs": floats(-1, -1, -1)}
    datum = Datum(ints(1, 2, 3), ints(2, 3, 4), inputs | {"sequence_ratio_mask": floats(0, 0.5, 1)})
    batch = pickle.loads(pickle.dumps(batch_of([datum], GSPO, 1)))
    np.testing.assert_array_equal(pack(batch, [0], multiple=4).marks, [False, True, True, False])


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
        (
            Datum(ints(1, 2), ints(1, 2), GOOD | {"logprobs": floats(1)}),
            RL,
            r"have shape \[2\], "
            r"and its logprobs \[1\]",
        ),
        (
            Datum(ints(1, 2), ints(1, 2)[:, None], GOOD),
            RL,
            "it has 1 target_tokens at each place, "
            "and loss_fn=importance_sampling takes one: cross_entropy takes several",
        ),
        (
            Datum(ints(1, 2), ints(1, 2)[:, None], {"weights": floats(1, 1)}),
            SFT,
            r"shape \[2, 1\], "
            r"and its weights \[2\]",
        ),
        (Datum(ints(1, 2), ints(1, 2), GOOD), GSPO, "takes .*, logprobs, sequence_ratio_mask"),
        (
            Datum(ints(1, 2), ints(1, 2), GOOD | {"sequence_ratio_mask": floats(0, 0)}),
            GSPO,
            "its sequence_ratio_mask is 0 everywhere",
        ),
        (
            Datum(ints(1, 2), ints(1, 2), GOOD | {"logprobs": floats(1, np.nan)}),
            RL,
            "its logprobs hold nan",
        ),
        (
            Datum(ints(1, 2), ints(1, 2), GOOD | {"logprobs": floats(-1, 0.5)}),
            RL,
            "its logprobs hold 0.5, and no token's is above 0",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_named(datum, call, says):
    rl = {"advantages": floats(0), "logprobs": floats(0)}
    rl |= {"sequence_ratio_mask": floats(1)} if call is GSPO else {}
    good = Datum(ints(1), ints(2), {"weights": floats(1)} if call is SFT else rl)
    with pytest.raises(ServiceError, match=says):
        check_data([good, datum], call, FACTS, VOCAB)
    check_data([good], call, FACTS, VOCAB)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (LossCall("custom"), "no loss_fn=custom here; there are cross_entropy, importance"),
        (
            LossCall("gspo", {"clip_low_threshold": 0.9}),
            "gspo wants .* to have clip_high_threshold",
        ),
        (LossCall("ppo", {"epsilon": 0.2}), "no epsilon; it takes clip_low_threshold, clip_high"),
        (
            LossCall("ppo", {"clip_low_threshold": 1.8}),
            "clip_low_threshold=1.8 is above clip_high_threshold=1.2",
        ),
        (LossCall("cross_entropy", {"beta": 1.0}), "no beta; it takes no settings"),
    ],
)
def test_a_loss_that_is_not_there_is_named(call, says):
    with pytest.raises(ServiceError, match=says):
        check_data([], call, FACTS, VOCAB)


def test_no_data_is_no_request():
    with pytest.raises(ServiceError, match="there is no datum"):
        check_data([], SFT, FACTS, VOCAB)
