"""The address of a run, read as a browser reads it."""

import shlex
from urllib.parse import parse_qs, unquote, urlsplit

from recorded_run import record

from lora_moe_rl.page.link import line, link
from lora_moe_rl.page.runs import Runs


def chosen(address: str) -> list[str]:
    """The runs of an address, as `state.js` finds them: parse_qs reads what a browser's
    URLSearchParams does, and each part of the list is decoded once more."""
    values = parse_qs(urlsplit(address).fragment, strict_parsing=True)
    assert list(values) == ["runs"]
    return [unquote(part) for part in values["runs"][0].split(",")]


def test_an_address_chooses_one_run_whatever_its_name():
    for name in ("demo", "20261122-201500", "a b", "a,b", "50%", "a+b&c=d#e", "größer"):
        assert chosen(link(name)) == [name]


def test_the_command_finds_the_run_of_the_address_and_those_beside_it(tmp_path):
    record(tmp_path / "my runs" / "a, b", range(1, 2))
    record(tmp_path / "my runs" / "other", range(1, 2))
    command, _, address = line(tmp_path / "my runs" / "a, b").partition("  then ")
    *words, root = shlex.split(command)
    assert words == ["lora-moe-rl", "view"] and root == str(tmp_path / "my runs")
    found = {run.name for run in Runs(tmp_path / "my runs").look()}
    assert found == {"a, b", "other"} and chosen(address) == ["a, b"]


def test_a_run_directory_that_is_a_link_is_shown_where_it_is(tmp_path):
    record(tmp_path / "disk" / "mine", range(1, 2))
    (tmp_path / "linked").symlink_to(tmp_path / "disk" / "mine")
    assert line(tmp_path / "linked") == line(tmp_path / "disk" / "mine")
