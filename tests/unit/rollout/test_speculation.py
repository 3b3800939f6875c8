"""Which guesses are refused, against vLLM's own names; outputs taken apart; metrics by hand."""

from __future__ import annotations

import pickle
from typing import get_args

import numpy as np
import pytest
import torch
from vllm.config.speculative import RejectionSampleMethod, SpeculativeMethod
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.data.samples import Sample, Segment
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.planner.facts import find
from lora_moe_rl.rollout import cpu_drafts, speculation
from lora_moe_rl.rollout.gathered_outputs import joined
from lora_moe_rl.rollout.one_by_one import apart
from lora_moe_rl.run.sample_metrics import draft_metrics

pytestmark = pytest.mark.seconds  # imports vLLM


def check(given: str, *settings: str, model: str = "qwen3-30b-a3b", cpu: bool = False) -> None:
    config = override(RunConfig(), [f"{speculation.SETTING}={given}", *settings])
    speculation.check_speculation(config, find(model).shape, cpu)


def test_names_are_vllms():
    def all_of(kind) -> set[str]:
        return {one for each in get_args(kind) for one in (get_args(each) or [each])}

    assert set(speculation.WITHOUT_ROUTES) | {"mtp", "eagle3", "draft_model"} <= all_of(
        SpeculativeMethod
    )
    assert "synthetic" in get_args(RejectionSampleMethod)


@pytest.mark.parametrize(
    "given, said",
    [
        ("3", "is no dictionary of vLLM's that names a method"),
        ('{"num_speculative_tokens": 3}', "is no dictionary of vLLM's that names a method"),
        ('{"method": "ngram"}', "does not have the method ngram; use mtp"),
        ('{"method": "mtp", "rejection_sample_method": "synthetic"}', "no longer the policy's"),
    ],
)
def test_guesses_that_would_not_be_the_policys_are_refused(given, said):
    with pytest.raises(ConfigError, match=r"rollout\.engine_args\.speculative_config=") as found:
        check(given)
    assert said in str(found.value)


@pytest.mark.parametrize(
    "other",
    [["model.held_once=on"], ["placement.gives_back=weights", "placement.mode=colocated"]],
    ids=str,
)
def test_a_model_that_guesses_goes_with_no_other_place_of_weights(other):
    with pytest.raises(ConfigError, match=f"which {other[0]} does not know"):
        check('{"method": "mtp", "num_speculative_tokens": 1}', *other)
    check('{"method": "ngram", "num_speculative_tokens": 1}', *other, cpu=True)


def test_states_of_linear_attention_cannot_go_back_on_the_cpu():
    with pytest.raises(ConfigError, match="cannot go back"):
        check('{"method": "ngram"}', model="qwen3-next-80b-a3b", cpu=True)
    check('{"method": "mtp"}', model="qwen3-next-80b-a3b")


def test_what_is_taken_is_told_where_guesses_are_made():
    assert speculation.engine_args(RunConfig()) == {}
    config = override(RunConfig(), [f'{speculation.SETTING}={{"method": "mtp"}}'])
    assert speculation.engine_args(config) == {"per_request_spec_decode_metrics": "summary"}


def output(tokens: list[int], rows: int) -> EngineCoreOutput:
    """Of a request whose forward fed `rows` tokens, the last of which are its own."""
    of_each = np.arange(len(tokens))
    logprobs = LogprobsLists(np.array(tokens)[:, None], -0.5 * of_each[:, None], of_each, None)
    routes = np.arange(rows * 4).reshape(rows, 2, 2)
    return EngineCoreOutput("a", tokens, new_logprobs=logprobs, routed_experts=routes)


@pytest.mark.parametrize("rows", [3, 11])
def test_an_output_taken_apart_is_the_same_together(rows):
    whole = output([5, 6, 7], rows)
    whole.finish_reason, whole.stop_reason = FinishReason.STOP, 7
    parts = apart(output([5, 6, 7], rows))
    assert [one.new_token_ids for one in parts] == [[5], [6], [7]]
    assert [len(one.routed_experts) for one in parts] == [rows - 2, 1, 1]
    assert [float(one.new_logprobs.logprobs[0, 0]) for one in parts] == [0.0, -0.5, -1.0]
    again = joined(parts)
    assert again.new_token_ids == whole.new_token_ids
    np.testing.assert_array_equal(again.routed_experts, whole.routed_experts)
    for ours, theirs in zip(again.new_logprobs[:3], whole.new_logprobs[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_how_a_request_ends_is_said_with_its_last_token():
    whole = output([5, 6], 2)
    whole.finish_reason = FinishReason.LENGTH
    first, last = apart(whole)
    assert first.finish_reason is None and last.finish_reason == FinishReason.LENGTH
    alone = output([5], 1)
    assert apart(alone) == [alone]


def test_each_guess_has_its_requests_temperature():
    """Three requests with two, no and one guess."""
    found = torch.full((3,), torch.nan)
    cpu_drafts.expand(found, torch.tensor([0.5, 0.7, 0.0]), torch.tensor([2, 2, 3]), 0, 1)
    assert found.tolist() == [0.5, 0.5, 1.0]


def test_metrics_of_guesses_by_hand():
    def of(tokens: int, drafts: tuple[int, int] | None) -> Sample:
        segment = Segment.sampled([1] * tokens, np.zeros(tokens, np.float32), 0, drafts)
        return Sample((Segment.given("user", [1]), segment), "stop", "")

    assert draft_metrics([of(3, None)]) == {}
    found = draft_metrics([of(10, (12, 4)), of(6, (6, 2)), of(99, None)])
    assert found == {"rollout/draft_acceptance": 6 / 18, "rollout/tokens_per_forward": 16 / 10}
    assert np.isnan(draft_metrics([of(1, (0, 0))])["rollout/draft_acceptance"])


def test_guesses_stay_with_their_segment_on_the_way():
    segment = Segment.sampled([1, 2], np.zeros(2, np.float32), 3, (5, 1))
    assert pickle.loads(pickle.dumps(segment)).drafts == (5, 1)
