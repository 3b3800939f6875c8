"""A judge over HTTP: what it says becomes rewards, and whatever else it does a failure."""

from __future__ import annotations

import asyncio
import socket

import pytest

from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.errors import ConfigError, RewardError
from lora_moe_rl.rewards import Judge
from tests.helpers.judge_server import judge_server
from tests.helpers.reward_calls import runner_of, sample_of

SHORT = "Q: {prompt} A: {completion}"


@pytest.fixture
def server():
    with judge_server() as found:
        yield found


def judged(server, completions, prompt="why?", columns=None, **args):
    """Rewards of a prompt's completions, and the column that is logged."""
    url = server if isinstance(server, str) else server.url
    judge = Judge(url, "wise", **{"template": SHORT, "retries": 0} | args)
    return asyncio.run(call(judge, completions, prompt, columns))


async def call(judge, completions, prompt="why?", columns=None):
    extra = {}
    n = len(completions)
    values = {name: [value] * n for name, value in (columns or {}).items()}
    rewards = await judge(
        [prompt] * n, completions, [[1]] * n, None, extra.__setitem__, None, **values
    )
    return rewards, extra["judgement"]


def test_the_last_number_is_the_reward_and_what_was_said_is_logged(server):
    rewards, said = judged(server, ["so", "thus"])
    assert rewards == [0.7, 0.7] and said == ["Well. Score: 3? No.\nScore: 7"] * 2
    assert judged(server, ["so"], highest=14)[0] == [0.5]
    assert judged(server, ["so"], score=r"Score: (\d)\?")[0] == [0.3]


def test_the_judge_sees_prompt_completion_and_columns(server):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    completion = [{"role": "assistant", "content": "{2}"}]
    template = "{prompt}|{completion}|{answer}|{{}}"
    options = {"temperature": 0, "max_tokens": 64}
    judged(server, [completion], prompt, {"answer": "2"}, template=template, options=options)
    (body,) = server.asked
    question = "system: Be brief.\n\nuser: 1+1?|{2}|2|{}"
    assert body["messages"] == [{"role": "user", "content": question}]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("wise", 0, 64)


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("500", "gave no answer: .*out of memory"),
        ("no json", "gave no answer|without a text"),
        ("no choices", "answered without a text"),
        ("no text", "answered without a text"),
        ("no number", "in what the judge said: 'I cannot say.'"),
        ("eleven", "the judge gave 11, which is not from 0 to args.highest=10"),
    ],
)
def test_what_makes_no_sense_is_a_failure_of_that_sample_alone(server, completion, reason):
    rewards, said = judged(server, ["so", completion])
    assert rewards[0] == 0.7 and said[1] is None
    with pytest.raises(RewardError, match=reason):
        raise rewards[1]


def test_tries_are_bounded_in_number(server):
    rewards, _ = judged(server, ["500"], retries=1)
    assert len(server.asked) == 2 and isinstance(rewards[0], RewardError)
    assert judged(server, ["busy twice"], retries=2)[0] == [0.7]


def test_a_request_that_hangs_is_given_up(server):
    (error,), _ = judged(server, ["hang"], timeout_s=0.3)
    with pytest.raises(RewardError, match="gave no answer: Request timed out"):
        raise error


def test_tries_are_bounded_in_time(server):
    (error,), _ = judged(server, ["hang"], timeout_s=60, retries=9, patience_s=0.3)
    with pytest.raises(RewardError, match="gave no answer within args.patience_s=0.3"):
        raise error


def test_requests_at_a_time_are_bounded():
    completions = [f"{i}" for i in range(9)]
    with judge_server(pause_s=0.1) as server:
        assert judged(server, completions, concurrency=3)[0] == [0.7] * 9
    assert server.at_once == 3 and len(server.asked) == 9


def test_equal_questions_are_asked_once_and_failures_again(server, tmp_path):
    async def twice():
        judge = Judge(server.url, "wise", template=SHORT, retries=0)
        await call(judge, ["so", "so", "no number"])
        return await call(judge, ["so", "no number"])

    rewards, _ = asyncio.run(twice())
    assert rewards[0] == 0.7 and isinstance(rewards[1], RewardError)
    questions = [body["messages"][0]["content"] for body in server.asked]
    assert sorted(questions) == ["Q: why? A: no number"] * 2 + ["Q: why? A: so"]


