"""metrics.jsonl, wandb offline, the console's line, the report and the curves."""

import io
import json
import math
import re
import struct
import time

import numpy as np
import pytest
from rich.console import Console

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.recipes import resolve
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.telemetry import console, report
from lora_moe_rl.telemetry.metrics import MetricsWriter, read_metrics


def config_in(folder, *arguments: str) -> RunConfig:
    return resolve(override(RunConfig(), [f"logging.run_dir={folder}", *arguments]))


def record(step: int, **changes: float) -> dict[str, float]:
    metrics = {
        "step": step,
        "reward/mean": 0.1 * step,
        "reward/std": 0.4,
        "loss/policy": -0.00123,
        "mismatch/kl": 1.5e-12,
        "mismatch/max_abs_logprob_diff": 3e-6,
        "replay/coverage": 1.0,
        "refit/seconds": 0.0512,
        "rollout/tokens_per_second": 1834.4,
        "time/rollout": 0.55,
        "time/reward": 0.01,
        "time/train": 0.5,
        "time/refit": 0.06,
        "time/step": 1.14,
    }
    return metrics | changes


def test_a_line_a_step_at_once_and_valid_json(tmp_path):
    config = config_in(tmp_path / "run")
    with RunDir(config, False) as run_dir, MetricsWriter(run_dir, config) as metrics:
        metrics.write(
            {
                "step": 1,
                "reward/mean": math.nan,
                "loss/kl": -math.inf,
                "rollout/tokens": np.int64(3),
            }
        )
        text = run_dir.metrics_file.read_text()  # flushed, though the file is still open
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text) == {
        "step": 1,
        "reward/mean": None,
        "loss/kl": None,
        "rollout/tokens": 3,
    }
    assert len(read_metrics(run_dir)) == 1


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    config = config_in(tmp_path / "run")
    with RunDir(config, False) as run_dir:
        run_dir.metrics_file.write_text('{"step": 1}\n{"step": 2, "rewa')
    assert read_metrics(run_dir) == [{"step": 1}]


def test_a_step_reads_in_columns():
    lines = console.StepLines(RunConfig(trainer={"steps": 200}))
    more = {"reward/solved_none": 0.25, "rollout/truncated": 0.5, "policy/entropy": 1.5}
    line = lines.line(record(133, **more, **{"rollout/response_length": 6.25}))
    cells = line.split()
    assert cells[:6] == ["133/200", "13.300", "25%", "6.2", "50%", "1.500"]
    # 67 steps of 1.14 s are left
    assert cells[-4:] == ["0.55", "0.50", "1.14", "1:16"]
    assert "loss" not in lines.header and len(line) == len(lines.header) <= 100
    empty = lines.line({"step": 134, "reward/mean": math.nan})
    assert empty.split()[:3] == ["134/200", "-", "-"] and len(empty) == len(line)


def test_the_loss_is_shown_where_it_says_something():
    lines = console.StepLines(RunConfig(algorithm={"epochs": 2}))
    assert "-1.23e-03" in lines.line(record(1)) and "loss" in lines.header


def test_ahead_of_training_a_line_says_who_waits_and_how_much_of_the_step():
    lines = console.StepLines(RunConfig(trainer={"steps": 2}, schedule={"lag": 1}))
    waits = {"idle/trainer": 0.34, "idle/engines": 0.1}
    line = lines.line(record(1, **waits))
    assert line.split()[-3:-1] == ["trainer", "34%"] and len(line) == len(lines.header)
    assert lines.header.split()[-2:] == ["waiting", "left"]
    line = lines.line(record(2, **waits | {"idle/engines": 0.5}))
    assert line.split()[-3:-1] == ["engines", "50%"]
    assert "waiting" not in console.StepLines(RunConfig()).header


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3700, "1:01:40"), (273_600, "3d 04h")]
)
def test_time_that_is_left(seconds, text):
    lines = console.StepLines(RunConfig(trainer={"steps": 2}))
    assert lines.line({"step": 1, "time/step": seconds}).endswith(f" {text}")


def test_the_states_of_actors_are_told_in_a_pipe_when_they_change(capsys):
    states = {"trainer-0": "starting", "engine-0": "starting"}
    with console.Starting() as starting:
        starting.begin("starting actors")
        starting.watch(lambda: dict(states))
        time.sleep(3 * console.POLL_S)
        states["trainer-0"] = "ready"
        time.sleep(3 * console.POLL_S)
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"starting actors, \d s: trainer-0 starting, engine-0 starting", first)
    assert re.fullmatch(r"starting actors, \d s: trainer-0 ready, engine-0 starting", second)


def test_on_a_terminal_time_and_step_are_shown(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(console, "_console", Console(file=shown, force_terminal=True, width=100))
    with console.Starting() as starting:
        starting.begin("looking at the reward")
        time.sleep(4 * console.POLL_S)
    seconds = {int(one) for one in re.findall(r"looking at the reward, (\d+) s", shown.getvalue())}
    assert len(seconds) >= 2 and max(seconds) < 60


def test_the_progress_bar_is_silent_in_a_pipe(capsys):
    with console.progress(8, RunConfig()) as progress:
        progress(4)
    assert capsys.readouterr().out == ""


def test_the_report_compares_first_and_last_steps(tmp_path):
    config = config_in(tmp_path / "run")
    with RunDir(config, False) as run_dir, MetricsWriter(run_dir, config) as metrics:
        for step in range(1, 21):
            metrics.write(record(step, **({"reward/mean": math.nan} if step == 2 else {})))
    records = read_metrics(run_dir)
    wide = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    wide.print(report.table(records))
    (reward,) = [line for line in wide.export_text().splitlines() if "│ reward  " in line]
    # steps 1, 3, 4, 5 and steps 16 to 20
    assert [cell.strip() for cell in reward.split("│")[2:4]] == ["0.325", "1.800"]


@pytest.mark.parametrize("steps", [1, 2, 100])
@pytest.mark.parametrize("mismatch", [0.0, math.nan, 1e-9])
def test_curves_are_drawn_for_any_run(tmp_path, steps, mismatch):
    records = [json.loads(json.dumps(record(i + 1))) for i in range(steps)]
    for r in records:
        r["mismatch/kl"] = r["mismatch/max_abs_logprob_diff"] = mismatch
    report.draw(records, tmp_path / "curves.png", "run")
    content = (tmp_path / "curves.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1500 and height > 400


def test_finish_without_a_step_says_nothing(tmp_path, capsys):
    config = config_in(tmp_path / "run")
    with RunDir(config, False) as run_dir:
        report.finish(run_dir)
    assert capsys.readouterr().out == ""
    assert not run_dir.curves_file.exists()


def test_the_curves_show_evaluations_also_the_one_before_the_first_step(tmp_path):
    records = [record(step) for step in (1, 2, 3)]
    found = [
        {"step": step, "eval/step": step, "eval/sums/avg": 0.5, "eval/sums/avg_ci95": width}
        for step, width in ((0, 0.1), (3, None))
    ]
    report.draw(records, tmp_path / "plain.png", "run")
    report.draw(records, tmp_path / "with.png", "run", found)
    first, second = ((tmp_path / f"{name}.png").read_bytes() for name in ("plain", "with"))
    assert first != second
