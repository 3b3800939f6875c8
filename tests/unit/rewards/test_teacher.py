"""A teacher over HTTP: its logprobs stand at the tokens they are of, and whatever else it does is a
failure of that sample."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.teacher import TeacherSettings
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.errors import ConfigError, RewardError
from lora_moe_rl.rewards.teacher import Teacher, compare_texts, probe_ids
from lora_moe_rl.run.records import Records
from tests.helpers.teacher_server import MODEL, made_up, teacher_server


@pytest.fixture
def server():
    with teacher_server() as found:
        yield found


def teacher_of(url, alone=True, top_k=0, **settings) -> Teacher:
    bounds = {"teacher_retries": 0, "teacher_timeout_s": 5, **settings}
    return Teacher(TeacherSettings(teacher_url=url, teacher_model=MODEL, **bounds), alone, top_k)


def a_group(rewards=(np.nan, np.nan)) -> Group:
    """Two samples, the second of two turns with a tool's answer between them."""
    prompt = Segment.given("user", [5, 6])
    first = Segment.sampled([7, 8, 9], np.array([-1, -2, -3]), 0)
    turns = [Segment.sampled([7], np.array([-0.5]), 0), Segment.given("tool", [4, 4])]
    turns.append(Segment.sampled([9], np.array([-1.5]), 0))
    samples = [Sample((prompt, first), "stop", ""), Sample((prompt, *turns), "stop", "")]
    return Group(Prompt(3, "?", [5, 6]), samples, None, np.array(rewards, np.float32))


def scored(teacher: Teacher, group: Group) -> Group:
    asyncio.run(teacher.score(group))
    return group


def test_each_token_has_its_own_logprob_and_no_other_token_has_one(server):
    group = scored(teacher_of(server.url), a_group())
    first, second = (made_up(sample.token_ids) for sample in group.samples)
    np.testing.assert_allclose(group.teacher[0], first[1:], atol=1e-6)
    np.testing.assert_allclose(group.teacher[1], second[1:] * [1, 0, 0, 1], atol=1e-6)
    body = next(one for one in server.asked if len(one["prompt"]) == 5)
    assert body["prompt"] == [5, 6, 7, 8, 9] and body["model"] == MODEL
    assert (body["max_tokens"], body["temperature"], body["prompt_logprobs"]) == (1, 1, 0)


def test_alone_it_gives_rewards_and_beside_others_it_changes_none(server):
    group = scored(teacher_of(server.url), a_group())
    # Of places 2, 3, 4: -0.25 - 0.5 place - 0.01 id = -1.32, -1.83, -2.34; less -1, -2, -3.
    assert group.rewards[0] == pytest.approx((-0.32 + 0.17 + 0.66) / 3)
    assert group.failures == []
    given = scored(teacher_of(server.url, alone=False), a_group([1.0, np.nan]))
    assert given.rewards[0] == 1 and np.isnan(given.rewards[1]) and given.failures == []


def three_of(ids):
    """In the place of each token but the first, in no order."""
    return [{1: -3.0, 5: -1.2, 2: -2.0, 3: -4.0} for _ in ids[1:]]


def test_its_likeliest_tokens_stand_at_the_places_of_a_response():
    with teacher_server(likeliest=three_of) as server:
        group = scored(teacher_of(server.url, top_k=3), a_group())
    first, second = group.likeliest
    assert first.token_ids.shape == first.logprobs.shape == (3, 3) and second.token_ids.shape == (
        4,
        3,
    )
    assert (first.token_ids.dtype, first.logprobs.dtype) == (np.int32, np.float32)
    # What the server says of the sample's own token is among them where it is likely enough: of 7,
    # at place 2, -0.25 - 0.5 place - 0.01 id = -1.32; of 8 at place 3 -1.83, of 9 at place 4 -2.34.
    np.testing.assert_array_equal(first.token_ids, [[5, 7, 2], [5, 8, 2], [5, 2, 9]])
    np.testing.assert_allclose(first.logprobs[0], [-1.2, -1.32, -2.0], atol=1e-6)
    # Tokens of tools have them too, and the logprobs of sampled ones are as without.
    np.testing.assert_array_equal(second.token_ids, [[5, 7, 2], [5, 4, 2], [5, 2, 4], [5, 2, 9]])
    np.testing.assert_array_equal(group.teacher[1] != 0, [1, 0, 0, 1])


