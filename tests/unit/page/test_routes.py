"""How often experts were chosen, in one step and in one layer."""

from recorded_run import LAYERS, loads_of, record

from lora_moe_rl.page import routes
from lora_moe_rl.page.routes import RouteLines


def test_a_step_has_all_layers_and_a_layer_all_steps(tmp_path):
    lines = RouteLines(record(tmp_path / "run").routes_file)
    found = lines.of_step(4)
    assert (found["first"], found["newest"]) == (1, 6)
    shown = {"step": 4, "replay": "r3", "layers": list(LAYERS), "loads": loads_of(4).tolist()}
    assert found["shown"] == shown
    loads = [loads_of(step)[2].tolist() for step in range(1, 7)]
    assert lines.of_layer(2) == {"layer": 2, "steps": [1, 2, 3, 4, 5, 6], "loads": loads}


def test_a_step_that_is_not_there_is_the_nearest_and_without_any_there_is_nothing(tmp_path):
    lines = RouteLines(record(tmp_path / "run").routes_file)
    newest = lines.of_step(None)
    assert newest["shown"]["step"] == 6 and lines.of_step(999) == newest
    assert lines.of_step(0)["shown"]["step"] == 1
    assert lines.of_layer(77) == {"layer": 77, "steps": [], "loads": []}
    none = {"first": None, "newest": None, "shown": None}
    assert RouteLines(tmp_path / "none.jsonl").of_step(None) == none


def test_of_a_long_run_steps_are_left_out_evenly_and_never_the_newest(tmp_path, monkeypatch):
    lines = RouteLines(record(tmp_path / "run").routes_file)
    monkeypatch.setattr(routes, "COLUMNS", 3)
    assert lines.of_layer(0)["steps"] == [2, 4, 6]
    monkeypatch.setattr(routes, "NUMBERS_SENT", 2 * len(LAYERS) * 8)
    some = lines.some()
    assert [one["step"] for one in some["records"]] == [3, 6]
    assert (some["first"], some["newest"]) == (1, 6)


def test_steps_that_a_resumed_run_has_done_again_are_those_of_the_second_time(tmp_path):
    run_dir = record(tmp_path / "run")
    lines = RouteLines(run_dir.routes_file)
    assert lines.of_step(None)["newest"] == 6
    run_dir.rewind(3)
    assert lines.of_step(None)["newest"] == 3
    record(tmp_path / "run", range(4, 6), True)
    assert lines.of_layer(0)["steps"] == [1, 2, 3, 4, 5]
    text = run_dir.routes_file.read_text()
    assert [f'{{"step": {step},' in text for step in range(1, 7)] == [True] * 5 + [False]
    assert text.count("\n") == 5
