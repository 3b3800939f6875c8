"""What a run notes of the settings that it was trained with, and what it says of changes."""

from __future__ import annotations

from lora_moe_rl.config import RunConfig
from lora_moe_rl.files import settings_file
from lora_moe_rl.files.settings_file import SETTINGS

FIRST = RunConfig(trainer={"lr": 1e-3})
LOWER = RunConfig(trainer={"lr": 1e-4}, algorithm={"name": "grpo", "kl_coef": 0.1})


def test_what_a_resumed_run_changes_is_said_and_the_old_is_kept(tmp_path):
    assert settings_file.note(tmp_path, 0, FIRST) == ""
    assert settings_file.note(tmp_path, 4, FIRST) == ""
    said = settings_file.note(tmp_path, 8, LOWER)
    assert said.startswith("settings from step 9 on: ")
    assert "trainer.lr was 0.001, is 0.0001" in said
    assert "algorithm.kl_coef was 0.0, is 0.1" in said
    before, after = (SETTINGS.at(tmp_path, step) for step in (8, 9))
    assert before is not None and after is not None
    assert (before["trainer.lr"], after["trainer.lr"]) == (1e-3, 1e-4)


def test_from_an_earlier_step_it_is_compared_with_what_made_that(tmp_path):
    settings_file.note(tmp_path, 0, FIRST)
    settings_file.note(tmp_path, 8, LOWER)
    assert "trainer.lr was 0.001, is 0.0001" in settings_file.note(tmp_path, 4, LOWER)


def test_what_json_writes_otherwise_is_no_change(tmp_path):
    config = RunConfig(data={"generator": "rows.py:rows", "args": {"by_number": {1: (2, 3)}}})
    settings_file.note(tmp_path, 0, config)
    assert settings_file.note(tmp_path, 4, config) == ""


def test_a_long_value_is_cut(tmp_path):
    settings_file.note(tmp_path, 0, FIRST)
    template = RunConfig(model={"path": "qwen3_moe", "chat_template": "{{ x }}\n" * 1000})
    said = settings_file.note(tmp_path, 1, template)
    assert "model.chat_template was None, is {{ x }} {{ x }}" in said and len(said) < 500
