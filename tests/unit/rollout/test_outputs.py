"""What vLLM is asked for, and what is made of its answers: its own classes, without a model."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.errors import ReplayError, RolloutError
from lora_moe_rl.ports import Manner
from lora_moe_rl.rollout import outputs, stop_strings
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.rollout.in_flight import Piece, Question
from lora_moe_rl.router_replay.table import RouteTable, token_sum

pytestmark = pytest.mark.seconds  # imports vLLM

SHAPE = SimpleNamespace(moe_layers=(1, 2), num_experts=8, top_k=2)


def test_samples_are_drawn_as_the_config_says():
    config = RunConfig(
        rollout={"temperature": 0.7, "max_response_tokens": 17, "stop_token_ids": (5, 9)}
    )
    params = outputs.sampling_params(config, stop_ids={2, 5})
    assert (params.temperature, params.max_tokens, params.logprobs) == (0.7, 17, 0)
    assert params.stop_token_ids == [2, 5, 9]
    # Whatever would make the sampled distribution another than the trainer's.
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty) == (1.0, 0.0)
    assert not params.ignore_eos
    group = outputs.params_of(params, Question([1], 4, 123, 17, version=0, recorded=0))
    assert (group.n, group.seed, group.temperature) == (4, 123, 0.7)
    assert (params.n, params.seed) == (1, None)
    held_out = Question([1], 1, 123, 17, version=0, manner=Manner(0.0))
    greedy = outputs.params_of(params, held_out)
    assert greedy.sampling_type.name == "GREEDY" and greedy.temperature == 0.0
    warm = outputs.params_of(params, replace(held_out, manner=Manner(1.3, 0.9, 20)))
    assert (warm.temperature, warm.sampling_type.name) == (1.3, "RANDOM_SEED")
    assert (warm.top_p, warm.top_k, params.top_p, params.top_k) == (0.9, 20, 1.0, 0)
    assert params.temperature == 0.7


def test_texts_that_end_a_sample_are_looked_for_in_all_that_is_written():
    plain = outputs.sampling_params(RunConfig(), stop_ids={2})
    assert (plain.detokenize, plain.stop) == (False, [])
    stops = outputs.sampling_params(RunConfig(rollout={"stop": ("</a>", "<|x|>")}), stop_ids={2})
    assert (stops.detokenize, stops.stop) == (True, ["</a>", "<|x|>"])
    assert not stops.skip_special_tokens and stops.stop_token_ids == [2]


def test_texts_of_one_request_end_it_besides_those_of_the_run():
    plain = outputs.sampling_params(RunConfig(), stop_ids={2})
    run = outputs.sampling_params(RunConfig(rollout={"stop": ("a", "b")}), stop_ids={2})
    question = Question([1], 1, 5, 3, version=0, manner=Manner(stop=("b", "c")))
    for params, stop in ((plain, ["b", "c"]), (run, ["a", "b", "c"])):
        own = outputs.params_of(params, question)
        assert (own.detokenize, own.skip_special_tokens, own.stop) == (True, False, stop)
    assert (plain.detokenize, plain.stop, run.stop) == (False, [], ["a", "b"])
    without = outputs.params_of(plain, replace(question, manner=Manner()))
    assert (without.detokenize, without.stop) == (False, [])


@pytest.mark.parametrize(
    ("ids", "reason", "wrong"),
    [
        ([1, 2, 3], "2 3", False),
        ([1, 2, 3, 4], "2 3", True),  # another token was sampled after it
        ([1, 2, 3, 4], 4, False),  # a stop token
        ([1, 2, 3, 4], None, False),
    ],
)
def test_a_sample_that_went_on_after_its_text_is_an_error(ids, reason, wrong):
    output = SimpleNamespace(token_ids=ids, stop_reason=reason)
    words = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    with pytest.raises(RolloutError, match="'2 3'") if wrong else nullcontext():
        stop_strings.check_ended(output, words)


def test_an_answer_without_a_logprob_of_each_token_is_an_error():
    answer = SimpleNamespace(
        token_ids=[7, 8],
        logprobs=flat([(7, -0.5)]),
        finish_reason="stop",
        spec_decode_metrics=None,
        stop_reason=None,
        routed_experts=None,
    )
    with pytest.raises(RolloutError, match="2 tokens and the logprobs of 1"):
        outputs.samples_and_routes([[Piece([4], answer, 6, 0)]], Texts(), SHAPE)


def test_a_sample_that_went_on_after_its_text_is_no_answer():
    answer = SimpleNamespace(
        token_ids=[7, 8, 9],
        logprobs=flat([(7, -0.5)], [(8, -0.5)], [(9, -0.5)]),
        finish_reason="stop",
        spec_decode_metrics=None,
        stop_reason="7 8",
        routed_experts=routes_of(3),
    )
    with pytest.raises(RolloutError, match="by the stop string '7 8'"):
        outputs.samples_and_routes([[Piece([4], answer, 6, 0)]], Texts(), SHAPE)


def test_the_likeliest_tokens_are_told_besides_the_one_that_stands_there():
    from vllm.logprobs import FlatLogprobs

    told = FlatLogprobs()
    told.append(None)
    for ids, values in (([7, 3, 7], [-0.5, -0.25, -0.5]), ([8, 1, 2], [-2.0, -0.125, -0.25])):
        told.append_fast(ids, values, iter([2, 1, 2]), [None] * 3)
    assert outputs.likeliest(told, 0) is None
    found = outputs.prompt_scores(SimpleNamespace(prompt_logprobs=told), 2)
    assert found.logprobs.dtype == found.top.logprobs.dtype == np.float32
    np.testing.assert_array_equal(found.logprobs, [np.nan, -0.5, -2.0])
    assert found.top.token_ids.dtype == np.int32
    assert found.top.token_ids.tolist() == [[-1, -1], [3, 7], [1, 2]]
    expected = [[np.nan, np.nan], [-0.25, -0.5], [-0.125, -0.25]]
    np.testing.assert_array_equal(found.top.logprobs, expected)


def test_prompts_are_scored_without_what_the_cache_knows():
    params = outputs.scoring_params()
    assert (params.prompt_logprobs, params.skip_reading_prefix_cache) == (0, True)


def test_every_version_has_a_name_and_an_id_of_its_own():
    """vLLM's prefix cache goes by the name: one for all would serve keys of the version before."""
    engine = RolloutEngine(RunConfig(name="mine"), "model", SimpleNamespace(), 0)
    engine.receipts = dict.fromkeys(range(4))
    requests = [engine._lora_request(version) for version in range(4)]
    assert [request.lora_name for request in requests] == [
        f"mine/v00000{version}" for version in range(4)
    ]
    # refit/slots.py enters version v as v + 1: vLLM wants ids above 0.
    assert [request.lora_int_id for request in requests] == [1, 2, 3, 4]


