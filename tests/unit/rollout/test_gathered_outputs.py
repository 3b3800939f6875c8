"""Outputs that are handed on together: vLLM's own front makes the same answers of them."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from lora_moe_rl.rollout import gathered_outputs
from lora_moe_rl.rollout.gathered_outputs import Gathered, joined, may_wait

NEVER = 1e9  # seconds
LENGTHS = {"a": 5, "b": 1, "c": 3}  # tokens of each request
LAYERS, TOP_K, PROMPT = 2, 2, [7, 8, 9]


def a_request(kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY) -> SimpleNamespace:
    """As a scheduler has it."""
    return SimpleNamespace(sampling_params=SamplingParams(output_kind=kind))


ENDED_LATER = {name: a_request() for name in LENGTHS}


def a_step(number: int) -> list[EngineCoreOutput]:
    """What vLLM's scheduler says of step `number` from 0 on: a token of each request that goes on,
    with the rows of what was fed for it."""
    outputs = []
    for name, length in LENGTHS.items():
        if number >= length:
            continue
        draw = np.random.default_rng((ord(name), number))
        fed = len(PROMPT) if number == 0 else 1
        outputs.append(
            EngineCoreOutput(
                request_id=name,
                new_token_ids=[int(draw.integers(100))],
                new_logprobs=LogprobsLists(
                    draw.integers(0, 100, (1, 1)),
                    draw.normal(size=(1, 1)).astype(np.float32),
                    draw.integers(1, 9, 1),
                ),
                routed_experts=draw.integers(0, 8, (fed, LAYERS, TOP_K), dtype=np.uint8),
                prefill_stats=PrefillStats(num_cached_tokens=2) if number == 0 else None,
                finish_reason=FinishReason.LENGTH if number == length - 1 else None,
            )
        )
    return outputs


def answers(steps: list[list[EngineCoreOutput]]) -> dict[str, object]:
    """What vLLM's front makes of these outputs."""
    front, found = OutputProcessor(None, log_stats=False), {}
    params = SamplingParams(
        max_tokens=5,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for name in LENGTHS:
        request = EngineCoreRequest(
            request_id=name, prompt_token_ids=PROMPT, mm_features=None, sampling_params=params,
            pooling_params=None, arrival_time=0, lora_request=None, cache_salt=None,
            data_parallel_rank=None, external_req_id=name,
        )  # fmt: skip
        found[name] = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, name)
        front.add_request(request, None, queue=found[name])
    for outputs in steps:
        front.process_outputs(outputs)
    return {name: queue.get_nowait() for name, queue in found.items()}


def all_steps() -> list[list[EngineCoreOutput]]:
    return [a_step(number) for number in range(max(LENGTHS.values()))]


def test_the_front_makes_the_same_answers_of_what_is_gathered():
    gathered = Gathered(NEVER)
    steps = [gathered.of_step(step, ENDED_LATER) for step in all_steps()]
    assert [len(step) for step in steps] == [1, 0, 1, 0, 1]  # each request once, when it ends
    stock, ours = answers(all_steps()), answers(steps)
    for name, length in LENGTHS.items():
        (one,), (other,) = stock[name].outputs, ours[name].outputs
        assert len(one.token_ids) == length and one.finish_reason == "length"
        assert other.token_ids == one.token_ids and other.finish_reason == one.finish_reason
        assert other.logprobs == one.logprobs
        assert other.cumulative_logprob == one.cumulative_logprob
        assert len(one.routed_experts) == len(PROMPT) + length - 1
        np.testing.assert_array_equal(other.routed_experts, one.routed_experts)
        assert ours[name].num_cached_tokens == stock[name].num_cached_tokens == 2


def test_what_others_of_a_step_are_told_of_each_token_is_left_out():
    """vLLM fills the rows of all to as many of the likeliest tokens as one of them wants."""
    draw = np.random.default_rng(0)
    widths = [4, 1, 2]  # the sampled token, and others
    parts = [
        LogprobsLists(
            draw.integers(0, 100, (1, width)),
            draw.normal(size=(1, width)).astype(np.float32),
            draw.integers(1, 9, 1),
        )
        for width in widths
    ]
    one = joined([EngineCoreOutput("a", [1], new_logprobs=part) for part in parts])
    for found, given in zip(one.new_logprobs[:2], zip(*(part[:2] for part in parts)), strict=True):
        assert found.tolist() == [part[0, :1].tolist() for part in given]
    assert one.new_logprobs.sampled_token_ranks.tolist() == [part[2][0] for part in parts]


