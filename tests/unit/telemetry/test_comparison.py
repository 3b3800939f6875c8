"""Runs side by side: which value is best, which is final, which settings differ."""

import json
import math
import struct

import pytest
from rich.console import Console

from lora_moe_rl import cli
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.recipes import resolve
from lora_moe_rl.errors import ConfigError, FileError, RunDirError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.telemetry import comparison
from lora_moe_rl.telemetry.metrics import MetricsWriter


def run_in(folder, records: list[dict], *arguments: str):
    config = resolve(override(RunConfig(), [f"logging.run_dir={folder}", *arguments]))
    with RunDir(config, False) as run_dir, MetricsWriter(run_dir, config) as metrics:
        for record in records:
            metrics.write(record)
    return run_dir.path


def steps(rewards: list[float], kl: list[float]) -> list[dict]:
    return [
        {"step": step, "reward/mean": reward, "mismatch/kl": k, "reward/std": 0.5, "time/step": 1.0}
        for step, (reward, k) in enumerate(zip(rewards, kl, strict=True), 1)
    ]


@pytest.fixture
def two(tmp_path):
    first = steps([0.1, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5], [3e-3, 1e-3, 2e-3, 4e-3, 4e-3, 4e-3, 4e-3])
    first.insert(0, {"step": 0, "eval/step": 0, "eval/sums/avg": 0.25})
    first.insert(4, {"step": 3, "eval/step": 3, "eval/sums/avg": 0.75})
    second = steps([0.2, math.nan, 0.4], [1e-3, 1e-3, 1e-3])
    return [
        run_in(tmp_path / "one/run", first, "trainer.lr=0.5"),
        run_in(tmp_path / "two/run", second, "trainer.lr=0.25", "algorithm.group_size=4"),
    ]  # fmt: skip


def test_final_is_the_mean_of_the_last_five_and_best_goes_by_the_metrics_direction(two, capsys):
    assert cli.main(["compare", *map(str, two), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one = {name: of["runs"]["one/run"] for name, of in found["metrics"].items()}
    two_ = {name: of["runs"]["two/run"] for name, of in found["metrics"].items()}
    assert one["reward/mean"] == {"final": 0.5, "best": {"value": 0.9, "step": 2}, "steps": 7}
    assert one["mismatch/kl"]["best"] == {"value": 1e-3, "step": 2}
    assert one["mismatch/kl"]["final"] == pytest.approx((2e-3 + 4 * 4e-3) / 5)
    # A NaN is no value: two of the three steps have one.
    assert two_["reward/mean"]["final"] == pytest.approx(0.3)
    assert two_["reward/mean"]["steps"] == 2
    assert one["eval/sums/avg"]["best"] == {"value": 0.75, "step": 3}
    assert one["eval/sums/avg"]["final"] == 0.75  # of the last adapter, and of no other
    assert two_["eval/sums/avg"] == {"final": None, "best": None, "steps": 0}


def test_the_settings_that_differ_are_told_and_no_others(two, capsys):
    assert cli.main(["compare", *map(str, two), "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings == {
        "trainer.lr": {"one/run": "0.5", "two/run": "0.25"},
        "algorithm.group_size": {"one/run": "8", "two/run": "4"},
    }


def test_of_a_data_set_that_one_run_has_what_was_set_is_told(tmp_path, capsys):
    records = steps([0.1], [1e-3])
    held_out = ["eval.sets.sums.path=/sums.jsonl", "eval.sets.sums.samples=4"]
    runs = run_in(tmp_path / "one", records, *held_out), run_in(tmp_path / "two", records)
    assert cli.main(["compare", *map(str, runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {
        "eval.sets.sums.path": {"one": "/sums.jsonl", "two": "-"},
        "eval.sets.sums.samples": {"one": "4", "two": "-"},
    }


def test_texts_of_users_are_shown_as_they_are(tmp_path, capsys):
    """Which is what rich takes for its markup: brackets, and a tag that nothing opened."""
    records = steps([0.5], [1e-3])
    texts = ("[INST] think [/INST]", "[bold]answer[red] in [brackets]")
    runs = [
        run_in(tmp_path / f"run[{n}]", records, f"data.system_prompt={text}")
        for n, text in enumerate(texts)
    ]
    assert cli.main(["compare", *map(str, runs), "--png", str(tmp_path / "a.bar")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (*texts, "run[0]", "run[1]", "a.bar"):
        assert text in shown
    assert (tmp_path / "a.bar").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["compare", *map(str, runs), "--png", str(tmp_path)]) == 2
    assert "is a directory; name a file in it" in capsys.readouterr().err
    assert not tmp_path.with_suffix(".png").exists()


def test_the_table_marks_the_better_final_value_where_one_is_better(two):
    runs = comparison.read_runs(two)
    assert comparison._marked([0.5, math.nan, 0.3], "up") == ["[bold]0.5[/bold]", "-", "0.3"]
    assert comparison._marked([0.5, 0.3], "down") == ["0.5", "[bold]0.3[/bold]"]
    assert comparison._marked([0.5, 0.3], "") == ["0.5", "0.3"]
    assert comparison._marked([0.5, 0.5], "up") == ["0.5", "0.5"]
    wide = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in comparison.tables(runs, ["reward/mean", "reward/std"]):
        wide.print(table)
    text = wide.export_text()
    assert "highest" in text and "0.9 @ 2" in text and "lowest" not in text


def test_a_picture_is_drawn_and_names_of_others_are_understood(two, tmp_path, capsys):
    picture = tmp_path / "out.png"
    arguments = ["--metrics", "critic/score/mean,time/step,step_time", "--png", str(picture)]
    assert cli.main(["compare", *map(str, two), *arguments]) == 0
    assert "reward/mean" in capsys.readouterr().out
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">I", content[16:20])[0] > 1000


def test_what_cannot_be_compared_is_refused_by_name(two, tmp_path):
    with pytest.raises(RunDirError, match="is not a run directory: it has no config.yaml"):
        comparison.main([str(two[0]), str(tmp_path)])
    with pytest.raises(ConfigError, match="no run has logged the metric 'reward/men'.*reward/mean"):
        comparison.main([*map(str, two), "--metrics", "reward/men"])
    with pytest.raises(ConfigError, match="a run is named twice"):
        comparison.main([str(two[0]), str(two[0])])
    empty = run_in(tmp_path / "empty", [])
    with pytest.raises(RunDirError, match="has no step on record yet"):
        comparison.main([str(two[0]), str(empty)])
    with pytest.raises(FileError, match="--png .*none/x.png: there is no directory"):
        comparison.main([*map(str, two), "--png", str(tmp_path / "none/x.png")])


def test_runs_without_a_metric_to_compare_yet_are_said_to_be_so(tmp_path):
    folder = run_in(tmp_path / "a", [])
    own = {"step": 0, "eval/step": 0, "eval/held/own": 1.0}  # of an algorithm's own
    (folder / "metrics.jsonl").write_text(json.dumps(own) + "\n")
    with pytest.raises(RunDirError, match="none of these runs has a metric to compare yet"):
        comparison.main([str(folder), "--png", str(tmp_path / "a.png")])
