"""Whole runs with Adam's moments and activations on the host."""

from __future__ import annotations

import pytest
from cli_run import RECIPE, trained
from test_golden import runs

pytestmark = pytest.mark.slow


def test_a_run_with_its_memory_on_the_host_is_the_usual_one_and_can_go_on_as_it(tmp_path):
    """Metrics but for clocks, samples and adapter are equal to the bit; it goes on from a usual
    run's checkpoint."""
    usual, offloaded = tmp_path / "usual", tmp_path / "offloaded"
    settings = "trainer.weight_decay=0.1", "logging.samples_per_step=8", "checkpoint.every=2"
    trained(usual, RECIPE, *settings, "trainer.steps=2")
    other = trained(offloaded, RECIPE, *settings, "trainer.steps=4", "trainer.offload=both")
    of_host = "optim/streamed_seconds", "offload/seconds", "offload/moved"
    assert all(record[name] > 0 for record in other for name in of_host)
    assert "saves no memory on the CPU" in (tmp_path / "offloaded.out").read_text()
    more = "trainer.steps=4", "trainer.offload=optimizer", "--resume"
    records = trained(usual, RECIPE, *settings, *more)
    assert "optim/streamed_seconds" not in records[0] and len(records) == 4
    found = [runs.figures(folder) for folder in (usual, offloaded)]
    for one in found:
        for record in one["metrics"]:
            for name in of_host:
                record.pop(name, None)
    assert found[0]["adapter"] == found[1]["adapter"]
    assert found[0]["metrics"] == found[1]["metrics"]