def test_a_sample_that_could_not_be_scored_has_likeliest_tokens_that_stand_for_nothing():
    with teacher_server(likeliest=three_of) as server:
        server.failing = [5, 6, 7, 8, 9]
        group = scored(teacher_of(server.url, top_k=3), a_group())
    assert np.isnan(group.rewards[0]) and not np.isnan(group.rewards[1])
    np.testing.assert_array_equal(group.likeliest[0].token_ids, [[0, 1, 2]] * 3)
    assert np.exp(group.likeliest[0].logprobs).sum(-1) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({5: -1.2}, "at place 1 are 2 tokens, and 3 were asked for"),
        ({5: -0.1, 4: -0.2, 3: -0.3}, r"at place 1 are \[5, 4, 3\] .* which are no probabilities"),
        ({5: -0.7, -1: -0.9, 3: -2}, "which are no probabilities"),
        ({5: float("nan"), 4: -0.9, 3: -2}, "which are no probabilities"),
    ],
)
def test_what_is_no_distribution_fails_the_sample(said, reason):
    def likeliest(ids):
        return [said] * (len(ids) - 1)

    with (
        teacher_server(likeliest=likeliest, decode=str) as server,
        pytest.raises(RewardError, match=reason),
    ):
        asyncio.run(teacher_of(server.url, top_k=3).logprobs([5, 6, 7]))


def test_more_tokens_than_its_server_tells_are_refused_before_the_run():
    with teacher_server(likeliest=three_of, decode=lambda i: Vocabulary().decode([i])) as server:
        assert "tells its 3 likeliest of each" in probed(server, top_k=3)
        with pytest.raises(
            ConfigError, match="serve it with --max-logprobs 9, or lower algorithm."
        ):
            probed(server, top_k=9)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("shifted", "at place 1 is 5, and 6 was sent"),
        ("other ids", "at place 1 is 7, and 6 was sent"),
        ("no field", "no prompt_logprobs"),
        ("infinite", "has -9999, which is no logprob"),
        ("500", "gave no answer: .*out of memory"),
    ],
)
def test_an_answer_of_something_else_fails_the_sample(server, fault, reason):
    server.fault = fault
    with pytest.raises(RewardError, match=reason):
        asyncio.run(teacher_of(server.url).logprobs([5, 6, 7]))


def test_a_sample_that_could_not_be_scored_has_failed_and_the_others_have_not(server):
    server.fault, server.seldom = "500", True
    group = scored(teacher_of(server.url, teacher_concurrency=1), a_group())
    assert np.isnan(group.rewards[1]) and not np.isnan(group.rewards[0])
    assert len(group.failures) == 1 and group.failures[0] == group.details.reasons[1]
    assert group.failures[0].startswith("prompt 3: the teacher at http://")
    assert not group.teacher[1].any() and len(group.teacher[1]) == 4


def test_a_sample_whose_reward_has_failed_too_is_counted_once(server):
    server.fault = "500"
    group = a_group([np.nan, 1.0])
    group.details.reasons[0] = "prompt 3: raised"
    group.failures.append("prompt 3: raised")
    scored(teacher_of(server.url, alone=False), group)
    assert len(group.failures) == 2 and np.isnan(group.rewards).all()


def test_tries_are_bounded_in_number_and_time(server):
    server.fault = "500"
    with pytest.raises(RewardError):
        asyncio.run(teacher_of(server.url, teacher_retries=1).logprobs([5, 6]))
    assert len(server.asked) == 2
    server.fault = "hang"
    impatient = teacher_of(server.url, teacher_timeout_s=60, teacher_patience_s=0.3)
    with pytest.raises(RewardError, match="within algorithm.teacher_patience_s=0.3"):
        asyncio.run(impatient.logprobs([5, 6]))


