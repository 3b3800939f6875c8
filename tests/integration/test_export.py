"""Exported adapters and merged models in the real PEFT, transformers and vLLM, by the commands."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest
import tiny_families

from lora_moe_rl.cli import main
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from lora_moe_rl.verify import export as verify_export
from lora_moe_rl.verify.inputs import drawn

FORMS = ("peft-2d", "peft-3d", "merged")


@pytest.fixture(params=["qwen3_moe", "deepseek_v3"])
def model(request, tmp_path):
    folder = tmp_path / request.param
    tiny_families.save(request.param, folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def rows(capsys) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_verify_export_passes(model, capsys):
    arguments = ["--model", str(model), "--forms", ",".join(FORMS), "--json"]
    assert main(["verify", "export", *arguments, "adapter.rank=6", "adapter.expert_rank=4"]) == 0
    found = rows(capsys)
    assert found.keys() == {"the adapter, against the base", *FORMS}
    assert all(found[form]["error"] <= 5e-6 for form in FORMS)


def test_an_adapter_of_a_model_inside_a_larger_one_is_read_by_that(tmp_path, capsys):
    tiny_families.save("qwen3_5_moe_published", tmp_path)
    arguments = ["verify", "export", "--model", str(tmp_path), "--json", "--tolerance", "1e-5"]
    settings = ["adapter.rank=6", "adapter.expert_rank=4"]
    assert main([*arguments, "--forms", "peft-3d,merged", *settings]) == 0
    assert len(rows(capsys)) == 3
    assert main([*arguments, "--forms", "peft-2d", *settings]) == 2
    assert "PEFT reads peft-3d alone" in capsys.readouterr().err


def test_verify_export_notices_an_adapter_that_is_not_the_same(tmp_path, capsys, monkeypatch):
    tiny_families.save("qwen3_moe", tmp_path / "model")
    original = verify_export._Verification._merge

    def merge_another(self):
        self.tensors = drawn(self.spec.tensor_shapes, seed=1)
        original(self)

    monkeypatch.setattr(verify_export._Verification, "_merge", merge_another)
    arguments = ["--model", str(tmp_path / "model"), "--forms", "merged", "--json"]
    assert main(["verify", "export", *arguments]) == 1
    assert not rows(capsys)["merged"]["passed"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_adapter_is_served_as_its_merged_model(tmp_path, capsys, monkeypatch):
    """`export --to merged`, then `vllm serve` with the adapter: the same logprobs; no process is
    left."""
    from lora_moe_rl.adapters import peft
    from lora_moe_rl.adapters.families import ModelShape
    from lora_moe_rl.adapters.spec import AdapterSpec
    from lora_moe_rl.config import AdapterConfig, RunConfig
    from lora_moe_rl.verify import serving

    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    tiny_families.save("qwen3_moe", base)
    make_tokenizer().save_pretrained(base)
    shape = ModelShape.from_hf_config(json.loads((base / "config.json").read_text()))
    config = AdapterConfig(rank=6, expert_rank=4, alpha=12.0)
    spec = AdapterSpec.build(shape, config)
    spec, tensors = peft.for_vllm(spec, drawn(spec.tensor_shapes, seed=0))
    peft.write(adapter, spec, tensors, RunConfig(model=str(base), adapter=config))
    arguments = [str(adapter), "--to", "merged", "--base", str(base), "--out", str(merged)]
    assert main(["export", *arguments]) == 0
    capsys.readouterr()
    started = []
    family = serving._family
    monkeypatch.setattr(serving, "_family", lambda pid: started.extend(family(pid)) or started)
    assert (
        main(["serve-check", str(adapter), "--base", str(base), "--merged", str(merged), "--json"])
        == 0
    )
    captured = json.loads(capsys.readouterr().out)
    assert captured["command"].count("--lora-modules") == 1 and captured["passed"]
    assert started and not any(process.is_running() for process in started)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_that_export_prints_serves_the_adapter(tmp_path, capsys):
    """As printed, in a shell without the tests' environment; one routed expert is adapted."""
    from lora_moe_rl.adapters import peft
    from lora_moe_rl.adapters.families import ModelShape
    from lora_moe_rl.adapters.spec import AdapterSpec
    from lora_moe_rl.config import AdapterConfig, RunConfig

    base = tmp_path / "base"
    tiny_families.save("qwen3_moe", base)
    make_tokenizer().save_pretrained(base)
    shape = ModelShape.from_hf_config(json.loads((base / "config.json").read_text()))
    config = RunConfig(model=str(base), adapter=AdapterConfig(rank=4))
    spec = AdapterSpec.build(shape, config.adapter)
    peft.write(tmp_path / "source", spec, drawn(spec.tensor_shapes, seed=0), config)
    words = ["export", str(tmp_path / "source"), "--to", "peft", "--for", "vllm"]
    assert main([*words, "--out", str(tmp_path / "mine")]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            ["env", "-i", f"PATH={os.environ['PATH']}", f"HOME={tmp_path}"]
            + [f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}", "sh", "-c"]
            + [f"exec env {printed} --host 127.0.0.1 --port {port}"],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            start_new_session=True,
        )
    try:
        asked = {"model": "mine", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()[-4000:]
            try:
                answer = json.loads(urllib.request.urlopen(request, timeout=120).read())
                break
            except urllib.error.HTTPError as error:
                pytest.fail(f"{error}: {(tmp_path / 'log').read_text()[-4000:]}")
            except urllib.error.URLError:
                time.sleep(0.5)  # not up yet
        assert answer["usage"]["completion_tokens"] == 2
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
