"""The policy as its own teacher: what it reads is what TRL's SDPO would have it read, and its
logprobs stand at the tokens they are of."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import Details
from lora_moe_rl.data.told import ToldPrompt
from lora_moe_rl.data.top import Top
from lora_moe_rl.errors import ConfigError, EngineDied, NotServed
from lora_moe_rl.rewards.self_teacher import Reader, SelfTeacher
from lora_moe_rl.tiny.tokenizer import make_tokenizer

ORACLE = json.loads((Path(__file__).parent / "sdpo_oracle.json").read_text())
# TRL's variants in our settings.
OPTIONS = {
    "as it is": {},
    "lower": {"success_reward": 0.5},
    "feedback": {"feedback_key": "hint"},
    "feedback alone": {"feedback_key": "hint", "success_reward": None},
    "without thinking": {"remove_thinking": True},
    "own templates": {
        "reprompt_template": "{solution}{prompt}|{feedback}",
        "solution_template": "<{successful_previous_attempt}>",
        "feedback_template": "[{feedback_raw}]",
        "feedback_key": "hint",
    },
}
# Of few tokens, which the tiny tokenizer knows one by one.
PLAIN = {"reprompt_template": "{solution}{prompt}{feedback}"}
SOLUTION = {"solution_template": "{successful_previous_attempt};"}
FEEDBACK = {"feedback_template": "{feedback_raw}", "feedback_key": "hint"}
PROMPT, LONGEST = "1+2=", 64


def config_of(**options) -> RunConfig:
    return RunConfig(algorithm={"name": "sdpo", **options})


def reader_of(longest: int = LONGEST, **options) -> Reader:
    config = config_of(**options)
    return Reader(config.algorithm, config.data.sources(), make_tokenizer(), longest)


def a_group(rewards, texts=("3", "4", "5"), columns=None, **more) -> Group:
    """Samples of a prompt: each its text and an end, sampled at logprobs of -1, -2 and so on."""
    tokenizer = make_tokenizer()
    prompt = Prompt(3, PROMPT, tokenizer.encode(PROMPT), columns or {})
    samples = []
    for text in texts:
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        said = Segment.sampled(ids, -np.arange(1, len(ids) + 1), 7)
        segments = (Segment.given("user", prompt.token_ids), said)
        samples.append(Sample(segments, "stop", text))
    return Group(prompt, samples, None, np.array(rewards, np.float32), **more)


@pytest.mark.parametrize("variant", ORACLE["readings"])
def test_the_teacher_reads_what_trls_would(variant):
    """In the templates that stand until they are set too. A sample of TRL's that is not taught
    holds nothing here."""
    reader = reader_of(**OPTIONS[variant])
    wanted = iter(ORACLE["readings"][variant])
    given = ("prompts", "responses", "rewards", "feedbacks")
    for text, responses, rewards, hint in zip(*(ORACLE[name] for name in given), strict=True):
        group = a_group(rewards, responses, {"hint": hint})
        group.prompt = Prompt(0, text, [1], {"hint": hint})
        for index in range(len(responses)):
            asked, word = reader.asked(group, index)
            assert (asked if word else None) == next(wanted)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("<think>\nhm\n</think>\n\n81", "81"),
        ("hm, or not\n</think>\n\n81", "81"),  # its beginning is in the prompt
        ("so <think>a</think> 8 <think>b</think>1", "so  8 1"),
        ("<think> and no end", "<think> and no end"),
    ],
)
def test_thinking_is_left_out_of_a_solution_wherever_it_begins(said, shown):
    reader = reader_of(remove_thinking=True, **PLAIN, **SOLUTION)
    asked, word = reader.asked(a_group([0, 1], texts=("3", said)), 0)
    assert word == "solution 1" and asked == f"{shown};{PROMPT}"


def made_up(token_ids, version) -> np.ndarray:
    """A logprob of every token but the first, which tells its place, its id and the version."""
    places = np.arange(len(token_ids), dtype=np.float64)
    found = -0.5 - 0.25 * places - 0.001 * np.asarray(token_ids) - 10.0 * (version or 0)
    return np.where(places == 0, np.nan, found).astype(np.float32)


class Engines:
    """Scores as `made_up`; `fault`: what is raised once, or an array that is answered instead."""

    def __init__(self, fault=None):
        self.asked, self.fault = [], fault

    async def score_prompt(self, token_ids, version, top, watch):
        with watch(5):
            pass
        self.asked.append((list(token_ids), version))
        fault, self.fault = self.fault, None
        if isinstance(fault, Exception):
            raise fault
        found = made_up(token_ids, version) if fault is None else fault
        if not top:
            return ToldPrompt(found, None)
        # The ids tell the place and the version; nothing is known of the first token.
        ids = np.arange(len(token_ids))[:, None] * 10 + np.arange(top) + 1000 * (version or 0)
        logprobs = np.tile(-np.arange(1.0, top + 1), (len(token_ids), 1))
        logprobs[0] = np.nan
        return ToldPrompt(found, Top(ids.astype(np.int32), logprobs.astype(np.float32)))


def unwatched(number):
    return nullcontext


def teacher_of(
    engines=None, alone=False, newest=7, longest=LONGEST, watched=None, top_k=0, **options
):
    reader = reader_of(longest, **PLAIN | (options or SOLUTION))
    said = alone, 2, watched or unwatched, top_k
    return SelfTeacher(reader, engines or Engines(), lambda: newest, *said)


def scored(group, engines=None, **options):
    engines = engines or Engines()
    asyncio.run(teacher_of(engines, **options).score(group))
    return group, engines


def test_logprobs_are_those_of_the_samples_own_tokens_behind_the_other_prompt():
    group, engines = scored(a_group([0, 1, 1]))
    assert group.teacher_read == ["solution 1", "solution 2", "solution 1"]
    tokenizer = make_tokenizer()
    for sample, found, shown in zip(group.samples, group.teacher, "454", strict=True):
        other = tokenizer.encode(f"{shown};{PROMPT}")
        every = [*other, *sample.response_ids.tolist()]
        assert (every, 7) in engines.asked
        np.testing.assert_array_equal(found, made_up(every, 7)[len(other) :])
    assert group.rewards.tolist() == [0, 1, 1] and group.failures == []


def test_a_sample_with_nothing_to_read_keeps_its_own_logprobs():
    """The only success has no other to read, and one without a reward is not asked about."""
    group, engines = scored(a_group([0, 1, np.nan]))
    assert group.teacher_read == ["solution 1", "", ""] and len(engines.asked) == 1
    for sample, found in list(zip(group.samples, group.teacher, strict=True))[1:]:
        np.testing.assert_array_equal(found, sample.logprobs)


def test_the_likeliest_tokens_are_those_in_the_places_of_the_samples_own():
    """Of a sample with nothing to read they are nothing's, and it is not learned from."""
    group, _ = scored(a_group([0, 1, np.nan]), top_k=2)
    behind = len(make_tokenizer().encode(f"4;{PROMPT}"))
    first, other = group.likeliest[:2]
    wanted = [[7000 + 10 * (behind + i), 7001 + 10 * (behind + i)] for i in range(2)]
    assert first.token_ids.tolist() == wanted and first.logprobs.tolist() == [[-1, -2]] * 2
    assert other.token_ids.tolist() == [[0, 1]] * 2 and np.isfinite(other.logprobs).all()
    algorithm = algorithms.make(config_of(loss="distill", teacher_top_k=2))
    (signal,) = algorithm.signals([group])
    assert [one.any() for one in signal.weights] == [True, False, False]
    # By what was sampled it stands in the mean all the same, with an advantage of 0.
    assert algorithms.make(config_of()).signals([group])[0].weights[1].all()
    group, _ = scored(a_group([0, 1, 0]))
    assert group.likeliest is None


