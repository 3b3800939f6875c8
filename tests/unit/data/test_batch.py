"""Samples to the tensors of a micro-batch."""

import pickle
from functools import partial

import numpy as np
import pytest

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import pack, stream_of, unpack
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment


def make_batch() -> TrainBatch:
    """Two samples: prompt 10 11, response 12 13 14; prompt 20, response 21 22, left out."""
    floats = partial(np.array, dtype=np.float32)
    return TrainBatch(
        token_ids=[np.array([10, 11, 12, 13, 14]), np.array([20, 21, 22])],
        prompt_lengths=np.array([2, 1]),
        logprobs=[floats([-1, -2, -3]), floats([-4, -5])],
        versions=[np.array([3, 3, -1]), np.array([4, 4])],
        advantages=[floats([0.5, 0.25, 0.5]), floats([-1.5, -1.5])],
        weights=[floats([1, 0.5, 0]), floats([0, 0])],
        masks=[np.array([True, True, False]), np.ones(2, bool)],
        mini_batch=np.array([0, 0]),
        groups=np.array([0, 1]),
        copies=np.ones(2, int),
    )


def test_it_travels_as_a_few_arrays_however_many_samples_there_are():
    few = make_batch()
    many = TrainBatch.from_sequences([[1, 2, 3]] * 1000)
    for batch in (few, many, TrainBatch.from_sequences([])):
        aside = []
        data = pickle.dumps(batch, 5, buffer_callback=aside.append)
        assert len(aside) <= 20 and len(data) < 5_000
        found = pickle.loads(data, buffers=aside)
        for name, value in vars(batch).items():
            if isinstance(value, list):
                assert [one.tolist() for one in vars(found)[name]] == [v.tolist() for v in value]
                assert {one.dtype for one in vars(found)[name]} == {one.dtype for one in value}
            else:
                assert np.array_equal(vars(found)[name], value)
    few.weights[1] = few.weights[1].astype(np.float64)
    with pytest.raises(TypeError, match="a stream has one dtype, not float32, float64"):
        pickle.dumps(few)


def test_pack_by_hand():
    packed = pack(make_batch(), [0, 1], multiple=4)
    assert packed.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 0, 0]
    assert packed.labels.tolist() == [11, 12, 13, 14, 21, 22, 0, 0]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 4, 6, 8]
    assert packed.rows.tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert packed.response.tolist() == [False, True, True, True, True, True, False, False]
    # The second sample has weight 0: it is scored, but not in the loss.
    assert packed.weights.tolist() == [0, 1, 0.5, 0, 0, 0, 0, 0]
    assert packed.mask.tolist() == [False, True, True, False, False, False, False, False]
    assert packed.rollout_logprobs.tolist() == [0, -1, -2, -3, -4, -5, 0, 0]
    assert packed.versions.tolist() == [-1, 3, 3, -1, 4, 4, -1, -1]
    assert packed.sampled.tolist() == [False, True, True, False, True, True, False, False]
    assert packed.advantages.tolist() == [0, 0.5, 0.25, 0.5, -1.5, -1.5, 0, 0]
    assert packed.sample_of.tolist() == [0, 0, 0, 0, 1, 1, -1, -1]
    assert packed.counted.tolist() == [True] * 6 + [False] * 2


