"""What a run says at its end."""

from recorded_run import record

from lora_moe_rl.page import link
from lora_moe_rl.telemetry.report import finish


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