def test_what_has_no_room_is_said_and_not_asked_for():
    """Other prompt and sample are 6 and 2 tokens, and an engine samples one more."""
    fits, _ = scored(a_group([0, 1, 1]), longest=9, **SOLUTION)
    assert fits.teacher_read[0] == "solution 1"
    group, engines = scored(a_group([0, 1, 1]), longest=8, **SOLUTION)
    assert group.teacher_read == ["too long"] * 3 and engines.asked == []
    np.testing.assert_array_equal(group.teacher[0], group.samples[0].logprobs)


def test_tokens_of_tools_have_no_logprob():
    group = a_group([1, 0, 0])
    prompt, said = group.samples[1].segments
    turns = (said, Segment.given("tool", [4, 4]), said)
    group.samples[1] = Sample((prompt, *turns), "stop", "4")
    group, _ = scored(group)
    assert (group.teacher[1] != 0).tolist() == [True, True, False, False, True, True]


def test_feedback_is_what_the_reward_has_logged_of_the_sample_or_the_rows():
    options = FEEDBACK | {"success_reward": None}
    logged = Details(extra={"hint": ["7", None, 8]})
    group, engines = scored(a_group([0, 0, 0], columns={"hint": "6"}, details=logged), **options)
    assert group.teacher_read == ["feedback", "", "feedback"]
    read = [make_tokenizer().decode(ids[:-2]) for ids, _ in engines.asked]
    assert read == [f"{PROMPT}7", f"{PROMPT}8"]
    group, engines = scored(a_group([0, 0, 0], columns={"hint": "6"}), **options)
    assert group.teacher_read == ["feedback"] * 3 and len(engines.asked) == 3


def test_feedback_that_nobody_gives_ends_the_run_after_so_many_prompts():
    teacher = teacher_of(**FEEDBACK)
    asyncio.run(teacher.score(a_group([0, 1, 1])))
    asyncio.run(teacher.score(a_group([np.nan] * 3)))  # whose reward failed: nothing is known
    with pytest.raises(ConfigError, match="feedback_key=hint: of 2 prompts none has a column"):
        asyncio.run(teacher.score(a_group([0, 1, 1])))
    known = teacher_of(**FEEDBACK)
    asyncio.run(known.score(a_group([0, 1, 1], columns={"hint": None})))
    for _ in range(3):  # a reward function logs it where there is any
        asyncio.run(known.score(a_group([0, 1, 1])))


