"""`bench gpu --device cpu`: the real stages, with sizes that a CPU can take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lora_moe_rl.bench.gpu.stages import STAGES
from lora_moe_rl.errors import BenchmarkError


def run(out: Path, stages: str) -> dict:
    """The outcomes of stages that have all passed."""
    command = [sys.executable, "-m", "lora_moe_rl", "bench", "gpu", "--device", "cpu", "--json"]
    # Ray's and vLLM's sockets cannot lie as deep as a test's folder.
    environment = os.environ | {"TMPDIR": tempfile.gettempdir(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--stages", stages, "--out", str(out)],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    logs = "\n".join(log.read_text()[-3000:] for log in out.glob("*.log"))
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    outcomes = json.loads(done.stdout)["stages"]
    assert json.loads((out / "results.json").read_text()) == outcomes
    return {name: outcome["parts"] for name, outcome in outcomes.items()}


@pytest.mark.slow
def test_the_machine_the_slices_and_the_slots(tmp_path):
    found = run(tmp_path, "slots,probe,slices")
    assert list(found) == ["probe", "slots", "slices"]
    probe = found["probe"]
    assert probe["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert probe["packages"]["torch"].startswith("ok")
    assert all(value > 0 for part in ("ceilings", "host_copies", "grouped_mm")
               for value in probe[part].values())  # fmt: skip
    slices = found["slices"]
    options = STAGES["slices"].options
    assert list(slices) == [part for one in options for part in (one, f"{one}: longest")]
    assert all(len(slices[f"{one}: longest"]) > 5 for one in options)
    for one in (slices[name] for name in options):
        assert one["tokens"] == 4 * 32 and all(value > 0 for value in one["seconds"].values())
        assert one["tflop_s"]["update"] > 0 and one["mfu"] is None
        # What is held is what was planned, to the byte; Adam's state has its counts of steps.
        assert all(share == pytest.approx(1, abs=1e-3)
                   for share in one["memory"]["held_of_plan"].values())  # fmt: skip
    assert set(found["slots"]) == {"box by box", "one copy", "one copy, scattered"}
    sizes = {(way["boxes"], way["bytes"]) for way in found["slots"].values()}
    assert len(sizes) == 1 and all(way["gb_s"] > 0 for way in found["slots"].values())


@pytest.mark.slow
def test_the_tests_that_want_a_gpu_are_skipped_and_the_kernels_are_timed(tmp_path):
    found = run(tmp_path, "kernels,trainer,kernel_bench")
    for part in (found["kernels"] | found["trainer"]).values():
        assert set(part["counts"]) == {"skipped"}
    assert all(shape["adapters"][0]["seconds"]["ours"] > 0
               for name, shape in found["kernel_bench"].items() if name != "gate")  # fmt: skip


@pytest.mark.slow
def test_an_engine(tmp_path):
    found = run(tmp_path, "engine")["engine"]
    for name in ("qwen3_moe", "deepseek_v3", "qwen3_30b_a3b"):
        assert found[f"{name}: start"]["started"]["device"] == "cpu"
        assert len(found[f"{name}: publish by shm"]) == 4
        assert len(found[f"{name}: publish by nixl"]) == 4
        if name != "qwen3_30b_a3b":  # whose weights nobody else has
            logprobs = found[f"{name}: logprobs"]
            assert logprobs["base"] < 1e-4 and logprobs["adapter"] < 1e-4
            assert logprobs["effect"] > 0.5
        speeds = found[f"{name}: tokens_per_s"]
        assert len(speeds) == 2 and all(value > 0 for value in speeds.values())


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False])
def test_the_demo(tmp_path, monkeypatch, cached):
    if not cached:
        monkeypatch.setenv("LORA_MOE_RL_CACHE", str(tmp_path / "empty"))
    found = run(tmp_path, "demo")["demo"]
    steps = found["steps"]
    assert len(steps) == 6 and any(step["optim/grad_norm"] > 0 for step in steps)
    assert cached or found["model"] == "random weights"
    for step in steps:
        assert step["replay/coverage"] == 1 and step["mismatch/kl"] < 1e-9
        assert step["mismatch/without_replay/kl"] >= 0


@pytest.mark.slow
def test_a_way_of_writing_that_misses_a_box_has_no_seconds(monkeypatch):
    from lora_moe_rl.bench.gpu.stages import slots

    monkeypatch.setattr(slots, "LAYERS", {"cpu": 1})
    version = slots.Version("cpu")
    for write in version.ways().values():
        assert version.timed(write)["seconds"] > 0
    version.writers[3] = lambda data: None
    with pytest.raises(BenchmarkError, match="1 of .* boxes are not what was sent"):
        version.timed(version.ways()["box by box"])
