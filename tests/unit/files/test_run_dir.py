"""The run directory: refusals, the lock, appending, and going back to a step."""

import dataclasses
import errno
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import write_checkpoint

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.recipes import load_config, resolve
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import FunctionRewards
from lora_moe_rl.errors import RunDirError
from lora_moe_rl.files.jsonl import read_jsonl, tail
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.telemetry.metrics import MetricsWriter, read_metrics


def config_in(folder, *arguments: str) -> RunConfig:
    return resolve(override(RunConfig(), [f"logging.run_dir={folder}", *arguments]))


def run_steps(config: RunConfig, steps, resume=False) -> RunDir:
    with RunDir(config, resume) as run_dir, MetricsWriter(run_dir, config) as metrics:
        if resume:
            run_dir.write_config()
        for step in steps:
            metrics.write({"step": step, "reward/mean": step / 10})
    return run_dir


def groups_of(step: int) -> tuple[list[Group], list[Signal]]:
    """Two groups of four samples, numbered throughout; the rewards and advantages are they too."""
    groups = []
    for i in range(2):
        response = Segment.sampled([7, 8, 9], np.zeros(3), step)
        response.versions[2] = step + 1
        segments = (Segment.given("user", [5, 6]), response)
        samples = [Sample(segments, "stop", f"response {4 * i + k}") for k in range(4)]
        prompt = Prompt(step * 10 + i, f"{i}+1=", token_ids=[5, 6], data_row=7 + i)
        rewards = np.arange(4 * i, 4 * i + 4, dtype=np.float32)
        groups.append(Group(prompt, samples, None, rewards))
    return groups, [Signal.of_samples(group, group.rewards) for group in groups]


def test_the_settings_of_a_run_that_goes_on_are_saved_when_it_does(tmp_path):
    """Not before: they may be refused, and then those of before are still those to go on with."""
    before = config_in(tmp_path / "run")
    run_dir = run_steps(before, [1])
    with RunDir(config_in(tmp_path / "run", "seed=3"), resume=True) as again:
        assert load_config(str(run_dir.config_file)) == before
        again.write_config()
    assert load_config(str(run_dir.config_file)).seed == 3


def test_the_saved_config_runs_again(tmp_path):
    config = config_in(tmp_path / "run", "adapter.rank=8", "replay.mode=off", "trainer.lr=3e-5")
    run_dir = run_steps(config, [1])
    assert load_config(str(run_dir.config_file)) == config


def test_a_directory_that_holds_a_run_is_refused(tmp_path):
    config = config_in(tmp_path / "run")
    run_steps(config, [1])
    with pytest.raises(RunDirError, match=r"holds a run already.*--resume.*logging.run_dir"):
        run_steps(config, [1])
    run_dir = run_steps(config, [2], resume=True)
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2]


def test_a_directory_that_holds_a_checkpoint_is_refused(tmp_path):
    config = config_in(tmp_path / "run")
    with RunDir(config, False) as run_dir, write_checkpoint(run_dir.checkpoints, 1, 2, {}):
        pass
    with pytest.raises(RunDirError, match="holds a run already"):
        RunDir(config, False).__enter__()


def test_a_run_that_failed_before_its_first_step_may_start_again(tmp_path):
    config = config_in(tmp_path / "run")
    run_steps(config, [])
    run_steps(config, [1])


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_whose_disk_was_full_at_its_start_may_start_again(tmp_path, monkeypatch, killed):
    config, replace = config_in(tmp_path / "run"), os.replace

    def full(*paths):
        raise KeyboardInterrupt if killed else OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises((RunDirError, KeyboardInterrupt)):
        run_steps(config, [])
    monkeypatch.setattr(os, "replace", replace)
    run_steps(config, [1])


def test_another_directory_with_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(RunDirError, match="is not empty and holds no run"):
        run_steps(config_in(tmp_path), [1])


def test_nothing_to_resume(tmp_path):
    with pytest.raises(RunDirError, match="no run in .* to resume"):
        run_steps(config_in(tmp_path / "run"), [1], resume=True)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirError, match="cannot use .*/run as the run directory"):
        run_steps(config_in(tmp_path / "run"), [1])