def test_each_request_is_seen_on_the_engine_that_has_it():
    seen = []

    def watched(number):
        return lambda index: nullcontext(seen.append((number, index)))

    scored(a_group([0, 1, np.nan]), watched=watched)
    assert seen == [(3, 5)]


def test_alone_it_gives_rewards():
    options = FEEDBACK | {"success_reward": None}
    group, _ = scored(a_group([np.nan] * 3, columns={"hint": "6"}), alone=True, **options)
    first, given = group.samples[0], group.teacher[0]
    assert group.rewards[0] == pytest.approx(np.mean(given - first.logprobs)) and not group.failures


def test_the_bare_base_scores_where_that_is_asked():
    _, engines = scored(a_group([0, 1, 1]), teacher_weights="base", **SOLUTION)
    assert {version for _, version in engines.asked} == {None}


def test_a_newer_version_says_what_the_other_prompt_makes_and_not_what_was_trained_since():
    """Version 7 has sampled, and its slot was taken: 9 scores behind both prompts."""
    group, engines = scored(
        a_group([0, 1], texts=("3", "4")), Engines(NotServed("gone")), newest=9, **SOLUTION
    )
    sample, encode = group.samples[0], make_tokenizer().encode
    other, own = ([*encode(text), *sample.response_ids] for text in (f"4;{PROMPT}", PROMPT))
    assert engines.asked == [(other, 7), (other, 9), (own, 9)]
    made = made_up(other, 9)[-2:] - made_up(own, 9)[-2:]
    np.testing.assert_allclose(group.teacher[0], sample.logprobs + made, rtol=1e-6)
    with pytest.raises(NotServed, match="gone"):
        scored(a_group([0, 1], texts=("3", "4")), Engines(NotServed("gone")))


def test_a_sample_of_two_versions_is_scored_by_the_newer_behind_both_prompts():
    """Behind the other prompt each token stands two places later."""
    group = a_group([0, 1], texts=("3", "4"))
    prompt, said = group.samples[0].segments
    longer = Segment.sampled(said.token_ids, said.logprobs, 8)
    group.samples[0] = Sample((prompt, said, longer), "stop", "3")
    group, engines = scored(group)
    assert [version for _, version in engines.asked] == [8, 8]
    np.testing.assert_allclose(group.teacher[0], group.samples[0].logprobs - 0.5, rtol=1e-5)


def test_a_dying_engine_is_the_tickets_business_and_no_failed_reward():
    with pytest.raises(EngineDied):
        scored(a_group([0, 1, 1]), Engines(EngineDied("gone")))


@pytest.mark.parametrize("answer", [np.zeros(3, np.float32), np.full(8, np.nan, np.float32)])
def test_an_answer_of_something_else_fails_the_sample(answer):
    group, _ = scored(a_group([0, 1], texts=("3", "4")), Engines(answer))
    assert np.isnan(group.rewards[0]) and group.rewards[1] == 1
    assert "not all of them finite, of the 2 tokens" in group.failures[0]


def test_an_environment_that_writes_other_prompts_is_no_silent_fault():
    group = a_group([0, 1, 1])
    prompt, said = group.samples[1].segments
    other = Segment.given("user", [*prompt.token_ids, 4])
    group.samples[1] = Sample((other, said), "stop", "4")
    with pytest.raises(ConfigError, match="prompt 3: its environment begins a sample with other"):
        scored(group)


def test_a_prompt_that_ends_with_another_speaker_fails_its_samples():
    group = a_group([0, 1, 1])
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "1"}]
    group.prompt = Prompt(3, messages, group.prompt.token_ids)
    group, _ = scored(group)
    assert np.isnan(group.rewards).all() and "ends with what 'assistant' says" in group.failures[0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["success_reward=null"], "leave the teacher nothing to read"),
        (["group_size=1"], "leaves none to show"),
        (["feedback_template={feedback_raw}!"], "no effect with algorithm.feedback_key=null"),
        (["success_reward=null", "feedback_key=a", "remove_thinking=true"], "success_reward=null"),
        (
            ["reprompt_template={prompt}"],
            "reprompt_template=.* must hold {prompt} and {solution} and {feedback}",
        ),
        (["reprompt_template={prompt}{solution}{feedback}{more}"], "no other place"),
        (["solution_template={successful_previous_attempt.__class__}"], "no other place"),
        (["solution_template={"], "is no template"),
        (["teacher_url=http://x/v1"], "teacher_url"),
    ],
)
def test_settings_that_have_no_meaning_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        override(RunConfig(), ["algorithm=sdpo", *(f"algorithm.{one}" for one in settings)])