def test_a_teacher_that_cannot_be_reached_stops_the_run(tmp_path):
    """What is kept then, and that it goes on: test_records.py, test_loop_ends.py in `run`."""
    url = "http://127.0.0.1:1/v1"
    group = scored(teacher_of(url), a_group())
    (tmp_path / "config.json").write_text("{}")
    records = Records(RunConfig(), None, tmp_path, None, None, None, done=2, dtype="float32")
    reason = rf"step 3: 2 of 2 rewards failed.*prompt 3: the teacher at {url} gave no"
    with pytest.raises(RewardError, match=reason):
        records.check_rewards([group])


class Vocabulary:
    """What is asked of a tokenizer: `size` ids from 64 on, and an added one."""

    def __init__(self, size: int = 300, added: str = "Z"):
        self.size, self.added = size, added

    def __len__(self) -> int:
        return self.size

    def get_added_vocab(self) -> dict[str, int]:
        return {self.added: self.size - 2}

    def decode(self, ids: list[int]) -> str:
        return self.added if ids[0] == self.size - 2 else chr(64 + ids[0])


def probed(server, tokenizer=None, longest=512, **settings) -> str:
    return asyncio.run(teacher_of(server.url, **settings).probe(tokenizer or Vocabulary(), longest))


@pytest.fixture
def sage():
    with teacher_server(decode=lambda i: Vocabulary().decode([i])) as found:
        yield found


def test_a_teacher_with_the_same_vocabulary_passes(sage):
    said = probed(sage)
    assert said.startswith(f"{MODEL} at {sage.url}, takes 4,096 tokens; 201 token ids")
    # The added id is not one of the 200 that are spread over the vocabulary.
    assert len(probe_ids(Vocabulary(100_000))) == 201


def test_another_vocabulary_is_refused_by_name(sage):
    with pytest.raises(ConfigError, match="298 is '<think>' here and 'Z' there"):
        probed(sage, Vocabulary(added="<think>"))
    sage.decode = lambda i: Vocabulary().decode([i + 1])
    with pytest.raises(ConfigError, match="another vocabulary.*'@' here and 'A' there"):
        probed(sage)
    sage.fault = "mute"
    with pytest.raises(ConfigError, match="skip-tokenizer-init"):
        probed(sage)


def test_parts_of_characters_are_no_difference_and_spaces_neither():
    tokenizer = Vocabulary()
    assert compare_texts(tokenizer, [0, 1, 2], [" @", "\ufffd", None]) == 1


@pytest.mark.parametrize(
    ("settings", "longest", "reason"),
    [
        ({"teacher_model": "fool"}, 512, "algorithm.teacher_model=fool: the server at .* has sage"),
        ({}, 4096, "takes 4096 tokens.*model.max_length=4096.*--max-model-len 4097"),
    ],
)
def test_a_teacher_that_cannot_do_it_is_refused(sage, settings, longest, reason):
    wanted = {"teacher_url": sage.url, "teacher_model": MODEL, "teacher_retries": 0} | settings
    teacher = Teacher(TeacherSettings(**wanted), alone=True)
    with pytest.raises(ConfigError, match=reason):
        asyncio.run(teacher.probe(Vocabulary(), longest))


def test_a_teacher_that_is_not_there_or_not_named_is_refused():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(ConfigError, match=f"teacher_url={nobody}: .*Connection error"):
            asyncio.run(teacher_of(nobody).probe(Vocabulary(), 512))
    with pytest.raises(ConfigError, match="algorithm.teacher_url is not set"):
        Teacher(TeacherSettings(), alone=True)
    with pytest.raises(ConfigError, match="algorithm.teacher_model is not set"):
        Teacher(TeacherSettings(teacher_url="http://here/v1"), alone=True)
