"""What a run says at its end."""

import pytest
from matplotlib.figure import Figure
from recorded_run import record

from lora_moe_rl.page import link
from lora_moe_rl.telemetry.report import MOST_BARS, draw, finish, rows, table


def test_a_run_ends_with_the_line_of_its_page_and_its_files_are_there(tmp_path, capsys):
    run_dir = record(tmp_path / "runs" / "[mine]")  # rich would take brackets for a style
    finish(run_dir)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"page     {link.line(run_dir.path)}"
    assert "view" in lines[-1] and "%5Bmine%5D".replace("%", "%25") in lines[-1]
    assert run_dir.curves_file.stat().st_size > 0


def test_a_run_without_a_step_has_nothing_to_show(tmp_path, capsys):
    finish(record(tmp_path / "mine", range(1, 1)))
    assert capsys.readouterr().out == ""


def test_first_and_last_steps_are_shown_apart_where_they_are_others(tmp_path):
    def titles(steps: int) -> list[str]:
        columns = table(
            [{"step": step, "reward/mean": 0.5} for step in range(1, steps + 1)]
        ).columns
        return [str(column.header) for column in columns]

    assert titles(5) == ["", "over all"]
    assert titles(6) == ["", "steps 1-3", "steps 4-6", "over all"]
    assert titles(9) == ["", "steps 1-4", "steps 6-9", "over all"]
    assert titles(10) == ["", "steps 1-5", "steps 6-10", "over all"]


def test_skipped_updates_are_summed_up_where_there_are_any():
    def labels(*skipped: float | None) -> list[list[str]]:
        records = [{"step": i, "optim/skipped": one} for i, one in enumerate(skipped)]
        return [[row[0], row[-1]] for row in rows(records)]

    assert labels(0.0, 0.0, None) == []
    assert labels(0.0, 1.0, 2.0) == [["skipped updates (sum)", "3"]]


def test_a_picture_of_many_steps_has_bars_of_several_that_stand_for_all_of_them(
    tmp_path, monkeypatch
):
    figures, save = [], Figure.savefig

    def saved(figure, path):
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(Figure, "savefig", saved)
    records = [
        {"step": i, "reward/mean": 0.5, "time/step": i / 1000, "time/train": i / 2000}
        for i in range(1, 1003)
    ]
    for some in (records[:40], records):
        draw(some, tmp_path / "curves.png", "mine")
    few, many = ([bar for bar in one.axes[2].patches if bar.get_height()] for one in figures)
    assert len(few) == 2 * 40  # train and the rest
    assert MOST_BARS < len(many) <= 2 * MOST_BARS
    means = [sum(i / 2000 for i in range(k, k + 4)) / 4 for k in range(1, 1000, 4)]
    assert [bar.get_height() for bar in many[:250]] == pytest.approx(means)
    assert many[250].get_height() == pytest.approx((1001 + 1002) / 4000)
    assert figures[1].axes[2].get_title("left") == "seconds a step, means of 4 steps"
