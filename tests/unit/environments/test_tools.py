"""Conversations with tools: what is asked and told, how they end; no token is made anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from speaker import EOS, Speaker
from written_policy import table_of

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.data.scores import Details, Scores
from lora_moe_rl.environments.tools import Tools
from lora_moe_rl.errors import ConfigError, EngineDied
from lora_moe_rl.tiny.tokenizer import make_tokenizer

pytestmark = pytest.mark.seconds  # starts processes, imports transformers
FILE = Path(__file__).parents[2] / "helpers/tools_of_tests.py"
TOKENIZER = make_tokenizer()


class Rewards:
    async def score(self, prompt, samples):
        self.shown = samples
        rewards = np.array([float(s.text == "6") for s in samples], np.float32)
        return Scores(rewards, [], Details())


@pytest.fixture(scope="module")
def make():
    """An environment of these settings; the processes of all are ended."""
    made = []

    def make(group=1, max_length=256, response=200, tokenizer=TOKENIZER, **settings) -> Tools:
        tools = [f"{FILE}:add", f"{FILE}:evil"]
        config = RunConfig(
            model={"max_length": max_length},
            rollout={"max_response_tokens": response},
            algorithm={"name": "reinforce_pp", "group_size": group},
            environment={"name": "tools", "tools": tools, "calls": "python", "tool_workers": 1}
            | settings,
        )
        made.append(Tools(config, Rewards(), tokenizer))
        return made[-1]

    yield make
    for one in made:
        one.close()


PROMPT = Prompt(0, "1+2+3=", list(b"1+2+3="))


def roll(environment, policy, prompt=PROMPT):
    return asyncio.run(environment.rollout(prompt, policy))


def test_all_calls_of_an_async_tool_are_of_one_loop(make):
    environment = make(tools=[f"{FILE}:faithful"])
    group = roll(environment, Speaker("[faithful('a'),faithful('b')]", "[faithful('c')]", "6"))
    assert [m["content"] for m in group.samples[0].messages if m["role"] == "tool"] == list("abc")
    assert counted(group)["tool_calls"] == 3 and "tool_error" not in counted(group)


def counted(group) -> dict[str, float]:
    return {name: value for name, value in group.counts.items() if value}


def test_the_policy_calls_tools_reads_their_answers_and_answers(make):
    environment = make(group=2)
    group = roll(environment, Speaker("[add(1,2)]", "[add(3,3),add(1)]", "6"))
    sample = group.samples[0]
    assert bytes(sample.token_ids.astype(np.uint8)).decode("latin1").replace(chr(EOS), "$") == (
        "1+2+3=[add(1,2)]$\n3\n[add(3,3),add(1)]$\n6\n2\n6$"
    )
    assert [s.author for s in sample.segments[1:]] == ["policy", "tool"] * 2 + ["policy"]
    assert sample.mask.sum() == len("[add(1,2)][add(3,3),add(1)]6") + 3
    called = [[{"a": 1, "b": 2}], [{"a": 3, "b": 3}, {"a": 1}]]  # as TRL shows them
    told = [
        [{"type": "function", "function": {"name": "add", "arguments": one}} for one in turn]
        for turn in called
    ]
    assert list(sample.messages) == [
        {"role": "assistant", "content": "[add(1,2)]", "tool_calls": told[0]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "[add(3,3),add(1)]", "tool_calls": told[1]},
        {"role": "tool", "name": "add", "content": "6"},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "6"},
    ]
    assert group.rewards.tolist() == [1, 1] and not group.failures
    assert counted(group) == {"done": 2, "turns": 6, "tool_calls": 6}
    table, expected = group.routes.table(), table_of([s.token_ids.tolist() for s in group.samples])
    np.testing.assert_array_equal(table.ids, expected.ids)
    assert table.valid.all()


class Lossy:
    """A tokenizer that does not round-trip: "ab" is one token when it is encoded, and a model may
    have sampled it as two."""

    chat_template, added_tokens_decoder = None, {}

    def encode(self, text, add_special_tokens=False):
        return [*text.replace("ab", "\x01").encode()]


def test_what_was_sampled_is_never_tokenised_again(make):
    environment = make(tokenizer=Lossy())
    group = roll(environment, Speaker("[evil('ab')]", "abab"))
    (sample,) = group.samples
    said = [*b"[evil('ab')]", EOS]
    assert Lossy().encode("[evil('ab')]") != said[:-1]
    assert sample.response_ids[: len(said)].tolist() == said
    # Only the answer was tokenised.
    told = sample.segments[2].token_ids.tolist()
    assert told == Lossy().encode("\n?\n")
    assert sample.response_ids.tolist() == [*said, *told, *b"abab", EOS]


def test_in_a_chat_the_answer_stands_where_the_template_has_it(make):
    environment = make()
    asked = [{"role": "user", "content": "1+2?"}]
    shown = environment.prompt_tokenizer.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    assert "You can call these tools" in shown and "Adds." in shown
    group = roll(environment, Speaker("[add(1,2)]", "3"), Prompt(0, asked, list(b"?")))
    assert TOKENIZER.decode(group.samples[0].segments[2].token_ids) == "\ntool: 3\nassistant: "


MARKS = [
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
]
KIMI = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class InTokens(Speaker):
    """Says texts in a tokenizer's tokens, special ones too, which its text has not."""

    def __init__(self, tokenizer, *texts: str):
        super().__init__(*texts)
        self.turns = [[*tokenizer.encode(t, add_special_tokens=False), EOS] for t in texts]


