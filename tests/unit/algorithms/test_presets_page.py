"""docs/presets.md has every preset, with formula, source, true defaults and who differs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.plugins import ALGORITHMS

PAGE = (Path(__file__).parents[3] / "docs/presets.md").read_text()
ITEMS = ("Formula", "Source", "Defaults", "TRL and verl")
SETTING = re.compile(r"`(\w+)=([^`]+)`")


def items(text: str, name: str) -> dict[str, str]:
    """What a preset's section says of each item. Raises AssertionError where one is missing."""
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"docs/presets.md has no section {name}"
    parts = re.split(r"^- \*\*([\w ]+)\.\*\* ", found[1], flags=re.M)[1:]
    said = dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))
    assert tuple(said) == ITEMS and all(said.values()), f"{name} says {', '.join(said)}"
    return said


def defaults(said: dict[str, str]) -> dict[str, str]:
    return dict(SETTING.findall(said["Defaults"]))


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_a_preset_has_its_formula_source_defaults_and_who_differs(name):
    said = items(PAGE, name)
    assert "`" in said["Formula"]
    assert re.search(r"arXiv:\d{4}\.\d{5}|https://|no paper", said["Source"])
    assert "TRL" in said["TRL and verl"] and "verl" in said["TRL and verl"]


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_the_defaults_on_the_page_are_those_of_the_preset(name):
    """To set them changes nothing, and all that the preset sets itself is among them."""
    told = defaults(items(PAGE, name))
    bare = [f"algorithm={name}"]
    settings = [f"algorithm.{key}={value}" for key, value in told.items()]
    assert override(RunConfig(), [*bare, *settings]) == override(RunConfig(), bare)
    assert told and getattr(ALGORITHMS.find(name), "defaults", {}).keys() <= told.keys()


def test_no_section_is_of_a_preset_that_is_not_there():
    sections = set(re.findall(r"^## (.+)$", PAGE, re.M))
    assert sections == set(ALGORITHMS.names())


def test_a_section_without_an_item_and_a_default_that_is_another_are_found():
    with pytest.raises(AssertionError, match="dapo says Formula, Source, TRL and verl"):
        items(re.sub(r"- \*\*Defaults\.\*\* `clip_low=0.2`, `clip_high=0.28`", "", PAGE), "dapo")
    with pytest.raises(AssertionError, match="no section dapo"):
        items(PAGE.replace("## dapo", "## dappo"), "dapo")
    wrong = defaults(items(PAGE.replace("`clip_high=0.28`", "`clip_high=0.3`"), "dapo"))
    bare = ["algorithm=dapo"]
    told = override(RunConfig(), [*bare, f"algorithm.clip_high={wrong['clip_high']}"])
    assert told != override(RunConfig(), bare)
