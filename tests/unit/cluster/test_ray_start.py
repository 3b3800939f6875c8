"""What Ray says while a run goes on."""

from __future__ import annotations

import logging

import ray
from ray._private import worker

from lora_moe_rl.cluster import ray_start


def test_what_ray_would_print_to_stdout_is_in_the_log(monkeypatch, capsys, caplog):
    """There `--json` has its lines, and nothing else."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    ray_start.init_ray()
    told = {"lines": ["A worker died."], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(told, ignore_prefix=False)
    assert capsys.readouterr().out == "" and caplog.messages == ["Ray: A worker died."]
