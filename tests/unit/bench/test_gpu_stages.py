"""`bench gpu`: what is refused, and how pytest's report becomes a stage's parts. The stages
themselves run in tests/integration/test_bench_gpu.py."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from lora_moe_rl import cli
from lora_moe_rl.bench import kernels
from lora_moe_rl.bench.gpu import command
from lora_moe_rl.bench.gpu.parts import ENDS, Parts
from lora_moe_rl.bench.gpu.stages import STAGES, benches, demo, probe, slices, tests
from lora_moe_rl.bench.kernel_contenders import SHAPES
from lora_moe_rl.errors import BenchmarkError, ConfigError


def test_every_stage_has_a_module_with_a_run():
    for stage in STAGES.values():
        if stage.module not in ("engine", "slots"):  # which import vLLM
            assert callable(import_module(f"lora_moe_rl.bench.gpu.stages.{stage.module}").run)


def test_the_calls_of_the_page_are_short_enough_and_name_every_stage_once():
    page = (Path(__file__).parents[3] / "docs/gpu.md").read_text()
    call = r"^\| `lora-moe-rl bench gpu --stages (\S+) --budget (\d+) .*` \| (\d+) \|$"
    called, together = [], []
    for stages, budget, said in re.findall(call, page, re.M):
        called += stages.split(",")
        together.append(sum(STAGES[name].limit_s for name in stages.split(",")))
        assert together[-1] == int(said) <= int(budget) - 30 and int(budget) < 600
    assert sorted(called) == sorted(STAGES) and sum(together[:3]) <= command.BUDGET_S
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.M)
    assert rows == [(name, str(stage.limit_s)) for name, stage in STAGES.items()]


def test_the_gate_of_the_kernels_is_asked_once_and_closes_all(tmp_path, monkeypatch):
    asked, parts = [], Parts(tmp_path / "kernel_bench.json")
    monkeypatch.setattr(kernels, "gate", lambda *_: asked.append(1) or [])
    monkeypatch.setattr(kernels, "figures", lambda names, *_: {"names": list(names)})
    benches.run(parts, "cpu", "kernels")
    assert asked == [1]
    assert list(parts.values) == ["gate", *SHAPES] and not parts.failed
    (tmp_path / "kernel_bench.json").unlink()
    monkeypatch.setattr(kernels, "gate", lambda *_: ["wrong"])
    benches.run(parts, "cpu", "kernels")
    assert list(parts.values) == parts.failed == ["gate"]


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


def test_a_slice_has_as_many_layers_as_the_gpu_has_room_for(monkeypatch, tmp_path):
    """docs/gpu.md: of 80 GB some 78 to 79 GiB are free, of 141 GB 139."""

    def layers(room_gib: float, stage: str = "large") -> list[int]:
        monkeypatch.setattr(slices, "free_bytes", lambda device: room_gib * 2**30)
        found = []
        for one in STAGES[stage].options:
            name, asked, kind = one.split(":")
            made = slices.fitting(tmp_path, name, int(asked), kind, "cuda")
            assert made.planned().total <= (room_gib - 2) * 2**30
            found.append(made.spec.shape.num_layers)
        return found

    assert (layers(78), layers(79), layers(139)) == ([47, 3, 2], [48, 3, 2], [48, 5, 4])
    assert layers(78, "slices") == [8, 3, 2]
    with pytest.raises(BenchmarkError, match="one layer of deepseek_v3 needs .* GiB by the plan"):
        layers(20)


class Worker:
    """A rank that is ended in its first forward."""

    def update(self, *_) -> None: ...

    def memory(self) -> dict[str, int]:
        return {}

    def score(self, *_) -> None:
        raise MemoryError("of the GPU")


def test_a_slice_that_fails_keeps_what_it_has_found(monkeypatch, tmp_path):
    label, parts = "qwen3_30b_a3b:2:none", Parts(tmp_path / "slices.json")
    monkeypatch.setattr(slices.Slice, "_start", lambda self: (Worker(), 1.5))
    monkeypatch.setattr(slices, "apart", lambda name, job, *args, **_: job(*args))
    slices.run(parts, "cpu", label)
    found = parts.values[label]
    assert (found["layers"], found["build_s"], found["error"]) == (
        2,
        1.5,
        "MemoryError: of the GPU",
    )
    assert found["tflop_s"].keys() == {"update"} and found["memory"]["plan"]
    assert list(parts.values) == parts.failed == [label]

    monkeypatch.setattr(Worker, "score", Worker.update)
    monkeypatch.setattr(slices, "longest", lambda call, cuda: 1 / 0)
    slices.run(parts, "cpu", label)
    found = parts.values[label]
    assert found["tflop_s"].keys() == {"update", "forward", "forward_base"}
    assert "error" not in found and parts.failed == [f"{label}: longest"]


def test_a_slice_has_its_share_of_the_time_that_is_left(monkeypatch, tmp_path):
    shares = []

    def last(name, *_, timeout_s, **rest):
        shares.append(timeout_s)
        if len(shares) == 2:
            monkeypatch.setenv(ENDS, str(time.monotonic() + 55))  # the second one was slow

    monkeypatch.setattr(slices, "apart", last)
    monkeypatch.setenv(ENDS, str(time.monotonic() + 245))
    slices.run(Parts(tmp_path / "slices.json"), "cpu", "a:1:none", "b:1:none", "c:1:none")
    assert shares == pytest.approx([80, 120, 50], abs=2)


def test_an_engine_whose_version_does_not_arrive_has_its_other_figures(tmp_path):
    """Which an engine that starts would have: each is a part of its own."""
    stage = pytest.importorskip("lora_moe_rl.bench.gpu.stages.engine")
    parts, served = Parts(tmp_path / "engine.json"), []

    class Bench:
        def transports(self):
            return ["shm", "cuda_ipc"]

        async def start(self):
            return {"device": "cpu"}

        async def publish(self, transport):
            if transport == "shm":
                raise BenchmarkError("slots do not hold what was sent")
            served.append(transport)
            return [{"total": 1.0}]

        async def compare(self, expected):
            return {"base": 0.0}

        async def speeds(self):
            raise MemoryError("of the GPU")

    with asyncio.Runner() as loop:
        stage.put_parts(parts, "tiny", Bench(), {"base": []}, loop)
    assert list(parts.values) == [
        "tiny: start", "tiny: publish by shm", "tiny: publish by cuda_ipc", "tiny: logprobs",
        "tiny: tokens_per_s",
    ]  # fmt: skip
    assert parts.failed == ["tiny: publish by shm", "tiny: tokens_per_s"]
    assert parts.values["tiny: publish by cuda_ipc"] == [{"total": 1.0}]


def test_without_the_tiny_model_the_demo_has_random_weights(tmp_path, monkeypatch):
    """And is not pre-trained, as an empty cache would have it."""
    monkeypatch.setenv("LORA_MOE_RL_CACHE", str(tmp_path / "cache"))
    asked = []

    def steps(device, *settings):
        asked.extend(settings)
        folder = Path(settings[0].partition("=")[2])
        assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
        return []

    monkeypatch.setattr(demo, "steps", steps)
    parts = Parts(tmp_path / "demo.json")
    demo.run(parts, "cpu")
    assert parts.values == {"model": "random weights", "steps": []}
    assert [one.partition("=")[0] for one in asked] == ["model", "reward.function"]
    assert demo.digits(["12+", "", "="], answer=["", "", ""]) == [2 / 3, 0, 0]
    assert probe.tiny_model().startswith("not in the cache")
    monkeypatch.setattr(demo, "find_tiny", lambda name: tmp_path)
    asked.clear()
    monkeypatch.setattr(demo, "steps", lambda device, *settings: asked.extend(settings) or [])
    demo.run(parts, "cpu")
    assert parts.values["model"] == "pre-trained" and asked == []


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
def test_the_first_kernel_adds_one():
    """In Triton's interpreter, which is chosen before triton is imported."""
    code = "from lora_moe_rl.bench.gpu import first_kernel; print(len(first_kernel.launch('cpu')))"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "2\n"