def test_a_cache_on_disk_serves_another_run_and_no_other_question(server, tmp_path):
    cache = str(tmp_path / "kept")
    judged(server, ["so"], cache=cache)
    assert judged(server, ["so"], cache=cache)[0] == [0.7] and len(server.asked) == 1
    judged(server, ["so"], cache=cache, options={"temperature": 1})
    judged(server, ["so"], cache=cache, template="Another: {completion}")
    assert len(server.asked) == 3 and len(list((tmp_path / "kept").iterdir())) == 3


def test_the_key_comes_from_the_environment_and_no_other_key_is_sent(server, monkeypatch):
    monkeypatch.setenv("MINE", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "of somebody else")
    judged(server, ["so"], key_env="MINE")
    judged(server, ["so"])
    keys = [headers["authorization"] for headers in server.headers]
    assert keys == ["Bearer secret", "Bearer none"]
    with pytest.raises(ConfigError, match="args.key_env=THEIRS: there is no such environment"):
        Judge(server.url, "wise", key_env="THEIRS")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"url": "localhost:8000"}, "args.url=localhost:8000 is no address"),
        ({"template": "How good?"}, "must have {completion}"),
        ({"template": "{completion} {"}, "args.template: "),
        ({"template": "{completion} {}"}, "no empty braces"),
        ({"score": "(a"}, "args.score=.a is no regular expression"),
        ({"score": "a"}, "needs one group"),
        ({"concurrency": 0}, "args.concurrency=0 is to be at least 1"),
        ({"retries": -1}, "args.retries=-1 at least 0"),
        ({"patience_s": 0}, "above 0"),
        ({"timeout_s": 1, "patience_s": float("nan")}, "above 0"),
    ],
)
def test_arguments_that_cannot_work_are_refused(args, reason):
    with pytest.raises(ConfigError, match=reason):
        Judge(**{"url": "http://127.0.0.1:9/v1", "model": "wise"} | args)


def test_a_template_that_names_no_column_is_a_failure_that_says_so(server):
    with pytest.raises(ConfigError, match=r"names {anwser}.*there are answer, completion, prompt"):
        judged(server, ["so"], columns={"answer": "2"}, template="{completion} {anwser}")
    assert not server.asked


def test_a_judge_that_is_not_there_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        (error,), _ = judged(nobody, ["so"])
    with pytest.raises(
        RewardError, match=f"the judge at {nobody} gave no answer: Connection error"
    ):
        raise error


@pytest.mark.seconds  # starts processes
def test_a_run_calls_it_with_arguments_and_columns_and_keeps_its_reasons(server):
    samples = [sample_of(1, text) for text in ("so", "no number")]
    # A column may have the name of an argument, and changes nothing.
    prompt = Prompt(3, "why?", [1], {"answer": "2", "url": "http://other", "model": "other"})
    args = {"url": server.url, "model": "wise", "template": "{completion} {answer} {model}"}
    with runner_of("lora_moe_rl.rewards:Judge", 20, **args) as runner:
        assert len(runner.pool.workers) == 1
        rewards, failures, details = asyncio.run(runner.score(prompt, samples))
    assert rewards[0] == pytest.approx(0.7) and rewards[1] != rewards[1]
    assert len(failures) == 1 and failures[0] == details.reasons[1]
    assert failures[0].startswith("prompt 3: ") and "I cannot say." in failures[0]
    assert details.extra["judgement"][0].endswith("Score: 7")
    assert details.extra["judgement"][1] is None
    body = server.asked[0]
    assert (body["model"], body["messages"][0]["content"][-8:]) == ("wise", " 2 other")


@pytest.mark.parametrize("kept", [True, False])
def test_half_a_character_in_what_a_judge_says_or_reads_is_no_failure(server, tmp_path, kept):
    where = {"cache": str(tmp_path)} if kept else {}
    rewards, said = judged(server, ["half"], "\ud800 why?", **where)
    assert rewards == [0.7] and said == ["?. Score: 7"]
    assert server.asked[0]["messages"][0]["content"] == "Q: ? why? A: half"
