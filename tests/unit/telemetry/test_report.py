"""What a run says at its end."""

from recorded_run import record

from lora_moe_rl.page import link
from lora_moe_rl.telemetry.report import finish, rows, table


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
    assert titles(6) == ["", "steps 1-5", "steps 2-6", "over all"]


def test_skipped_updates_are_summed_up_where_there_are_any():
    def labels(*skipped: float | None) -> list[list[str]]:
        records = [{"step": i, "optim/skipped": one} for i, one in enumerate(skipped)]
        return [[row[0], row[-1]] for row in rows(records)]

    assert labels(0.0, 0.0, None) == []
    assert labels(0.0, 1.0, 2.0) == [["skipped updates (sum)", "3"]]
