"""Traces of chosen updates."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from lora_moe_rl.config import RunConfig
from lora_moe_rl.trainer.traces import path_of, traced


def config_in(folder, **settings) -> RunConfig:
    return RunConfig(logging={"run_dir": str(folder), **settings})


def test_a_chosen_step_is_traced_and_names_its_ops(tmp_path):
    config = config_in(tmp_path, profile=(2,))
    for step in (1, 2, 3):
        with traced(config, "cpu", 1, step):
            _ = torch.ones(3, 5) @ torch.ones(5, 7)
    path = path_of(tmp_path, 1, 2)
    assert [one.name for one in path.parent.iterdir()] == ["trainer-1-step-2.json"] == [path.name]
    events = json.loads(path.read_text())["traceEvents"]
    (product,) = [event for event in events if event.get("name") == "aten::mm"]
    assert product["args"]["Input Dims"][:2] == [[3, 5], [5, 7]]


def test_what_an_update_raises_is_raised_and_leaves_no_trace(tmp_path):
    with pytest.raises(KeyError), traced(config_in(tmp_path, profile=(1,)), "cpu", 0, 1):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_disk_that_refuses_costs_the_trace_alone(tmp_path, caplog):
    (tmp_path / "traces").write_text("in its place")
    with caplog.at_level(logging.WARNING), traced(config_in(tmp_path, profile=(1,)), "cpu", 0, 1):
        _ = torch.ones(2) + 1
    assert "no trace" in caplog.text and "trainer-0-step-1.json" in caplog.text