def test_resume_with_another_rank_is_refused(tmp_path):
    run_steps(config_in(tmp_path / "run", "adapter.rank=8"), [1])
    with pytest.raises(RunDirError, match="adapter.rank was 8 and is now 16.*adapter.resize=true"):
        run_steps(config_in(tmp_path / "run"), [2], resume=True)
    run_steps(config_in(tmp_path / "run", "adapter.resize=true"), [2], resume=True)


def test_resizing_does_not_change_modules_or_layouts(tmp_path):
    run_steps(config_in(tmp_path / "run"), [1])
    for setting in ("adapter.targets=q_proj", "adapter.init=olora", "adapter.init_from=elsewhere"):
        config = config_in(tmp_path / "run", setting, "adapter.resize=true")
        with pytest.raises(
            RunDirError, match=f"{setting.split('=')[0]} was .*new with logging"
        ) as e:
            run_steps(config, [2], resume=True)
        assert "adapter.resize=true" not in str(e.value)


def test_the_adapter_that_a_run_is_measured_against_may_have_moved(tmp_path):
    """Its fingerprint tells whether it is the same one."""
    start = ("algorithm.reference=start", "algorithm.kl_coef=0.1")
    run_steps(config_in(tmp_path / "run", *start, "adapter.init_from=here"), [1])
    there = config_in(tmp_path / "run", *start, "adapter.init_from=there")
    run_steps(there, [2], resume=True)
    with pytest.raises(RunDirError, match="adapter.init_from was .*there and is now .*here"):
        run_steps(config_in(tmp_path / "run", "adapter.init_from=here"), [3], resume=True)


@pytest.mark.parametrize("now", ["{}", '{"*.up":4,"experts.*":8}'])
def test_resume_with_other_patterns_is_refused(tmp_path, now):
    before = 'adapter.rank_pattern={"experts.*":8,"*.up":4}'  # the last that matches counts
    run_steps(config_in(tmp_path / "run", before), [1])
    with pytest.raises(RunDirError, match="adapter.rank_pattern was .* and is now"):
        run_steps(config_in(tmp_path / "run", f"adapter.rank_pattern={now}"), [2], resume=True)
    run_steps(config_in(tmp_path / "run", before), [2], resume=True)


def test_resume_with_more_steps_is_fine(tmp_path):
    run_steps(config_in(tmp_path / "run"), [1])
    config = config_in(tmp_path / "run", "trainer.steps=400")
    run_dir = run_steps(config, [2], resume=True)
    assert load_config(str(run_dir.config_file)).trainer.steps == 400


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    config = config_in(tmp_path / "run")
    code = (
        "import sys\n"
        "from lora_moe_rl.config.recipes import load_config\n"
        "from lora_moe_rl.files.run_dir import RunDir\n"
        "try: RunDir(load_config(sys.argv[1]), True).__enter__()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    with RunDir(config, False) as run_dir:
        command = [sys.executable, "-c", code, str(run_dir.config_file)]
        output = subprocess.run(command, capture_output=True, text=True).stdout
    assert output.startswith("RunDirError") and "is in use by another run" in output
    with RunDir(config, False):  # the lock is free again
        pass


def test_rewind_cuts_and_keeps_what_it_cut(tmp_path):
    config = config_in(tmp_path / "run")
    run_dir = run_steps(config, range(1, 6))
    with open(run_dir.metrics_file, "a") as file:
        file.write('{"step": 6, "rew')  # the process died here
    for step in range(1, 6):
        run_dir.write_samples(step, *groups_of(step))
        run_dir.write_order(step, step - 1, groups_of(step)[0])
    run_dir.rewind(3)
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2, 3]
    assert {record["step"] for record in read_jsonl(run_dir.samples_file)} == {1, 2, 3}
    assert [record["step"] for record in read_jsonl(run_dir.order_file)] == [1, 2, 3]
    backup = (run_dir.path / "metrics.jsonl.bak").read_text().splitlines()
    assert [json.loads(line)["step"] for line in backup[:2]] == [4, 5]
    assert backup[2] == '{"step": 6, "rew'
    run_steps(config, [4], resume=True)
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2, 3, 4]


def test_the_order_says_which_prompts_a_step_trained_and_under_which_versions(tmp_path):
    run_dir = run_steps(config_in(tmp_path / "run"), [])
    run_dir.write_order(5, 6, groups_of(5)[0])
    groups = [{"drawn": row, "versions": [5, 6], "longest": 3} for row in (50, 51)]
    assert list(read_jsonl(run_dir.order_file)) == [{"step": 5, "version": 6, "groups": groups}]


