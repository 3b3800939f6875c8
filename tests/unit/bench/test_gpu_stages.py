"""`bench gpu`: what is refused, and how pytest's report becomes a stage's parts. The stages
themselves run in tests/integration/test_bench_gpu.py."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import import_module

import psutil
import pytest

from lora_moe_rl import cli
from lora_moe_rl.bench.gpu import command
from lora_moe_rl.bench.gpu.stages import STAGES, probe, slices
from lora_moe_rl.bench.gpu.stages.tests import read
from lora_moe_rl.errors import BenchmarkError, ConfigError


def test_every_stage_has_a_module_with_a_run():
    for stage in STAGES.values():
        if stage.module not in ("engine", "slots"):  # which import vLLM
            assert callable(import_module(f"lora_moe_rl.bench.gpu.stages.{stage.module}").run)


def test_a_stage_that_is_none_and_a_gpu_that_is_not_here_are_refused(tmp_path, capsys, monkeypatch):
    def no_driver(name: str):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    with pytest.raises(ConfigError, match="'prob' is not a stage; there are probe, kernels"):
        command.main(["--stages", "probe,prob", "--out", str(tmp_path)])
    with pytest.raises(BenchmarkError, match="the driver finds no GPU here"):
        command.main(["--out", str(tmp_path)])
    assert cli.main(["bench", "gpu", "--stages", "none"]) == 2
    assert not list(tmp_path.iterdir())
    assert "--stages: 'none' is not a stage" in capsys.readouterr().err


def test_a_slice_has_as_many_layers_as_the_gpu_has_room_for(monkeypatch):
    """docs/gpu.md, `large`: 3, 48 and 2 layers on 80 GB, and all that are asked for on 140 GiB."""

    def layers(room_gib: float) -> list[int]:
        monkeypatch.setattr(slices, "free_bytes", lambda device: room_gib * 2**30)
        found = [one.split(":") for one in STAGES["large"].options]
        return [slices.measure(n, int(asked), kind, "cuda")["layers"] for n, asked, kind in found]

    def measured(one: slices.Slice):
        return {"layers": one.spec.shape.num_layers}

    monkeypatch.setattr(slices.Slice, "measure", measured)
    assert (layers(78), layers(139)) == ([3, 48, 2], [5, 48, 4])
    with pytest.raises(BenchmarkError, match="one layer of deepseek_v3 needs .* GiB by the plan"):
        layers(20)


@pytest.mark.seconds
def test_a_command_that_is_asked_to_end_takes_its_stage_with_it(tmp_path):
    words = ["bench", "gpu", "--device", "cpu", "--stages", "probe", "--out", str(tmp_path)]
    process = psutil.Popen([sys.executable, "-m", "lora_moe_rl", *words])
    while not (stages := process.children()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == cli.INTERRUPTED
    _, alive = psutil.wait_procs(stages, timeout=20)
    assert not alive


@pytest.mark.seconds
def test_attention_is_measured_by_what_torch_chooses_and_by_each_kernel():
    found = probe.attention("cpu")
    assert list(found) == [f"{n}{m}" for n in probe.ATTENTION for m in ("", ", masked")]
    for taken in found.values():
        for name in ("chosen", "math"):
            assert min(taken[name].values()) > 0 and "other_shape" in taken[name]
        assert "No viable backend" in taken["cudnn_attention"]


def test_how_tests_ended_is_read_from_pytests_own_report(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_good(record_property): record_property('waits', '3')\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='no GPU')\ndef test_skipped(): pass\n"
    )
    report = tmp_path / "report.xml"
    words = [sys.executable, "-m", "pytest", "-q", str(file), f"--junitxml={report}"]
    subprocess.run(words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    good, bad, skipped = read(report)
    assert (good["end"], good["waits"]) == ("passed", "3")
    assert bad["end"] == "failed" and "assert 1 == 2" in bad["message"]
    assert (skipped["end"], skipped["message"]) == ("skipped", "no GPU")
