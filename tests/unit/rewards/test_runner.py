"""Rewards: TRL's calling convention, and what evil functions do to a step (nothing)."""

import asyncio
import multiprocessing
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest

from lora_moe_rl.calls import pool
from lora_moe_rl.data.samples import Prompt, Sample, Segment
from lora_moe_rl.errors import ConfigError
from tests.helpers.reward_calls import runner_of, sample_of

FUNCTIONS = '''
import asyncio, os, time

def seen(prompts, completions, completion_ids, answer, **kwargs):
    assert prompts == ["a"] * 2 and completion_ids == [[1], [1, 1]], (prompts, completion_ids)
    logs = [kwargs.pop(name) for name in ("trainer_state", "log_extra", "log_metric",
                                             "log_turn_rewards")]
    assert kwargs == {"level": [3, 3]} and all(logs), kwargs
    return [float(c == a) for c, a in zip(completions, answer)]

def by_turn(completions, turns, log_turn_rewards):
    log_turn_rewards(turns[0])
    return [1.0] * len(completions)

def only_completions(completions):
    return [len(c) for c in completions]

def messages(prompts, completions):
    assert prompts[0] == [{"role": "user", "content": "hi"}]
    return [float(c == [{"role": "assistant", "content": "x"}]) for c in completions]

async def slow_async(prompts, completions):
    if prompts[0] == "bad":
        await asyncio.sleep(60)
    await asyncio.sleep(0.2)
    return [1.0] * len(completions)

def deed(prompts, completions):
    """The prompt says what to do; any other prompt gets ones."""
    n = len(completions)
    match prompts[0]:
        case "raise": raise RuntimeError("no such luck")
        case "exit": os._exit(3)
        case "signal": os.kill(os.getpid(), 40)
        case "sys.exit": raise SystemExit(0)
        case "hang": time.sleep(60)
        case "nan": return [float("nan")] * n
        case "inf": return [float("inf")] * n
        case "huge": return [1e39] * n
        case "largest": return [3.4e38] * n
        case "text": return ["1.0"] * n
        case "few": return [1.0] * (n - 1)
        case "scalar": return 1.0
        case "string": return "1" * n
        case "object": return [object()] * n
        case "None": return [None] * n
        case "half": return [None, float("nan")] + [0.5] * (n - 2)
    return [1.0] * n
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "functions.py"
    file.write_text(FUNCTIONS)
    return file


def step(texts, group_size=4, columns=None, completion="x"):
    """Prompts, and for each of them samples of 1, 2, ... tokens."""
    prompts = [Prompt(row, text, [1], columns or {}) for row, text in enumerate(texts)]
    samples = [sample_of(1 + member, completion) for member in range(group_size)]
    return [(prompt, samples) for prompt in prompts]


def score(runner, groups) -> tuple[np.ndarray, list[str]]:
    """Rewards and failures of all groups, which are scored at the same time."""

    async def together():
        return await asyncio.gather(*(runner.score(*group) for group in groups))

    found = asyncio.run(together())
    return np.concatenate([r for r, *_ in found]), [line for _, lines, _ in found for line in lines]


@pytest.fixture(scope="module")
def deed(functions):
    with runner_of(f"{functions}:deed", timeout_s=1.0) as runner:
        yield runner


def test_keywords_are_those_of_trl(functions):
    with runner_of(f"{functions}:seen", timeout_s=10) as runner:
        rewards, failures = score(runner, step(["a"], 2, {"answer": "x", "level": 3}))
    assert failures == [] and rewards.tolist() == [1.0, 1.0] and rewards.dtype == np.float32


def test_a_function_gets_only_what_it_names(functions):
    with runner_of(f"{functions}:only_completions", timeout_s=10) as runner:
        rewards, failures = score(runner, step(["a", "b"], 2, {"answer": "x"}, completion="xyz"))
    assert failures == [] and rewards.tolist() == [3.0] * 4


def test_each_sample_has_the_reward_of_its_own_completion(functions):
    samples = [sample_of(1, "x" * length) for length in (3, 1, 2)]
    with runner_of(f"{functions}:only_completions", timeout_s=10) as runner:
        rewards, _ = score(runner, [(Prompt(0, "a", [1], {}), samples)])
    assert rewards.tolist() == [3, 1, 2]


def test_messages_in_messages_out(functions):
    with runner_of(f"{functions}:messages", timeout_s=10) as runner:
        rewards, failures = score(runner, step([[{"role": "user", "content": "hi"}]], 2))
    assert failures == [] and rewards.tolist() == [1.0, 1.0]


def test_the_turns_of_a_conversation_are_its_completion(functions):
    told = [{"role": "assistant", "content": "?"}, {"role": "tool", "content": "x"}]
    prompt, (first, _) = step([[{"role": "user", "content": "hi"}]], 2)[0]
    sample = replace(first, messages=(*told, {"role": "assistant", "content": "x"}))
    with runner_of("lora_moe_rl.rewards:exact_match", timeout_s=10) as runner:
        prompt = replace(prompt, columns={"answer": "x"})
        rewards, failures = score(runner, [(prompt, [sample])])
        assert rewards.tolist() == [1.0] and not failures
        sample = replace(sample, messages=tuple(told), text="y")
        assert score(runner, [(prompt, [sample])])[0].tolist() == [1.0]  # the last message


TURNS = {
    "right": ([[0.5, 0.25, 0.25], None], ["", ""]),
    "few turns": ([[0.5, 0.5], None], ["told of 2 turns, and the policy has had 3 in this", ""]),
    "another sum": ([[0.5, 0.5, 0.5], [1.0]], ["gave its turns 1.5 together, and 1 in all", ""]),
    "no number": ([[0.5, "x", 0.5], [1.0]], ["a turn of sample 0 returned 'x'"] * 2),
    "no turn": ([[0.5, None, 0.5], [1.0]], ["a turn of sample 0 has None"] * 2),
    "few samples": ([[1.0]], ["log_turn_rewards got 1 values for 2 samples"] * 2),
}


@pytest.mark.parametrize("what", TURNS)
def test_what_turns_have_earned_is_told_beside_the_reward_and_has_to_be_that(functions, what):
    """Of a sample of three turns and one of one, whose rewards are 1."""
    given, reasons = TURNS[what]
    parts = [Segment.sampled([1], np.zeros(1), 0), Segment.given("tool", [2])]
    talk = Sample((Segment.given("user", [1]), *parts, *parts, parts[0]), "stop", "x")
    prompt = Prompt(3, "a", [1], {"turns": given})
    with runner_of(f"{functions}:by_turn", timeout_s=10) as runner:
        scores = asyncio.run(runner.score(prompt, [talk, sample_of(2, "y")]))
    for reward, index, reason in zip(scores.rewards, range(2), reasons, strict=True):
        assert np.isnan(reward) == bool(reason)
        if reason:
            assert re.search(reason, scores.details.reasons[index])
    told = {i: one for i, one in enumerate(given) if one and not reasons[i]}
    assert scores.details.by_turn == told


@pytest.mark.parametrize(
    ("evil", "reason"),
    [
        ("raise", "RuntimeError('no such luck')"),
        ("exit", "exit code 3"),
        ("signal", "signal 40"),
        ("sys.exit", "SystemExit"),
        ("hang", "took longer than reward.timeout_s=1"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("huge", "returned 1e+39, not a finite number in float32"),
        ("text", "'1.0'"),
        ("few", "for 4 samples"),
        ("scalar", "returned 1.0"),
        ("string", "returned '1111'"),
        ("object", "object"),
    ],
)
def test_a_failed_call_masks_its_prompt_and_no_other(deed, evil, reason):
    rewards, failures = score(deed, step(["good", evil, "good", "good", "good"]))
    assert np.isnan(rewards[4:8]).all()
    assert (rewards[:4] == 1).all() and (rewards[8:] == 1).all()
    assert len(failures) == 4
    assert all(line.startswith("prompt 1: ") and reason in line for line in failures)


def test_a_reward_that_float32_still_holds_is_taken(deed):
    rewards, failures = score(deed, step(["largest"]))
    assert not failures and rewards.tolist() == [np.float32(3.4e38)] * 4


def test_every_prompt_may_fail_in_one_step(deed):
    texts = ["exit", "hang", "raise", "exit", "nan", "good", "exit"]
    rewards, failures = score(deed, step(texts))
    assert len(failures) == 24 and np.flatnonzero(~np.isnan(rewards)).tolist() == [20, 21, 22, 23]


def test_none_is_masked_and_no_failure(deed):
    rewards, failures = score(deed, step(["None", "half"]))
    assert np.isnan(rewards[:6]).all() and rewards[6:].tolist() == [0.5, 0.5]
    assert len(failures) == 1 and failures[0].startswith("prompt 1: ")


def test_async_prompts_run_together_and_time_out_alone(functions):
    with runner_of(f"{functions}:slow_async", timeout_s=1.0) as runner:
        start = time.monotonic()
        rewards, failures = score(runner, step(["good"] * 9 + ["bad"] + ["good"] * 10, 2))
        seconds = time.monotonic() - start
    assert seconds < 3  # one after the other they would take 3.8 s and the time-out
    assert np.isnan(rewards[18:20]).all() and np.isfinite(np.delete(rewards, [18, 19])).all()
    assert len(failures) == 2 and "reward.timeout_s=1" in failures[0]


MEETING = """
import os, pathlib, time

def reward(prompts, completions, folder):
    folder = pathlib.Path(folder)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 3:
        time.sleep(0.01)
    return [1.0] * len(completions)
"""


def test_as_many_prompts_are_scored_at_the_same_time_as_there_are_workers(tmp_path):
    """Each waits until three processes have come."""
    (tmp_path / "meeting.py").write_text(MEETING)
    (folder := tmp_path / "here").mkdir()
    spec, more = f"{tmp_path / 'meeting.py'}:reward", {"folder": str(folder)}
    with runner_of(spec, timeout_s=30, workers=3, **more) as runner:
        rewards, failures = score(runner, step(["a", "b", "c"]))
    assert rewards.tolist() == [1.0] * 12 and not failures
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("no.such.module:f", "no.such.module|'no'"),
        ("lora_moe_rl.rewards:no_such", "no_such"),
        ("no_colon", "no_colon"),
        ("no_such_file.py:f", "no_such_file.py"),
    ],
)
def test_a_function_that_cannot_be_imported(spec, reason):
    with pytest.raises(ConfigError, match=reason):
        runner_of(spec, timeout_s=1)


def test_a_file_that_ends_its_process_at_import(tmp_path):
    (tmp_path / "evil.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(ConfigError, match="exit code 5"):
        runner_of(f"{tmp_path / 'evil.py'}:f", timeout_s=1)


def test_close_ends_the_processes(functions):
    runner = runner_of(f"{functions}:deed", timeout_s=1)
    processes = [worker.process for worker in runner.pool.workers]
    runner.close()
    assert all(process.poll() is not None for process in processes)


STARTS_OTHERS = """
import pathlib, subprocess, time

def reward(prompts, completions, file):
    # One in a session of its own, and one whose parent has ended.
    start = "setsid sleep 600 > /dev/null 2>&1 & echo $!"
    orphan = subprocess.run(["sh", "-c", start], capture_output=True, text=True).stdout
    child = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    pathlib.Path(file[0]).write_text(f"{child} {orphan}")
    time.sleep(600)
"""


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended may still be listed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_late_worker_ends_with_all_that_it_started(tmp_path):
    (tmp_path / "starts.py").write_text(STARTS_OTHERS)
    pids = tmp_path / "pids"
    with runner_of(f"{tmp_path}/starts.py:reward", timeout_s=5) as runner:
        _, failures = score(runner, step(["a"], 1, {"file": str(pids)}))
        assert "took longer than" in failures[0]
        started = [int(pid) for pid in pids.read_text().split()]
        assert len(started) == 2 and not any(map(lives, started))


def test_a_worker_that_cannot_start_again_is_ended(tmp_path, monkeypatch):
    """The file hangs from its third import on: two workers start, the one after them does not."""
    (tmp_path / "once.py").write_text(
        "import os, pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / f'{os.getpid()}.pid').touch()\n"
        "if len(list(folder.glob('*.pid'))) > 2: time.sleep(600)\n"
        "def reward(completions): os._exit(3)\n"
    )
    with runner_of(f"{tmp_path}/once.py:reward", timeout_s=60) as runner:
        monkeypatch.setattr(pool, "START_TIMEOUT_S", 5.0)
        _, failures = score(runner, step(["a", "b", "c"], 1))
        reasons = ["exit code 3", "exit code 3", "could not be started again"]
        assert all(any(reason in line for line in failures) for reason in reasons)
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        assert len(pids) >= 3 and not any(map(lives, pids))


def test_the_worker_imports_no_torch():
    code = "import sys, lora_moe_rl.rewards.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_completion_that_math_verify_never_comes_back_from():
    """It computes what a model wrote; the process is ended, and the sample has no reward, but the
    others of its prompt have theirs."""
    (a, _), (b, _) = step(["a", "b"], 1, {"answer": "7"})
    written = ["\\boxed{6}", "\\boxed{9^{9^9}}", "\\boxed{7}"]
    groups = [(a, [sample_of(1, text) for text in written]), (b, [sample_of(1, "\\boxed{7}")])]
    with runner_of("lora_moe_rl.rewards:math_verify", timeout_s=4) as runner:
        rewards, (failure,) = score(runner, groups)
    assert "took longer than reward.timeout_s=4" in failure
    np.testing.assert_array_equal(rewards, [0.0, np.nan, 1.0, 1.0])


@pytest.mark.parametrize("style", ["verl", "verl's batches", "TRL", "TRL, and says so"])
def test_who_is_scored_by_itself_fails_by_itself(style, tmp_path):
    """What functions of the whole prompt may compare is never scored one by one."""
    file = tmp_path / "ends.py"
    file.write_text(
        """
import os

def verls(solution_str, ground_truth, **kwargs):
    if solution_str == "end":
        os._exit(3)
    return {"score": float(solution_str), "length": len(solution_str)}

def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [verls(one, "") for one in solution_strs]

def whole(completions, log_extra, log_metric, **kwargs):
    if "end" in completions:
        os._exit(3)
    log_extra("length", [len(text) for text in completions])
    log_metric("calls", len(completions))
    return [float(text) for text in completions]

def each(completions, log_extra, log_metric, **kwargs):
    return whole(completions, log_extra, log_metric)

each.by_sample = True
"""
    )
    names = {"verl": "verls", "verl's batches": "batch", "TRL": "whole", "TRL, and says so": "each"}
    name = names[style]
    samples = [sample_of(1, text) for text in ("0.5", "end", "1")]
    prompt = Prompt(3, "p", [1], {"answer": "7"})
    with runner_of(f"{file}:{name}", timeout_s=30) as runner:
        scores = asyncio.run(runner.score(prompt, samples))
    alone = name in ("verls", "each")
    assert len(scores.failures) == (1 if alone else 3)
    assert all("exit code 3" in one for one in scores.failures)
    np.testing.assert_array_equal(scores.rewards, [0.5, np.nan, 1.0] if alone else [np.nan] * 3)
    assert scores.details.extra == ({"length": [3, None, 1]} if alone else {})
    assert scores.details.metrics == ({"calls": [1.0, 1.0]} if name == "each" else {})


def test_a_worker_whose_parent_is_gone_ends_without_a_word():
    ours, theirs = multiprocessing.Pipe()
    command = [sys.executable, "-m", "lora_moe_rl.rewards.worker", str(theirs.fileno())]
    worker = subprocess.Popen(
        [*command, "lora_moe_rl.rewards:exact_match", "{}"],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    ours.close()
    theirs.close()
    assert (worker.communicate(timeout=60)[1], worker.returncode) == (b"", -signal.SIGKILL)
