"""What is told of an error in a user's function."""

import json
from pathlib import Path

from lora_moe_rl.calls.child import raised


def told_of(call) -> str:
    try:
        call()
    except Exception as error:
        return raised(error)
    raise AssertionError("it raised nothing")


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def wrong():
    return {}["gone"]  # the line of wrong


def read():
    return json.loads("{")  # the line of read


def test_the_innermost_line_of_a_file_of_the_users_own_is_named():
    where = f"in {__file__}, line"
    assert told_of(lambda: wrong()) == f"raised KeyError('gone') {where} {line_of('line of wrong')}"
    assert told_of(read).endswith(f"{where} {line_of('line of read')}")


def test_a_file_that_is_not_there_is_named(tmp_path):
    told = told_of((tmp_path / "none.txt").read_text)
    assert told.startswith(
        f"raised FileNotFoundError(2, 'No such file or directory', '{tmp_path}/none.txt') in "
    )


def test_an_error_that_was_never_raised_has_no_place():
    assert raised(ValueError("no")) == "raised ValueError('no')"
