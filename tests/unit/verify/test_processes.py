"""The processes of `verify`: what they are asked, what they answer, and how they may fail."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from thing import Thing

from lora_moe_rl.errors import ActorFailed, RefitError
from lora_moe_rl.verify.processes import Processes, apart

WAIT_S = 120


def things(folder: Path, count: int = 1, **settings) -> Processes:
    names = [f"thing {i}" for i in range(count)]
    return Processes(names, Thing, folder, start="forkserver", **settings)


def test_every_process_answers_in_order_and_is_shut_down_at_the_end(tmp_path):
    variables = [{"THING": "a"}, {"THING": "b"}]
    with things(tmp_path, 2, variables=variables) as two:
        (zero, first), (one, second) = two.call("ids", timeout_s=WAIT_S)
        assert (zero, one) == (0, 1) and len({first, second, os.getpid()}) == 3
        assert two.call("variable", timeout_s=WAIT_S) == ["a", "b"]
        loops = [two.call("loop", timeout_s=WAIT_S) for _ in range(2)]
        assert loops[0] == loops[1], "coroutines of a process share a loop"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ended-0", "ended-1"]
    assert not psutil.pid_exists(first) and not psutil.pid_exists(second)


def test_an_error_of_ours_is_raised_as_it_is_and_another_with_its_traceback(tmp_path):
    with things(tmp_path) as one:
        with pytest.raises(RefitError, match="^no slot$"):
            one.call("fail", RefitError("no slot"), timeout_s=WAIT_S)
        with pytest.raises(ActorFailed, match="thing 0 failed: KeyError: 'x'") as raised:
            one.call("fail", KeyError("x"), timeout_s=WAIT_S)
        assert "in fail" in raised.value.log_tail
        assert one.call("ids", timeout_s=WAIT_S)[0][0] == 0, "it goes on"
    wrapped = pytest.raises(ActorFailed, match="thing 0 failed: .*RefitError: no slot")
    with things(tmp_path, as_raised=False) as one, wrapped:
        one.call("fail", RefitError("no slot"), timeout_s=WAIT_S)


def test_a_process_that_dies_is_named_with_its_exit_code_and_last_words(tmp_path):
    with things(tmp_path, 2) as two:
        with pytest.raises(ActorFailed, match="thing [01] failed: its process ended.*3") as raised:
            two.call("die", timeout_s=WAIT_S)
        assert raised.value.log_tail == "the last words"


def test_nobody_waits_for_ever(tmp_path):
    """Nor until others have answered, which hang for longer than is waited."""
    late = pytest.raises(ActorFailed, match="hang: no answer within 0 s")
    with things(tmp_path) as one, late:
        one.call("hang", timeout_s=0.3)
    other = pytest.raises(ActorFailed, match="thing 1 failed: ValueError: one of two")
    with things(tmp_path, 2) as two, other:
        two.call("hang_but_one", timeout_s=WAIT_S)


def test_a_job_apart_has_a_process_of_its_own():
    assert apart("job", os.getppid, timeout_s=WAIT_S) == os.getpid()
    with pytest.raises(ActorFailed, match="job failed: TypeError"):
        apart("job", os.getppid, 1, timeout_s=WAIT_S)
