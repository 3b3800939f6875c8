"""Tools are called in processes that may be lost: whatever they do, the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from lora_moe_rl.environments.parts.tool_calls import Call
from lora_moe_rl.environments.parts.toolbox import Toolbox
from lora_moe_rl.errors import ConfigError

pytestmark = pytest.mark.seconds  # starts processes, imports transformers
FILE = Path(__file__).parents[3] / "helpers/tools_of_tests.py"


@pytest.fixture(scope="module")
def toolbox():
    made = Toolbox([f"{FILE}:{name}" for name in ("add", "slowly", "evil")], 2, 2.0, 100)
    yield made
    made.close()


def call(toolbox, *calls: Call) -> list[tuple[bool, str]]:
    async def together():
        return await asyncio.gather(*map(toolbox.call, calls))

    return [tuple(one) for one in asyncio.run(together())]


def test_a_model_is_told_the_types_and_the_words_of_the_docstring(toolbox):
    add = toolbox.schemas[0]["function"]
    assert (add["name"], add["description"]) == ("add", "Adds.")
    assert add["parameters"]["properties"]["a"] == {"type": "integer", "description": "One number."}
    assert add["parameters"]["required"] == ["a"]


def test_calls_with_arguments_by_place_by_name_and_as_texts(toolbox):
    calls = [Call("add", [1, 2]), Call("add", [1], {"b": 5}), Call("add", named={"a": "3"})]
    assert call(toolbox, *calls, Call("slowly", ["ab"])) == [
        (True, "3"), (True, "6"), (True, "4"), (True, "ababab"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (Call("sub", [1]), "there is no tool 'sub'; there are add, slowly, evil"),
        (Call("add", ["x"]), "add: 0: Input should be a valid integer"),
        (Call("add"), "add: a: Missing required argument"),
        (Call("add", [1], {"c": 2}), "add: c: Unexpected keyword argument"),
        (Call("evil", ["raise"]), "evil raised RuntimeError('no such luck')"),
        (Call("evil", ["sys.exit"]), "evil raised SystemExit('gone')"),
        (Call("evil", ["exit"]), "evil ended its process (exit code 3)"),
        (Call("evil", ["hang"]), "evil took longer than environment.tool_timeout_s=2"),
        (Call("evil", ["fork"]), "evil took longer than"),
        (Call("evil", ["none"]), "returned None, not a text"),
        (Call("evil", ["object"]), "object is not JSON serializable"),
        (Call("evil", ["bytes"]), "bytes is not JSON serializable"),
    ],
)
def test_what_goes_wrong_is_told_and_the_next_call_is_answered(toolbox, asked, told):
    (done, text), other = call(toolbox, asked, Call("add", [20, 22]))
    assert not done and told in text
    assert other == (True, "42")
    assert call(toolbox, Call("add", [1, 1])) == [(True, "2")]


def test_a_gigabyte_that_is_printed_goes_nowhere_and_a_long_answer_is_cut(capfd):
    patient = Toolbox([f"{FILE}:evil"], 1, 60.0, 100)
    printed, huge = call(patient, Call("evil", ["print"]), Call("evil", ["huge"]))
    patient.close()
    assert printed == (True, "printed") and capfd.readouterr().out == ""
    assert huge == (True, "x" * 100 + " [cut off after 100 characters]")


def test_arguments_that_nest_too_deep_to_be_sent_are_told(toolbox):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    ((done, text),) = call(toolbox, Call("add", [deep]))
    assert not done and text.startswith("the arguments of add cannot be sent")


def test_a_text_that_no_tokenizer_takes_is_mended(toolbox):
    assert call(toolbox, Call("evil", ["surrogate"])) == [(True, "?")]


def test_what_a_lost_tool_had_started_is_ended(toolbox):
    call(toolbox, Call("evil", ["fork"]))
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "600"]]
    assert not left


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def f(a):\n    'No types.'\n", "no JSON schema can be made of .*missing a type hint"),
        ("def f(a: int): pass\n", "no JSON schema can be made of .*no docstring"),
        ("import os\nos._exit(5)\n", "exit code 5"),
        ("f = 3\n", "is a int, not a function"),
    ],
)
def test_what_is_no_tool_is_refused_at_the_start(tmp_path, source, told):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=told):
        Toolbox([f"{tmp_path}/mine.py:f"], 1, 1.0, 100)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="another tool is called too"):
        Toolbox([f"{FILE}:add", f"{FILE}:add"], 1, 1.0, 100)