@pytest.mark.seconds
def test_attention_is_measured_by_what_torch_chooses_and_by_each_kernel():
    found = probe.attention("cpu")
    assert list(found) == [f"{n}{m}" for n in probe.ATTENTION for m in ("", ", masked")]
    for taken in found.values():
        for name in ("chosen", "math"):
            assert min(taken[name].values()) > 0 and "other_shape" in taken[name]
        assert "No viable backend" in taken["cudnn_attention"]


@pytest.mark.seconds
def test_how_each_test_ended_is_there_once_it_has_ended(tmp_path):
    """One waits for what the test before it has written, one hangs, and the last ends pytest."""
    file, parts = tmp_path / "test_some.py", Parts(tmp_path / "kernels.json")
    file.write_text(
        "import json, os, pytest, time\n"
        "def test_good(record_property): record_property('waits', '3')\n"
        "def test_seen():\n"
        f"    found = json.load(open({str(parts.path)!r}))['some']\n"
        "    assert found['tests'][0]['name'] == 'test_good'\n"
        "    assert found['running'] == 'test_seen'\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='no GPU')\ndef test_skipped(): pass\n"
        "def test_hangs(): time.sleep(60)\n"
        "def test_ends(): os._exit(7)\n"
    )
    assert tests.run_pytest(parts, "some", file, 1) == 7
    found = parts.values["some"]
    good, seen, bad, skipped, hangs = found["tests"]
    assert (good["end"], good["waits"], seen["end"]) == ("passed", "3", "passed")
    assert bad["end"] == "failed" and "assert 1 == 2" in bad["message"]
    assert (skipped["end"], skipped["message"]) == ("skipped", "no GPU")
    assert hangs["end"] == "failed" and "Timeout" in hangs["message"] and hangs["seconds"] < 10
    assert found["counts"] == {"passed": 2, "failed": 2, "skipped": 1}
    assert found["running"] == "test_ends"
    file.write_text("def test_last(): pass\n")
    assert tests.run_pytest(parts, "other", file, 60) == 0
    (last,) = parts.values["other"].pop("tests")
    assert last["name"] == "test_last" and "running" not in parts.values["other"]


def test_tests_that_fail_are_a_part_that_failed(tmp_path, monkeypatch):
    parts = Parts(tmp_path / "kernels.json")
    one = {"name": "test_one", "end": "passed"}

    def ran(values: dict, code: int):
        def run_pytest(parts, name, path, one_test_s):
            parts.put(name, values)
            return code

        monkeypatch.setattr(tests, "run_pytest", run_pytest)
        tests.run(parts, "cuda", "test_kernels.py")
        return parts.values["test_kernels.py"]

    bad = {"tests": [one, one | {"name": "test_two", "end": "failed"}], "counts": {"passed": 1}}
    assert ran(bad, 1) == bad | {"error": "BenchmarkError: 1 tests failed: test_two"}
    half = {"tests": [one], "counts": {"passed": 1}, "running": "test_two"}
    assert "exit code -11 in test_two" in ran(half, -11)["error"]
    none = {"tests": [one | {"end": "skipped"}], "counts": {"skipped": 1}}
    assert "no test of test_kernels.py ran" in ran(none, 0)["error"]
    good = {"tests": [one], "counts": {"passed": 1}}
    assert ran(good, 0) == good
