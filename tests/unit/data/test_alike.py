"""Samples that begin alike: which they are, how they are packed, and where they go."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.data.alike import alike
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.micro_batches import plan_for, plan_micro_batches
from lora_moe_rl.data.packing import pack, stream_of, unpack
from lora_moe_rl.data.samples import Sample, Segment


def sample(prompt, answer, routes=b"", splits=()) -> Sample:
    segments = Segment.given("user", prompt), Segment.sampled(answer, np.zeros(len(answer)), 0)
    return Sample(segments, "stop", "", splits=splits, prompt_routes=routes)


def test_samples_of_a_group_are_alike_on_equal_tokens_and_equal_routes():
    one = sample([1, 2], [3])
    assert alike([[one, sample([1, 2], [4, 5]), sample([1, 3], [4])]]).tolist() == [0, 0, 2]
    assert alike([[one], [one]]).tolist() == [0, 1]  # of another group
    routed = [sample([1, 2], [3], routes) for routes in (b"a", b"b", b"a", b"b")]
    assert alike([[one], routed]).tolist() == [0, 1, 2, 1, 2]
    cut = [sample([1, 2], [3, 4], splits=(3,)), one, sample([1, 2], []), one]
    assert alike([cut]).tolist() == [0, 1, 2, 1]
    assert alike([]).tolist() == []


def batch_of(answers, prompts, together) -> TrainBatch:
    """`answers[i]` tokens after a prompt of `prompts[g]`, of the group g = `together[i]`."""
    ids = [
        [*range(100 * g, 100 * g + prompts[g]), *range(1000 * i, 1000 * i + n)]
        for i, (n, g) in enumerate(zip(answers, together, strict=True), 1)
    ]
    batch = TrainBatch.from_sequences(ids, [prompts[g] for g in together])
    firsts: dict[int, int] = {}
    batch.alike = np.array([firsts.setdefault(g, i) for i, g in enumerate(together)])
    return batch


def test_a_prompt_is_fed_by_the_first_sample_of_the_micro_batch():
    """By hand: prompts 0 1 2 and 100; the third sample is of another group."""
    batch = batch_of([2, 1, 3, 2], [3, 1], [0, 0, 1, 0])
    packed = pack(batch, [1, 2, 3], multiple=4)
    #                  prompt   response of 1, then 2, then 3; one of padding
    assert packed.input_ids.tolist() == [0, 1, 2, 100, 3000, 3001, 0, 1, 2, 4000, 0]
    assert packed.labels.tolist() == [1, 2, 2000, 3000, 3001, 3002, 1, 2, 4000, 4001, 0]
    assert packed.fed.tolist() == [0, 1, 2, 3, 4, 5, 9, 10] and packed.shares
    assert packed.fed_at.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0]
    assert batch.fed_together([1, 2, 3]) == 7
    # The same tokens by themselves, as without a group.
    alone = pack(batch, [3], multiple=1)
    assert alone.fed.tolist() == alone.fed_at.tolist() == [0, 1, 2, 3] and not alone.shares
    values = [np.arange(n, dtype=np.float32) + 10 * i for i, n in enumerate([2, 1, 3, 2])]
    stream = stream_of(packed, values)
    found = unpack(packed, stream)
    assert all(found[i].tolist() == values[i].tolist() for i in (1, 2, 3))


groups = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 12), min_size=1, max_size=6)),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(made=groups, most=st.integers(10, 90), dp=st.integers(1, 3), vpp=st.integers(1, 2))
def test_every_sample_goes_somewhere_once_and_micro_batches_hold_what_is_fed(made, most, dp, vpp):
    answers = [n for _, of_group in made for n in of_group]
    together = [g for g, (_, of_group) in enumerate(made) for _ in of_group]
    batch = batch_of(answers, [prompt for prompt, _ in made], together)
    pp = 2 if vpp > 1 else 1
    layout = {"pp": pp, "vpp": vpp, "world_size": pp * dp, "micro_batch_tokens": most}
    trainer, everyone = TrainerConfig(**layout), np.arange(len(batch))
    plan = plan_for(trainer, everyone, batch, dp)
    assert {len(rank) % pp for rank in plan} == {0} and len({len(rank) for rank in plan}) == 1
    chunks = [chunk for rank in plan for chunk in rank]
    assert sorted(i for chunk in chunks for i in chunk) == everyone.tolist()
    for chunk in chunks:
        packed = pack(batch, chunk, 1)
        assert packed.counted[packed.fed].sum() == batch.fed_together(chunk)
        assert len(chunk) <= 1 or batch.fed_together(chunk) <= most
        np.testing.assert_array_equal(packed.input_ids[packed.fed[packed.fed_at]], packed.input_ids)
    plain = plan_micro_batches(everyone, batch.lengths(), most, dp, pp)
    busiest = [
        sum(max(sizes) for sizes in zip(*([fed(chunk) for chunk in rank] for rank in one)))
        for one, fed in (
            (plan, batch.fed_together),
            (plain, lambda chunk: int(batch.lengths()[chunk].sum())),
        )
    ]
    assert busiest[0] <= busiest[1] * 1.05 + max(batch.lengths())


def test_a_group_is_spread_over_ranks_that_would_have_nothing():
    batch = batch_of([9] * 8, [5], [0] * 8)
    trainer = TrainerConfig(world_size=4, micro_batch_tokens=1000)
    plan = plan_for(trainer, np.arange(8), batch, 4)
    assert [[len(chunk) for chunk in rank] for rank in plan] == [[2]] * 4
    whole = plan_for(TrainerConfig(micro_batch_tokens=1000), np.arange(8), batch, 1)
    assert whole == [[list(range(8))]]