class Texts:
    def decode(self, token_ids, skip_special_tokens):
        return " ".join(map(str, token_ids))

    def batch_decode(self, token_ids, skip_special_tokens):
        return [" ".join(map(str, ids)) for ids in token_ids]


def flat(*positions):
    """vLLM's logprobs: of each position, those of some tokens, the sampled one first."""
    from vllm.logprobs import FlatLogprobs, Logprob

    found = FlatLogprobs()
    for position in positions:
        found.append(position and {token: Logprob(value) for token, value in position})
    return found


def routes_of(rows: int, first: int = 0) -> np.ndarray:
    """vLLM's, of all layers; the dense layer 0 has a column that means nothing."""
    places = np.arange(rows)[:, None, None] + np.array([4, 0, 2])[:, None] + np.array([0, 1])
    return ((places + first) % 8).astype(np.int32)


def test_a_sample_has_the_logprobs_and_routes_of_its_own_tokens():
    positions = ([(7, -0.5), (3, -9.0)], [(8, -0.25), (7, -8.0)])
    first = SimpleNamespace(
        token_ids=[7, 8],
        logprobs=flat(*positions),
        finish_reason="stop",
        spec_decode_metrics=None,
        stop_reason=None,
        routed_experts=routes_of(4),
    )
    second = SimpleNamespace(
        token_ids=[9], logprobs=flat([(9, -1.5)]), finish_reason="length", spec_decode_metrics=None,
        stop_reason=None, routed_experts=routes_of(3, first=3),
    )  # fmt: skip
    pieces = [[Piece([1, 2, 3], output, 6, recorded=0)] for output in (first, second)]
    samples, table = outputs.samples_and_routes(pieces, Texts(), SHAPE)
    assert [sample.token_ids.tolist() for sample in samples] == [[1, 2, 3, 7, 8], [1, 2, 3, 9]]
    assert [sample.logprobs.tolist() for sample in samples] == [[-0.5, -0.25], [-1.5]]
    assert [sample.versions.tolist() for sample in samples] == [[6, 6], [6]]
    assert [(sample.text, sample.truncated) for sample in samples] == [("7 8", False), ("9", True)]
    assert table.layers == (1, 2) and table.offsets.tolist() == [0, 4, 7] and table.valid.all()
    np.testing.assert_array_equal(table.ids[:4], routes_of(4)[:, 1:])
    np.testing.assert_array_equal(table.ids[4:], routes_of(3, first=3)[:, 1:])


