"""Which runs are found, and that nothing else is."""

import json

from recorded_run import record

from lora_moe_rl.page.runs import Runs


def test_runs_are_found_below_a_directory_by_their_paths_and_a_run_itself_as_a_dot(tmp_path):
    record(tmp_path / "a", range(1, 3))
    record(tmp_path / "sweep" / "b", range(1, 2))
    record(tmp_path / ".hidden" / "c", range(1, 2))
    (tmp_path / "other").mkdir()
    assert sorted(run.name for run in Runs(tmp_path).look()) == ["a", "sweep/b"]
    (run,) = Runs(tmp_path / "a").look()
    assert run.name == "."
    about = run.summary()
    assert (about["step"], about["steps"], about["algorithm"]) == (2, 6, "grpo")
    with (tmp_path / "a/metrics.jsonl").open("a") as file:  # an evaluation that came late
        file.write('{"step": 1, "eval/step": 1, "eval/sums/avg": 0.5}\n')
    assert run.summary()["step"] == 2
    many = {f"eval/sums/kind={number}/avg": 0.5 for number in range(2000)}
    with (tmp_path / "a/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "eval/step": 3, **many}) + "\n")
    assert run.summary()["step"] == 3


def test_a_name_that_leads_out_of_the_directory_is_no_run(tmp_path):
    record(tmp_path / "secret", range(1, 2))
    record(tmp_path / "runs" / "mine", range(1, 2))
    runs = Runs(tmp_path / "runs")
    for name in ("../secret", "mine/../../secret", str(tmp_path / "secret"), "", ".", "mine/"):
        assert runs.get(name) is None, name
    assert runs.get("mine") is not None


def test_links_that_lead_out_of_the_directory_are_not_followed(tmp_path):
    record(tmp_path / "secret", range(1, 2))
    root = tmp_path / "runs"
    run_dir = record(root / "mine", range(1, 2))
    (root / "linked").symlink_to(tmp_path / "secret")
    assert [run.name for run in Runs(root).look()] == ["mine"]
    run_dir.samples_file.unlink()
    run_dir.samples_file.symlink_to(tmp_path / "secret" / "samples.jsonl")
    assert not Runs(root).look()


def test_a_run_that_begins_while_one_looks_is_found(tmp_path):
    runs = Runs(tmp_path)
    assert runs.get("late") is None
    record(tmp_path / "late", range(1, 2))
    late = runs.get("late")
    assert late is not None and runs.get("late") is late