def test_all_are_handed_on_again_after_some_time(monkeypatch):
    """So that an engine that works is seen to (`RolloutEngine.pulse`)."""
    now = [100.0]
    monkeypatch.setattr(gathered_outputs.time, "monotonic", lambda: now[0])
    gathered, sizes = Gathered(1.0), []
    for step in all_steps():
        ready = gathered.of_step(step, ENDED_LATER)
        sizes.append({one.request_id: len(one.new_token_ids) for one in ready})
        now[0] += 0.4
    assert sizes == [{"b": 1}, {}, {"c": 3}, {"a": 4}, {"a": 1}]


def test_logprobs_and_routes_may_be_missing():
    parts = [EngineCoreOutput("a", [token]) for token in (1, 2)]
    one = joined(parts)
    assert one.new_token_ids == [1, 2]
    assert one.new_logprobs is None and one.routed_experts is None and one.events is None


@pytest.mark.parametrize("field", sorted(gathered_outputs.OTHERS))
def test_an_output_that_says_more_than_tokens_does_not_wait(field):
    output = EngineCoreOutput("a", [1])
    assert may_wait(output, ENDED_LATER)
    setattr(output, field, "something")
    assert not may_wait(output, ENDED_LATER)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_request_that_streams_gets_each_token_at_once(kind):
    assert not may_wait(EngineCoreOutput("a", [1]), {"a": a_request(kind)})


def test_a_request_with_stop_strings_gets_each_token_at_once():
    request = a_request()
    assert may_wait(EngineCoreOutput("a", [1]), {"a": request})
    request.sampling_params.stop = ["end"]
    assert not may_wait(EngineCoreOutput("a", [1]), {"a": request})


def test_every_field_of_an_output_is_thought_of():
    named = {*gathered_outputs.JOINED, *gathered_outputs.OF_LAST, *gathered_outputs.OTHERS}
    assert named == set(EngineCoreOutput.__struct_fields__)
    defaults = EngineCoreOutput("a", [])
    assert all(getattr(defaults, name) is None for name in gathered_outputs.OTHERS)


def scheduler(monkeypatch, steps: list[tuple[list[EngineCoreOutput], set[str]]]):
    """A scheduler whose steps give these outputs and leave it these requests."""
    left = iter(deepcopy(steps))

    def update(self, scheduled, ran):
        outputs, names = next(left)
        self.requests = {name: a_request() for name in names}
        said = SimpleNamespace(outputs=outputs, scheduler_stats=None, finished_requests=None)
        return {0: said} if outputs else {}

    monkeypatch.setattr(gathered_outputs, "stock_update", update)
    return SimpleNamespace(requests={}, gathered=Gathered(NEVER))


def test_nothing_is_lost_when_the_last_requests_end_in_one_step(monkeypatch):
    one, last = EngineCoreOutput("a", [1]), EngineCoreOutput("a", [2])
    last.finish_reason = FinishReason.STOP
    ours = scheduler(monkeypatch, [([one], {"a"}), ([last], set())])
    assert gathered_outputs._update(ours, None, None) == {}  # no message without an output
    found = gathered_outputs._update(ours, None, None)
    assert found[0].outputs[0].new_token_ids == [1, 2]
    assert not ours.gathered.kept


def test_requests_that_are_ended_from_outside_are_let_go(monkeypatch):
    outputs = [EngineCoreOutput(name, [1]) for name in ("a", "b")]
    more = [EngineCoreOutput("b", [2])]
    ours = scheduler(monkeypatch, [(outputs, {"a", "b"}), (more, {"b"})])
    gathered_outputs._update(ours, None, None)
    gathered_outputs._update(ours, None, None)
    assert [len(kept) for kept in ours.gathered.kept.values()] == [2]  # b's two outputs


def test_a_scheduler_that_is_not_told_to_gathers_nothing(monkeypatch):
    ours = scheduler(monkeypatch, [([EngineCoreOutput("a", [1])], {"a"})])
    del ours.gathered
    assert gathered_outputs._update(ours, None, None)[0].outputs[0].new_token_ids == [1]
