"""What each data-parallel rank is sent of a step."""

from __future__ import annotations

import pickle
from dataclasses import fields

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import OPTIONAL, STREAMS, TrainBatch
from lora_moe_rl.data.micro_batches import plan_for
from lora_moe_rl.data.packing import MicroBatch, pack
from lora_moe_rl.data.shares import shares

N, GROUPS = 24, 4
# What a micro-batch has, but for the batch that it is of.
OF_TOKENS = (
    *(f.name for f in fields(MicroBatch) if f.name not in ("batch", "sequences")),
    *(name for name, made in vars(MicroBatch).items() if isinstance(made, property)),
)


def config_of(dp: int, algorithm: str = "grpo", **trainer) -> RunConfig:
    return RunConfig.model_validate({
        "model": {"path": "qwen3_moe"},
        "trainer": {"world_size": dp, "micro_batch_tokens": 40, **trainer},
        "algorithm": {"name": algorithm, "mini_batches": 2, "prompts_per_step": GROUPS},
    })  # fmt: skip


def batch_of() -> TrainBatch:
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 5, N)
    sequences = [rng.integers(0, 99, p + rng.integers(1, 20)) for p in prompts]
    batch = TrainBatch.from_sequences(sequences, prompts.tolist(), step=3)
    batch.logprobs = [rng.normal(size=len(w)).astype(np.float32) for w in batch.weights]
    batch.weights = [(w * rng.integers(0, 2, len(w))).astype(np.float32) for w in batch.weights]
    batch.mini_batch = np.repeat([0, 1], N // 2)
    batch.groups = np.repeat(np.arange(GROUPS), N // GROUPS)
    batch.splits = {5: (int(prompts[5]) + 1,)}
    batch.targets = [rng.integers(0, 99, (len(w), 3), np.int32) for w in batch.weights]
    batch.marks = [rng.random(len(w)) > 0.5 for w in batch.weights]
    batch.teacher_ids = [rng.integers(0, 99, (len(w), 2), np.int32) for w in batch.weights]
    batch.teacher_logprobs = [-rng.random((len(w), 2), np.float32) for w in batch.weights]
    return batch


def sent(batch: TrainBatch, config: RunConfig) -> list[TrainBatch]:
    """As the ranks get them."""
    return [pickle.loads(pickle.dumps(one)) for one in shares(batch, config)]


@pytest.mark.parametrize("dp", [2, 3, 8])
def test_every_sample_is_sent_to_the_one_rank_that_plans_to_train_it(dp):
    batch, config = batch_of(), config_of(dp)
    came = []
    for rank, share in enumerate(sent(batch, config)):
        assert len(share) == N and share.step == 3 and share.splits == batch.splits
        for samples in share.of_mini_batches(2):
            for chunk in plan_for(config.trainer, samples, share, dp)[rank]:
                ours, theirs = (pack(one, chunk, 1) for one in (share, batch))
                for name in OF_TOKENS:
                    mine, whole = getattr(ours, name), getattr(theirs, name)
                    np.testing.assert_array_equal(mine, whole, name)
                came += chunk
    assert sorted(came) == list(range(N))


def test_what_is_known_of_all_samples_is_that_of_the_whole():
    batch = batch_of()
    weighted = [sum(w > 0) for w in batch.weights]
    for share in sent(batch, config_of(2)):
        np.testing.assert_array_equal(share.num_weighted(), weighted)
        np.testing.assert_array_equal(share.sizes(), [len(ids) for ids in batch.token_ids])
        np.testing.assert_array_equal(share.response_sizes(), [len(w) for w in batch.weights])
        np.testing.assert_array_equal(share.lengths(), batch.lengths())
        np.testing.assert_array_equal(share.offsets, batch.offsets)


def test_another_ranks_sample_is_an_error_and_no_other_sample():
    first, second = sent(batch_of(), config_of(2))
    (sample, *_) = set(range(N)) - set(first.token_ids.found)
    assert second.token_ids[sample] is not None
    for name in (*STREAMS, *OPTIONAL):
        with pytest.raises(ValueError, match=f"sample {sample} is trained by another rank"):
            getattr(first, name)[sample]
    with pytest.raises(ValueError, match="trained by another rank"):
        pack(first, [sample], 1)
    with pytest.raises(ValueError, match="trained by another rank"):
        list(first.weights)


def test_one_rank_gets_the_batch_itself():
    batch = batch_of()
    assert shares(batch, config_of(4, tp=4)) == [batch]


def test_an_algorithm_that_revises_has_the_masks_of_all_samples():
    batch = batch_of()
    for share in sent(batch, config_of(2, "ppo")):
        for mine, whole in zip(share.masks, batch.masks, strict=True):
            np.testing.assert_array_equal(mine, whole)
    with pytest.raises(ValueError, match="trained by another rank"):
        list(sent(batch, config_of(2))[0].masks)


def test_what_a_rank_reads_is_its_part():
    batch = TrainBatch.from_sequences([np.arange(500)] * 64)
    batch.mini_batch = np.repeat([0, 1], 32)
    whole = len(pickle.dumps(batch))
    assert all(len(pickle.dumps(one)) < whole / 7 for one in shares(batch, config_of(8)))
