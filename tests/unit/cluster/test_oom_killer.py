"""The kernel's count of processes that it killed for memory, in the files that have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_moe_rl.cluster.oom_killer import MACHINE, kills, sentence

# As Linux 6 writes them.
EVENTS = "low 0\nhigh 0\nmax 31\noom 4\noom_kill 3\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"


@pytest.mark.parametrize(("text", "count"), [(EVENTS, 3), (CONTROL, 2), ("nothing 1\n", 0)])
def test_it_is_read_from_either_kind_of_control_group(text, count, tmp_path):
    (tmp_path / "counter").write_text(text)
    assert kills((str(tmp_path / "missing"), str(tmp_path / "counter"))) == count


def test_this_machine_counts():
    assert kills((MACHINE,)) >= 0
    assert "\noom_kill " in Path(MACHINE).read_text()


def test_only_what_was_killed_since_is_said():
    assert sentence(3, 3) == ""
    assert "ended 1 process:" in sentence(3, 4)
    assert "ended 2 processes:" in sentence(3, 5)
