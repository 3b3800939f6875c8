"""What Ray says while a run goes on."""

from __future__ import annotations

import logging

import ray
from ray._private import worker

from lora_moe_rl.cluster import ray_start


def test_an_error_that_each_of_several_results_has_is_no_error_of_rays(monkeypatch, caplog):
    """An engine that dies is told of once, whatever its requests were to return."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    monkeypatch.setattr(worker, "_unhandled_error_handler", worker._unhandled_error_handler)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(
        worker.Worker, "deserialize_objects", lambda *_: [ValueError("Traceback\nit has died")]
    )
    ray_start.init_ray()
    worker.Worker().raise_errors([], [])
    (said,) = caplog.records
    assert said.levelno == logging.INFO and said.getMessage().endswith(": it has died")


def test_what_ray_would_print_to_stdout_is_in_the_log(monkeypatch, capsys, caplog):
    """There `--json` has its lines, and nothing else."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    ray_start.init_ray()
    told = {"lines": ["A worker died."], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(told, ignore_prefix=False)
    assert capsys.readouterr().out == "" and caplog.messages == ["Ray: A worker died."]
