"""What is selected of each optimizer step: over micro-batches, ranks and copies, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lora_moe_rl.algorithms.parts.selection import Selection, lots_of
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import pack, unpack

pytestmark = pytest.mark.seconds  # imports Megatron

SIZES, SEED, STEP = (3, 2, 4, 1), 11, 5
EVERYONE = [np.arange(4)]
# Sample 1 stands in the loss twice and sample 3 not at all; the last token of sample 0 has no
# weight, and the second of sample 2 was rejected.
COPIES = np.array([1, 2, 1, 0])
INSIDE = [[0, 1], [0, 1], [0, 2, 3], []]


def at(sample: int, token: int) -> float:
    """A number that tells where it is from."""
    return 10.0 * sample + token


def make_batch() -> TrainBatch:
    streams = [np.array([at(i, t) for t in range(n)], np.float32) for i, n in enumerate(SIZES)]
    weights = [np.ones(n, np.float32) for n in SIZES]
    weights[0][2] = 0
    return TrainBatch(
        token_ids=[np.arange(n + 2, dtype=np.int32) for n in SIZES],
        prompt_lengths=np.full(4, 2),
        logprobs=[one + 0.5 for one in streams],
        versions=[np.zeros(n, np.int32) for n in SIZES],
        advantages=[one + 0.25 for one in streams],
        weights=weights,
        masks=[np.ones(n, bool) for n in SIZES],
        mini_batch=np.array([0, 0, 1, 1]),
        groups=np.zeros(4, int),
        copies=COPIES,
        step=STEP,
    )


def work_of(batch: TrainBatch, samples):
    """With the logprobs of before the update, and entropies that are their negatives."""
    from lora_moe_rl.trainer.engine import Work

    work = Work(pack(batch, samples, multiple=4), None)
    data = work.data
    token = data.positions - 1  # of the response, where there is one
    values = np.where(data.response, 10.0 * data.sample_of + token, 77.0).astype(np.float32)
    work.known = {"old": torch.from_numpy(values), "entropy": torch.from_numpy(-values)}
    work.mask = data.mask & ~((data.sample_of == 2) & data.response & (token == 1))
    return work


class Chooser:
    """Selects the tokens of `wanted` old logprobs, and remembers what it was shown."""

    selects, selects_by_entropy = True, True

    def __init__(self, wanted=()):
        self.wanted, self.seen = wanted, []

    def select(self, tokens):
        self.seen.append(tokens)
        chosen = np.isin(tokens.logprobs, self.wanted)
        return Selection(chosen, {"largest": float(tokens.logprobs.max())})


def select(works, algorithm, steps=EVERYONE, others=None):
    """The selected tokens of each sample on this rank, and the metrics. others: for each stream in
    turn what the other ranks have."""
    from lora_moe_rl.trainer.selection import select_tokens

    sent = []

    def all_reduce(values):
        sent.append(np.array(values))
        return (sent[-1] + (others[len(sent) - 1] if others else 0)).tolist()

    meter = SimpleNamespace(reports=True, all_reduce=all_reduce, of_step={})
    engine = SimpleNamespace(algorithm=algorithm, config=SimpleNamespace(seed=SEED))
    select_tokens(engine, works[0].data.batch if works else make_batch(), steps, works, meter)
    found = {}
    for work in works:
        found |= unpack(work.data, work.known["selected"].numpy())
    return {i: one.tolist() for i, one in found.items()}, meter.of_step, sent


def test_an_algorithm_is_shown_the_tokens_in_the_loss_as_often_as_they_stand_there():
    algorithm, batch = Chooser(), make_batch()
    select([work_of(batch, [2, 0]), work_of(batch, [3, 1])], algorithm)
    (tokens,) = algorithm.seen
    expected = np.array([at(i, t) for i in (0, 1, 1, 2) for t in INSIDE[i]])
    assert tokens.logprobs.tolist() == expected.tolist() == tokens.old.tolist()
    assert tokens.rollout.tolist() == (expected + 0.5).tolist()
    assert tokens.advantages.tolist() == (expected + 0.25).tolist()
    assert tokens.entropy.tolist() == (-expected).tolist()
    lots = [
        lots_of(SEED, STEP, i, COPIES[i], SIZES[i])[copy][t]
        for i in (0, 1, 2)
        for copy in range(COPIES[i])
        for t in INSIDE[i]
    ]
    assert tokens.lots.tolist() == lots and len({*lots}) == len(lots)


def test_what_is_selected_comes_back_to_its_token_as_a_share_of_its_copies():
    class OneCopy(Chooser):
        def select(self, tokens):
            chosen = np.zeros(len(tokens.logprobs), bool)
            chosen[[1, 3, 4, 5, 7]] = True  # of 0: the second; of 1: (-, +) and (+, +); of 2: third
            return Selection(chosen)

    batch = make_batch()
    found, metrics, _ = select([work_of(batch, [2, 0]), work_of(batch, [3, 1])], OneCopy())
    assert found == {0: [0, 1, 0], 1: [0.5, 1], 2: [0, 0, 1, 0], 3: [0]}
    assert metrics == {}


def test_each_optimizer_step_is_a_selection_of_its_own():
    """And metrics are the mean of theirs; one of which no token is in the loss makes none."""
    algorithm, batch = Chooser(wanted=[1.0, 11.0, 23.0]), make_batch()
    works = [work_of(batch, [0]), work_of(batch, [1]), work_of(batch, [2]), work_of(batch, [3])]
    steps = [np.array([0, 1]), np.array([2]), np.array([3])]
    found, metrics, _ = select(works, algorithm, steps)
    assert [len(one.logprobs) for one in algorithm.seen] == [6, 3]
    assert found == {0: [0, 1, 0], 1: [0, 1], 2: [0, 0, 0, 1], 3: [0]}
    assert metrics == {"loss/largest": (11 + 23) / 2}


def test_ranks_see_the_same_and_each_keeps_its_own():
    """Two ranks, each with two of the samples: first what each of them sends."""
    batch, wanted = make_batch(), [1.0, 11.0, 23.0]
    halves = [[0, 3], [2, 1]]
    alone, _, _ = select([work_of(batch, [0, 1, 2, 3])], Chooser(wanted))
    sent = [select([work_of(batch, half)], Chooser(wanted))[2] for half in halves]
    seen = []
    for half, others in zip(halves, reversed(sent), strict=True):
        algorithm = Chooser(wanted)
        found, metrics, _ = select([work_of(batch, half)], algorithm, others=others)
        assert found == {i: alone[i] for i in half}
        assert metrics == {"loss/largest": 23.0}
        seen.append(algorithm.seen[0])
    for name in ("logprobs", "rollout", "advantages", "lots", "entropy"):
        assert getattr(seen[0], name).tolist() == getattr(seen[1], name).tolist()


def test_a_rank_that_does_not_report_sends_nothing():
    """Of a tensor-parallel group one rank reports; on an earlier stage nothing is known."""
    from lora_moe_rl.trainer.selection import select_tokens

    batch, sums = make_batch(), []
    work = work_of(batch, [0, 1, 2, 3])
    _, _, told = select([work], Chooser([1.0]))
    work.known = {}
    every = iter(told)

    def all_reduce(values):
        sums.append(sum(values))
        return next(every).tolist()

    meter = SimpleNamespace(reports=False, all_reduce=all_reduce, of_step={})
    engine = SimpleNamespace(algorithm=Chooser([1.0]), config=SimpleNamespace(seed=SEED))
    select_tokens(engine, batch, EVERYONE, [work], meter)
    assert sums == [0] * 5
    assert unpack(work.data, work.known["selected"].numpy())[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("chosen", [np.ones(3, bool), np.ones(9)])
def test_a_selection_of_another_shape_or_kind_is_an_error(chosen):
    class Wrong(Chooser):
        def select(self, tokens):
            return Selection(chosen)

    with pytest.raises(ValueError, match=r"Wrong.select returned .* for 9 tokens; bool, one of ea"):
        select([work_of(make_batch(), [0, 1, 2, 3])], Wrong())


def test_a_loss_sees_what_is_selected_in_its_mask_alone():
    from lora_moe_rl.trainer.objective import tokens_of

    work = work_of(make_batch(), [2])
    assert tokens_of(work, work.known["old"]).selected is None
    work.known["selected"] = torch.ones(len(work.mask))
    selected = tokens_of(work, work.known["old"]).selected
    assert selected is not None and selected.tolist() == work.mask.astype(float).tolist()