def test_a_model_calls_in_the_form_that_it_was_trained_in(make):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = KIMI
    section, ends, call, arguments, called = MARKS

    def turn(number: int, a: int, b: int) -> str:
        written = f'{call}functions.add:{number}{arguments}{{"a": {a}, "b": {b}}}{called}'
        return f"So:{section}{written}{ends}"

    environment = make(tokenizer=tokenizer, calls="vllm:kimi_k2", max_length=999, response=900)
    asked = Prompt(0, [{"role": "user", "content": "1+2+3?"}], list(b"?"))
    policy = InTokens(tokenizer, turn(0, 1, 2), turn(1, 3, 3), "6")
    group = roll(environment, policy, asked)
    (sample,) = group.samples
    assert counted(group) == {"done": 1, "turns": 3, "tool_calls": 2}
    told = [tokenizer.decode(s.token_ids) for s in sample.segments if s.author == "tool"]
    assert told == [
        "<tool>## Return of functions.add:0\n3<eos><assistant>",
        "<tool>## Return of functions.add:1\n6<eos><assistant>",
    ]
    assert [m.get("tool_call_id") for m in sample.messages if m["role"] == "tool"] == [
        "functions.add:0", "functions.add:1",
    ]  # fmt: skip
    assert group.rewards.tolist() == [1]


@pytest.mark.parametrize(
    ("texts", "settings", "counts"),
    [
        (["6"], {}, {"done": 1, "turns": 1}),
        (["[add(1)]"] * 4, {"max_turns": 3}, {"max_turns": 1, "turns": 3, "tool_calls": 2}),
        (["[add(1"] * 9, {"max_turns": 2}, {"max_turns": 1, "turns": 2, "parse_error": 2}),
        (["[add(1)]", "66..."], {}, {"max_tokens": 1, "turns": 2, "tool_calls": 1}),
        (["123456"], {"max_turn_tokens": 4}, {"max_tokens": 1, "turns": 1}),
        (
            ["[evil('raise')]", "[sub(1)]", "6"], {},
            {"done": 1, "turns": 3, "tool_calls": 2, "tool_error": 2},
        ),
        (["[evil('huge')]"], {}, {"context_overflow": 1, "turns": 1, "tool_calls": 1}),
        (
            ["[add(1),add(1),add(1)]", "6"], {"max_calls": 2},
            {"done": 1, "turns": 2, "tool_calls": 2},
        ),
    ],
)  # fmt: skip
def test_each_way_to_end_and_each_fault_is_counted(make, texts, settings, counts):
    group = roll(make(**settings), Speaker(*texts))
    assert counted(group) == counts
    ended = next(iter(counts))
    assert group.samples[0].truncated == (ended in ("max_tokens", "context_overflow"))
    assert len(group.samples[0].response_ids) <= 200 and not np.isnan(group.rewards).any()


def test_what_went_wrong_is_told_to_the_policy(make):
    policy = Speaker("[add(1", "[evil('raise')]", "6")
    messages = roll(make(), policy).samples[0].messages
    assert messages[1]["content"].startswith("error: not a Python list of calls")
    assert messages[3]["content"] == "error: evil raised RuntimeError('no such luck')"


def test_a_conversation_whose_tools_cannot_be_called_has_no_reward(make, monkeypatch):
    environment = make(group=2)
    environment.toolbox.close()

    def refuse(command, count):
        raise ConfigError("the file is gone")

    monkeypatch.setattr("lora_moe_rl.calls.pool._start", refuse)
    group = roll(environment, Speaker("[add(1,2)]", "6"))
    assert np.isnan(group.rewards).all() and len(group.failures) == 2
    assert "could not be started again: the file is gone" in group.failures[0]
    assert counted(group) == {
        "environment_error": 2, "turns": 2, "tool_calls": 2, "retried": 4,
    }  # fmt: skip


