"""What an algorithm sees of a micro-batch, and what its values become, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lora_moe_rl.algorithms.base import Loss
from lora_moe_rl.algorithms.parts.aggregation import Scales
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import pack

pytestmark = pytest.mark.seconds  # imports Megatron
NAN = float("nan")


def make_batch() -> TrainBatch:
    """Samples of 3 and 2 response tokens; the last token of the first one has no weight."""
    return TrainBatch(
        token_ids=[np.array([10, 11, 12, 13, 14]), np.array([20, 21, 22])],
        prompt_lengths=np.array([2, 1]),
        logprobs=[np.array([-1, -2, -3], np.float32), np.array([-4, -5], np.float32)],
        versions=[np.array([3, 3, 3]), np.array([4, 4])],
        advantages=[np.array([1, 2, 3], np.float32), np.array([4, 5], np.float32)],
        weights=[np.array([1, 0.5, 0], np.float32), np.array([2, 1], np.float32)],
        masks=[np.ones(3, bool), np.ones(2, bool)],
        mini_batch=np.zeros(2, int),
        groups=np.zeros(2, int),
        copies=np.ones(2, int),
    )


def work_of(samples, complete=None):
    """Padded to a multiple of 4: T is 8 with both samples."""
    from lora_moe_rl.trainer.engine import Work

    return Work(pack(make_batch(), samples, multiple=4), None, complete)


def test_a_tokens_loss_counts_with_its_weight_and_its_samples_scale():
    from lora_moe_rl.trainer.objective import tokens_of, total_of

    work = work_of([0, 1])
    # Places that predict response tokens: 1, 2, (3, of no weight), 4 and 5.
    values = torch.tensor([NAN, 1.0, 10.0, NAN, 100.0, 1000.0, NAN, NAN], requires_grad=True)
    tokens = tokens_of(work, torch.zeros(8))
    total = total_of(Loss(values), work, tokens, Scales(np.array([3, 7], np.float32), 5.0))
    assert total.item() == 3 * (1 + 0.5 * 10) + 7 * (2 * 100 + 1000)
    total.backward()
    assert values.grad.tolist() == [0, 3, 1.5, 0, 14, 7, 0, 0]


def test_an_algorithm_sees_zeros_outside_the_loss_and_each_token_at_its_place():
    from lora_moe_rl.trainer.objective import tokens_of

    work = work_of([1, 0])
    work.known["old"] = torch.arange(1.0, 9.0)
    tokens = tokens_of(work, torch.arange(11.0, 19.0))
    assert tokens.mask.tolist() == [True, True, False, True, True, False, False, False]
    assert tokens.advantages.tolist() == [4, 5, 0, 1, 2, 0, 0, 0]
    assert tokens.rollout.tolist() == [-4, -5, 0, -1, -2, 0, 0, 0]
    assert tokens.old.tolist() == [1, 2, 0, 4, 5, 0, 0, 0]
    assert tokens.logprobs.tolist() == [11, 12, 0, 14, 15, 0, 0, 0]
    assert tokens.versions.tolist() == [4, 4, 0, 3, 3, 0, 0, 0]
    assert tokens.samples.tolist() == [0, 0, 1, 1, 1, 1, 2, 2] and tokens.num_samples == 3


@pytest.mark.parametrize(("missing", "kept"), [("mask", [1, 2]), ("route", [2, 2])])
def test_tokens_without_routes_are_left_out_when_that_is_asked(missing, kept):
    from lora_moe_rl.trainer.objective import choose_tokens

    complete = np.array([True, False, True, True, True, True, False, False])
    work, counted = work_of([0, 1], complete), {}
    meter = SimpleNamespace(reports=True, add=counted.__setitem__, all_reduce=lambda values: values)
    engine = SimpleNamespace(
        config=SimpleNamespace(replay=SimpleNamespace(missing=missing)),
        algorithm=SimpleNamespace(rejects=False, averages=False),
    )
    assert choose_tokens(engine, make_batch(), [work], meter).tolist() == kept
    assert counted == {"masked": 4 - sum(kept)}


@pytest.mark.parametrize(("kept_alone", "mean"), [(False, 19 / 7), (True, 18 / 6)])
def test_the_mean_over_a_step_is_of_all_micro_batches_and_ranks(kept_alone, mean):
    """Two micro-batches here, and another rank with streams that sum to 7 and 3. Before any token
    is rejected, or after."""
    from lora_moe_rl.trainer.objective import choose_tokens, tokens_of

    works = [work_of([0]), work_of([1])]
    for work in works:
        work.known["old"] = torch.zeros(len(work.data.labels))
    algorithm = SimpleNamespace(
        rejects=True,
        averages=True,
        averages_kept=kept_alone,
        keep=lambda tokens: tokens.rollout < -1,
        averaged=lambda tokens: (tokens.advantages, torch.ones(len(tokens.mask))),
    )
    engine = SimpleNamespace(
        config=SimpleNamespace(replay=SimpleNamespace(missing="route")),
        algorithm=algorithm,
        is_last_stage=True,
    )
    others = np.array([0, 0, 7, 3])
    meter = SimpleNamespace(
        reports=True, add=lambda *_: None, all_reduce=lambda values: (others + values).tolist()
    )
    assert choose_tokens(engine, make_batch(), works, meter).tolist() == [1, 2]
    # Advantages 1, 2, 4 and 5 of four tokens; the first of them is rejected.
    assert [work.step_mean for work in works] == [mean, mean]
    assert tokens_of(works[0], torch.zeros(4)).step_mean == mean


def test_a_sample_that_stands_in_the_loss_several_times_counts_so_often_everywhere():
    """The first sample twice, the second three times: tokens, the step's mean, what is left out
    and rejected. Advantages 1, 2 of the first and 4, 5 of the second; 4 is rejected."""
    from lora_moe_rl.trainer.engine import Work
    from lora_moe_rl.trainer.objective import choose_tokens, scales_of, tokens_of, total_of

    batch = make_batch()
    batch.copies = np.array([2, 3])
    complete = np.array([True, True, False, True, True, True, False, False])
    work = Work(pack(batch, [0, 1], multiple=4), None, complete)
    assert work.data.copies.tolist() == [2, 2, 2, 2, 3, 3, 0, 0]
    work.known["old"] = torch.zeros(8)
    algorithm = SimpleNamespace(
        rejects=True,
        averages=True,
        averages_kept=False,
        keep=lambda tokens: tokens.advantages != 4,
        averaged=lambda tokens: (tokens.advantages, torch.ones(len(tokens.mask))),
    )
    settings = SimpleNamespace(aggregation="token-mean")
    config = SimpleNamespace(replay=SimpleNamespace(missing="mask"), algorithm=settings)
    config.max_response_tokens = 10
    engine = SimpleNamespace(config=config, algorithm=algorithm, is_last_stage=True)
    counted: dict[str, float] = {}
    meter = SimpleNamespace(
        reports=True, add=counted.__setitem__, all_reduce=lambda values: list(values)
    )
    kept = choose_tokens(engine, batch, [work], meter)
    assert kept.tolist() == [1, 1]
    assert counted == {"masked": 2, "rejected": 3}
    assert work.step_mean == (2 * 1 + 3 * 4 + 3 * 5) / (2 + 3 + 3)
    assert work.stands.tolist() == [0, 2, 0, 0, 0, 3, 0, 0]
    scales = scales_of(engine, batch, kept, np.array([0, 1]))
    assert scales.divisor == 5
    settings.aggregation = "seq-mean-token-sum"
    batch.copies, batch.conversations = np.array([2, 2]), np.array([0, 0])
    assert scales_of(engine, batch, kept, np.array([0, 1])).divisor == 2
    values = torch.arange(8.0)
    total = total_of(Loss(values), work, tokens_of(work, torch.zeros(8)), scales)
    assert total.item() == 2 * 1 + 3 * 5


def test_a_loss_is_told_the_weight_of_the_kl_of_its_step():
    from lora_moe_rl.trainer.objective import tokens_of

    work = work_of([0, 1])
    assert tokens_of(work, torch.zeros(8)).kl_coef is None
    work.data.batch.kl_coef = 0.25
    assert tokens_of(work, torch.zeros(8)).kl_coef == 0.25