def test_separators_of_unicode_end_no_line(tmp_path):
    """U+2028, U+2029 and U+0085 end a line for str.splitlines, and none for JSON."""
    groups, signals = groups_of(1)
    text = "one\u2028two\u2029three\u0085four\r\nfive"
    for group in groups:
        group.prompt = dataclasses.replace(group.prompt, text=text)
        group.samples = [dataclasses.replace(sample, text=text) for sample in group.samples]
    run_dir = run_steps(config_in(tmp_path / "run", "logging.samples_per_step=1"), [1, 2])
    for step in (1, 2):
        run_dir.write_samples(step, groups, signals)
    run_dir.rewind(1)
    (record,) = read_jsonl(run_dir.samples_file)
    assert record["step"] == 1 and record["prompt"] == record["response"] == text
    (cut,) = read_jsonl(run_dir.path / "samples.jsonl.bak")
    assert cut["step"] == 2 and cut["response"] == text


def test_a_sample_tells_what_each_function_gave_and_what_they_logged(tmp_path):
    config = config_in(tmp_path / "run", "logging.samples_per_step=8")
    groups, signals = groups_of(1)
    told, silent = groups[0].details, groups[1].details
    told.by_function["right"] = FunctionRewards(1.0, np.array([1, 0, np.nan, 1], np.float32))
    told.extra["right/why"] = ["a", "b", "c", "d"]
    told.reasons[2] = "prompt 10: m:f raised"
    assert not silent.by_function
    with RunDir(config, False) as run_dir:
        run_dir.write_samples(1, groups, signals)
    records = list(read_jsonl(run_dir.samples_file))
    assert [one["rewards"] for one in records[:4]] == [{"right": v} for v in (1, 0, None, 1)]
    assert [one["extra"]["right/why"] for one in records[:4]] == ["a", "b", "c", "d"]
    assert records[2]["failure"] == "prompt 10: m:f raised" and "failure" not in records[1]
    assert not {"rewards", "extra", "failure"} & records[4].keys()


def test_samples_are_spread_over_the_prompts(tmp_path):
    config = config_in(tmp_path / "run", "logging.samples_per_step=2")
    groups, signals = groups_of(3)
    groups[0].rewards[0], groups[1].rewards[0] = 1.0, math.nan
    with RunDir(config, False) as run_dir:
        run_dir.write_samples(3, groups, signals)
    first, second = read_jsonl(run_dir.samples_file)
    assert first == {
        "step": 3,
        "sample": 0,
        "drawn": 30,
        "row": 7,
        "prompt": "0+1=",
        "response": "response 0",
        "reward": 1.0,
        "advantage": 0.0,
        "finish_reason": "stop",
        "tokens": 3,
        "versions": [3, 4],
    }
    assert second["prompt"] == "1+1=" and second["reward"] is None and second["advantage"] == 4.0


def test_a_sample_of_several_turns_has_its_segments_and_what_was_said(tmp_path):
    config = config_in(tmp_path / "run", "logging.samples_per_step=1")
    groups, signals = groups_of(1)
    messages = ({"role": "assistant", "content": "?"}, {"role": "tool", "content": "3"})
    first = groups[0].samples[0]
    groups[0].samples[0] = dataclasses.replace(first, messages=messages)
    with RunDir(config, False) as run_dir:
        run_dir.write_samples(1, groups, signals)
    (record,) = read_jsonl(run_dir.samples_file)
    assert record["messages"] == list(messages)
    assert [one["author"] for one in record["segments"]] == [s.author for s in first.segments[1:]]
    assert sum(one["tokens"] for one in record["segments"]) == record["tokens"]


def test_no_samples_when_none_are_wanted(tmp_path):
    config = config_in(tmp_path / "run", "logging.samples_per_step=0")
    with RunDir(config, False) as run_dir:
        run_dir.write_samples(1, *groups_of(1))
    assert list(read_jsonl(run_dir.samples_file)) == []


def test_tail(tmp_path):
    path = tmp_path / "engine-0.log"
    assert tail(path, 3) == ""
    path.write_text("".join(f"line {i} {'x' * 50}\n" for i in range(1000)))
    assert [line.split()[1] for line in tail(path, 3).splitlines()] == ["997", "998", "999"]
    path.write_text("y" * 100_000)  # one endless line: not all of it
    assert len(tail(path, 3)) <= 2000