def test_a_sample_with_splits_is_fed_in_parts_of_one_micro_batch():
    """The first sample is cut after 12: its second part feeds 10 to 13 once more."""
    batch = make_batch()
    batch.splits = {0: (3,)}
    assert batch.lengths().tolist() == [6, 2] and batch.offsets.tolist() == [0, 6, 8]
    assert batch.fed(0).tolist() == [10, 11, 10, 11, 12, 13] and batch.fed(1).tolist() == [20, 21]
    packed = pack(batch, [0, 1], multiple=3)
    assert packed.input_ids.tolist() == [10, 11, 10, 11, 12, 13, 20, 21, 0]
    assert packed.labels.tolist() == [11, 12, 11, 12, 13, 14, 21, 22, 0]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 0]
    assert packed.cu_seqlens.tolist() == [0, 2, 6, 8, 9] and packed.starts.tolist() == [0, 6, 8]
    assert packed.rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1]
    assert packed.sample_of.tolist() == [0] * 6 + [1, 1, -1]
    assert packed.places.tolist() == [0] * 6 + [1, 1, 2]
    own = [False, True, False, False, True, True, True, True, False]
    assert packed.response.tolist() == own
    assert packed.weights.tolist() == [0, 1, 0, 0, 0.5, 0, 0, 0, 0]
    assert packed.rollout_logprobs.tolist() == [0, -1, 0, 0, -2, -3, -4, -5, 0]
    assert packed.versions.tolist() == [-1, 3, -1, -1, 3, -1, 4, 4, -1]
    assert packed.advantages.tolist() == [0, 0.5, 0, 0, 0.25, 0.5, -1.5, -1.5, 0]
    assert unpack(packed, packed.rollout_logprobs)[0].tolist() == [-1, -2, -3]
    stream = stream_of(packed, batch.logprobs)
    assert stream.tolist() == packed.rollout_logprobs.tolist()


def test_empty_micro_batch_has_one_step_of_padding_and_nothing_in_the_loss():
    packed = pack(make_batch(), [], multiple=2)
    assert len(packed.input_ids) == 2
    assert not packed.mask.any() and not packed.counted.any()


def test_unpack_returns_the_response_tokens_of_each_sample():
    packed = pack(make_batch(), [1, 0], multiple=1)
    values = unpack(packed, np.arange(6.0))
    assert values[1].tolist() == [0, 1]
    assert values[0].tolist() == [3, 4, 5]


def test_sequences_to_score_count_every_token_after_the_first():
    batch = TrainBatch.from_sequences([[1, 2, 3], [4, 5]])
    packed = pack(batch, [0, 1], multiple=1)
    assert packed.mask.all()
    assert packed.labels.tolist() == [2, 3, 5]


def test_groups_go_to_mini_batches_whole():
    def group(size):
        segments = (Segment.given("user", [1]), Segment.sampled([2, 3], np.zeros(2), 0))
        return Group(Prompt(0, "", [1]), [Sample(segments, "stop", "")] * size, None, np.ones(size))

    groups = [group(2), group(3), group(1), group(2)]
    signals = [Signal.of_samples(g, np.zeros(len(g.samples))) for g in groups]
    batch = TrainBatch.from_groups(groups, signals, mini_batches=2, step=7)
    assert batch.mini_batch.tolist() == [0] * 5 + [1] * 3 and batch.step == 7
    assert len(batch.token_ids) == len(batch.weights) == 8


def test_token_ids_of_samples_are_the_prompt_and_what_follows_wherever_they_travel():
    whole = [[10, 11, 12, 13], [20, 21], [30, 31, 32]]
    samples = [
        Sample(
            (
                Segment.given("user", ids[:1]),
                Segment.sampled(ids[1:], -np.ones(len(ids) - 1, np.float32), 0),
            ),
            "stop",
            "",
        )
        for ids in whole
    ]
    ones = [np.ones(len(ids) - 1, np.float32) for ids in whole]
    batch = TrainBatch.from_samples(samples, ones, ones)
    share = batch.share([2, 0], batch.known())
    for made in (batch, pickle.loads(pickle.dumps(batch))):
        assert [ids.tolist() for ids in made.token_ids] == whole
    for made in (share, pickle.loads(pickle.dumps(share))):
        assert [made.token_ids[i].tolist() for i in (0, 2)] == [whole[0], whole[2]]
        assert pack(made, [0, 2], 1).labels.tolist() == [11, 12, 13, 31, 32]
        with pytest.raises(ValueError, match="sample 1 is trained by another rank"):
            made.token_ids[1]
    with pytest.raises(ValueError, match="read-only"):
        batch.token_ids[0][0] = 1


def test_a_weight_too_few_is_an_error():
    batch = make_batch()
    batch.weights[0] = batch.weights[0][:-1]
    with pytest.raises(ValueError, match="could not broadcast"):
        pack(batch, [0, 1], multiple=4)