def test_a_turn_whose_call_cannot_be_read_may_be_left_out_of_the_loss(make):
    said = "[add(1", "[add(1,2)]", "6"
    (sample,) = roll(make(mask_parse_errors=True), Speaker(*said)).samples
    masks = [s.mask.tolist() for s in sample.segments if s.author == "policy"]
    assert masks == [[False] * 7, [True] * 11, [True] * 2]
    assert sample.num_sampled == 7 + 11 + 2
    (sample,) = roll(make(), Speaker(*said)).samples
    assert sample.mask.sum() == 20


def test_an_engine_that_dies_ends_all_conversations_of_the_prompt(make):
    class Dying(Speaker):
        async def sample(self, token_ids, n, turn=None):
            if turn.conversation == 1:
                raise EngineDied("gone")
            await asyncio.sleep(3600)

    with pytest.raises(EngineDied):
        roll(make(group=3), Dying())


def test_without_tools_there_is_nothing_to_do():
    with pytest.raises(ConfigError, match="environment=tools has no tools: set environment.tools"):
        Tools(RunConfig(environment="tools"), Rewards(), TOKENIZER)


def test_special_tokens_in_answers_are_counted_and_told_of_once(make, caplog):
    """They are the tokens that they name, as in verl and TRL: only who writes the tool can know
    what of its answer is of others."""
    environment = make(tools=[f"{FILE}:faithful"])
    called = ["[faithful('a'),faithful('so <eos>')]", "[faithful('<bos><eos>')]", "6"]
    for _ in range(2):
        group = roll(environment, Speaker(*called))
        assert counted(group)["special_tokens"] == 2 and counted(group)["tool_calls"] == 3
    assert group.samples[0].segments[2].token_ids.tolist().count(EOS) == 1
    (told,) = [one.getMessage() for one in caplog.records if "special token" in one.getMessage()]
    assert told.startswith("an answer of the tool faithful holds '<eos>'")
    assert "special_tokens" not in counted(roll(environment, Speaker("[faithful('eos>')]", "6")))


def lacking():
    """A tokenizer to which <added> was added alone: the model has no embedding of it."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<added>"]})
    tokenizer.model_vocab_size = len(tokenizer) - 1
    return tokenizer


def test_a_token_that_the_model_lacks_is_never_fed_to_it(make):
    tokenizer = lacking()
    environment = make(tools=[f"{FILE}:faithful"], tokenizer=tokenizer)
    group = roll(environment, Speaker("[faithful('so <added>')]", "6"))
    assert counted(group) == {"done": 1, "turns": 2, "tool_error": 1, "tool_calls": 1}
    told = group.samples[0].messages[1]["content"]
    assert told == "error: the answer holds a token that the model does not have"
    assert group.samples[0].token_ids.max() < tokenizer.model_vocab_size
    assert group.rewards.tolist() == [1] and not group.failures


def test_nor_is_it_in_the_name_of_a_call_or_in_what_is_told_of_one(make):
    """A model writes as text what its tokenizer reads as a token."""
    tokenizer = lacking()
    environment = make(tokenizer=tokenizer, calls="json", max_length=999, response=900)
    called = [
        f'<tool_call>{{"name": "<added>", "arguments": {arguments}}}</tool_call>'
        for arguments in ("{}", "[3]")
    ]
    (sample,) = (group := roll(environment, Speaker(*called, "6"))).samples
    assert counted(group) == {"done": 1, "turns": 3, "parse_error": 2}
    assert sample.token_ids.max() < tokenizer.model_vocab_size
    told = [m["content"] for m in sample.messages if m["role"] == "tool"]
    assert told == [
        "error: a call's name holds a token that the model does not have",
        "error: the answer holds a token that the model does not have",
    ]


def test_a_call_that_was_begun_and_that_vllm_takes_for_an_answer_is_counted(make):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = KIMI
    asked = Prompt(0, [{"role": "user", "content": "1?"}], list(b"?"))
    settings = {"calls": "vllm:kimi_k2", "max_length": 999, "response": 900}
    environment = make(tokenizer=tokenizer, mask_parse_errors=True, **settings)
    policy = InTokens(tokenizer, f"{MARKS[0]}{MARKS[2]}add{MARKS[3]}{{}}{MARKS[4]}", "6")
    (sample,) = (group := roll(environment, policy, asked)).samples
    assert counted(group) == {"done": 1, "turns": 2, "parse_error": 1}
    masks = [s.mask.all() for s in sample.segments if s.author == "policy"]
    assert masks == [False, True]
