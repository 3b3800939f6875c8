"""Why no layout fits, and changes that are planned before they are proposed."""

import json
import re

import pytest

from lora_moe_rl import cli
from lora_moe_rl.planner import changes
from lora_moe_rl.planner.changes import Axis, reasons, search_of, what_would_fit
from lora_moe_rl.planner.request import read

TWO = ["--model", "qwen3-30b-a3b", "--gpus", "2"]
# The fewest bits do not help a trainer, whose base is bf16.
FOUR_SMALL = ["--model", "qwen3-30b-a3b", "--gpus", "4", "--gpu-memory", "40"]


def verdict(words, capsys) -> int:
    code = cli.main(["plan", *words])
    capsys.readouterr()
    return code


@pytest.mark.seconds
@pytest.mark.parametrize("argv", [TWO, FOUR_SMALL, [*TWO, "--gpu-memory", "30"]])
def test_every_change_that_is_proposed_fits(argv, capsys):
    assert verdict(argv, capsys) == 1
    found = what_would_fit(argv)
    assert found
    for change in found:
        assert verdict([*argv, *change.words], capsys) == 0, change


@pytest.mark.seconds
def test_a_layout_of_ones_own_that_does_not_fit_gets_one_that_does(capsys):
    argv = ["recipes/qwen3_30b_a3b.py", "--gpus", "4"]
    found = what_would_fit(argv)
    assert found[0].harm == "another layout, the same training"
    for change in found:
        assert verdict([*argv, *change.words], capsys) == 0, change


@pytest.mark.seconds
def test_more_gpus_are_the_fewest_that_fit(capsys):
    words = next(c.words for c in what_would_fit(TWO) if c.harm == "more of the same GPUs")
    assert words == ("--gpus", "3")


@pytest.mark.seconds
def test_what_fits_alone_is_said_alone_and_in_the_order_of_harm():
    found = [change.harm for change in what_would_fit(FOUR_SMALL)]
    known = [axis.harm for axis in changes._axes(read(FOUR_SMALL))]
    assert found == [harm for harm in known if harm in found]


class Planner(changes._Trials):
    """Where `fits` says what the planner would."""

    def __init__(self, fits):
        super().__init__([])
        self.fits = fits

    def _plan(self, words):
        return words if self.fits(set(words)) else None


AXES = [Axis("a", [("a1",), ("a2",)]), Axis("b", [("b1",), ("b2",), ("b3",)]), Axis("c", [("c",)])]


def told(fits, axes=AXES):
    return [(change.words, change.harm) for change in Planner(fits).changes(axes)]


def test_of_an_axis_the_mildest_step_that_fits_is_taken():
    assert told(lambda words: words & {"b2", "b3"}) == [(("b2",), "b")]
    dear = [Axis("b", [(f"b{i}",) for i in range(9)], dear=True)]
    for least in range(9):
        fits = [f"b{i}" for i in range(least, 9)]
        assert told(lambda words, fits=fits: words & {*fits}, dear) == [((f"b{least}",), "b")]
    assert told(lambda words: False, dear) == []


def test_where_none_is_enough_alone_those_that_are_needed_come_together():
    assert told(lambda words: words & {"a2"} and "c" in words) == [(("a2", "c"), "a; c")]
    mild = told(lambda words: words & {"a1", "a2"} and words & {"b2", "b3"})
    assert mild == [(("a1", "b2"), "a; b")]
    assert told(lambda words: False) == []


def test_the_reason_names_what_is_too_large():
    few = " ".join(reasons(search_of(read(TWO))))
    assert re.search(r"no split of 2 GPUs gives the trainer the 2 .* and an engine the 1", few)
    both = reasons(search_of(read(["--model", "kimi-k2", "--gpus", "8"])))
    assert "a trainer rank needs at least" in both[0] and "its base" in both[0]
    assert "an engine rank of rollout.tp=8" in both[1] and "120.8 GiB of weights" in both[1]
    small = reasons(search_of(read(["--model", "kimi-k2", "--gpus", "64", "--gpu-memory", "30"])))
    assert any("an engine rank of rollout.dp=56" in one for one in small)
    shared = reasons(search_of(read(["--model", "kimi-k2", "--gpus", "16", "trainer.cp=2"])))
    assert re.search(r"trainer.world_size=\d+ tp=\d+ cp=2 pp=", shared[0])


@pytest.mark.seconds
def test_what_does_not_fit_is_printed_and_json_too(capsys):
    assert cli.main(["plan", *TWO]) == 1
    shown = capsys.readouterr().out
    assert "no layout of Qwen3-30B-A3B with adapter.rank=16 fits 2 GPUs (h100, 79 GiB)" in shown
    assert "why: " in shown and "--gpus 3    # more of the same GPUs" in shown
    assert cli.main(["plan", *TWO, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] and ["--gpus", "3"] in [c["words"] for c in found["changes"]]