def test_prompts_on_equal_routes_can_be_told():
    """Whatever follows them. One without a route is like none that has it, and not as expert 0."""
    rows = [[1, 0, 5], [1, 0, 7, 7], [1, 2, 5], [1], [1]]
    table = RouteTable.build(
        [np.array(one)[:, None, None] for one in rows], [3, 4, 3, 2, 2], (1,), 8, 1
    )
    pieces = [[Piece([1, 2], SimpleNamespace(), 6, recorded=0)]] * len(rows)
    found = outputs._prompt_routes(pieces, table)
    assert found[0] == found[1] and found[3] == found[4] and len({*found}) == 3
    answer = SimpleNamespace(
        token_ids=[7],
        logprobs=flat([(7, -0.5)]),
        finish_reason="stop",
        spec_decode_metrics=None,
        stop_reason=None,
        routed_experts=routes_of(1),
    )
    (first,), _ = outputs.samples_and_routes([[Piece([4], answer, 6, 0)]], Texts(), SHAPE)
    turn = [[Piece([1, 2, 3], answer, 6, recorded=2)]]
    (later,), _ = outputs.samples_and_routes(turn, Texts(), SHAPE, recorded=2)
    assert first.prompt_routes and not later.prompt_routes


def test_scores_begin_with_the_second_token_and_have_no_row_for_the_last():
    answer = SimpleNamespace(
        prompt_token_ids=[1, 2, 3],
        prompt_logprobs=flat(None, [(2, -1.0), (9, -0.1)], [(3, -2.0), (9, -0.2)]),
        outputs=[SimpleNamespace(routed_experts=routes_of(3))],
    )
    (scores,), table = outputs.scores_and_routes([answer], SHAPE)
    assert scores.tolist() == [-1.0, -2.0] and not math.isnan(scores.sum())
    np.testing.assert_array_equal(table.ids, routes_of(2)[:, 1:])


def test_a_turn_is_asked_for_no_row_of_routes_that_an_earlier_one_has():
    params = outputs.sampling_params(RunConfig(), stop_ids={2})
    turn = outputs.params_of(params, Question([1, 2, 3], 1, 5, 3, version=6, recorded=2))
    assert (turn.routed_experts_prompt_start, turn.max_tokens, turn.seed) == (2, 3, 5)
    assert (params.routed_experts_prompt_start, params.max_tokens) == (0, 8)
    said = SimpleNamespace(
        token_ids=[7, 8],
        logprobs=flat([(7, -0.5)], [(8, -0.25)]),
        finish_reason="stop",
        spec_decode_metrics=None,
        stop_reason=None,
        routed_experts=routes_of(2, first=2),
    )
    pieces = [[Piece([1, 2, 3], said, 6, recorded=2)]]
    (sample,), table = outputs.samples_and_routes(pieces, Texts(), SHAPE, recorded=2)
    assert sample.token_ids.tolist() == [1, 2, 3, 7, 8] and table.offsets.tolist() == [0, 2]
    np.testing.assert_array_equal(table.ids, routes_of(2, first=2)[:, 1:])
    said.routed_experts = routes_of(4)
    with pytest.raises(ReplayError, match="routes of 4 tokens .* was to record 2"):
        outputs.samples_and_routes(pieces, Texts(), SHAPE, recorded=2)


def test_routes_are_bound_to_the_tokens_that_were_fed():
    """Of each piece those that it recorded; of a scored sequence all but the last."""

    def said(token_ids, rows):
        return SimpleNamespace(
            token_ids=token_ids, logprobs=flat(*([(t, -1.0)] for t in token_ids)),
            finish_reason="stop", stop_reason=None, spec_decode_metrics=None,
            routed_experts=routes_of(rows),
        )  # fmt: skip

    joined = [Piece([1, 2, 3], said([7], 3), 6, 0), Piece([1, 2, 3, 7], said([8, 9], 2), 7, 3)]
    split = [Piece([1, 2, 3], said([7], 3), 6, 0), Piece([1, 2, 3, 7], said([8, 9], 5), 7, 0)]
    samples, table = outputs.samples_and_routes([joined, split], Texts(), SHAPE)
    fed = [TrainBatch.from_samples([sample], [], []).fed(0) for sample in samples]
    assert fed[0].tolist() == [1, 2, 3, 7, 8] and fed[1].tolist() == [1, 2, 3, 1, 2, 3, 7, 8]
    assert table.token_sums.tolist() == [token_sum(one) for one in fed]
    later = [[Piece([1, 2, 3, 7, 4], said([8], 2), 6, 3)]]
    _, table = outputs.samples_and_routes(later, Texts(), SHAPE, recorded=3)
    assert table.token_sums.tolist() == [token_sum([7, 4])]
    answer = SimpleNamespace(
        prompt_token_ids=[1, 2, 3], prompt_logprobs=flat(None, [(2, -1.0)], [(3, -2.0)]),
        outputs=[SimpleNamespace(routed_experts=routes_of(3))],
    )  # fmt: skip
    _, table = outputs.scores_and_routes([answer], SHAPE)
    assert table.token_sums.tolist() == [token_sum([1, 2])]
