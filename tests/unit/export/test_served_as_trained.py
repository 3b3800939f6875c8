"""The printed command serves what was trained: what vLLM would do otherwise by default is set."""

from __future__ import annotations

import json
import shutil

import pytest
from merge_bases import CONFIGS
from template_run import save_run

from lora_moe_rl.cli import main
from lora_moe_rl.rollout import serve_command

FP8, INT4 = "VLLM_USE_DEEP_GEMM_E8M0=0 vllm serve ", " --moe-backend marlin"


@pytest.fixture
def on_gpus(monkeypatch):
    monkeypatch.setattr(serve_command, "vllm_on_cpu", lambda: False)


def printed(source, out, capsys) -> str:
    assert main(["export", str(source), "--to", "peft", "--for", "vllm", "--out", str(out)]) == 0
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("form", [*CONFIGS, None])
def test_of_a_quantised_base(adapter, tmp_path, on_gpus, capsys, form):
    """From a run, which keeps the base's config.json, and from a PEFT directory, which names it."""
    base = tmp_path / "base"
    shutil.copytree(adapter.parent / "base", base)
    config = json.loads((base / "config.json").read_text())
    config |= {"quantization_config": CONFIGS[form]} if form else {}
    (base / "config.json").write_text(json.dumps(config))
    of_run = printed(save_run(tmp_path / "run", base, None), tmp_path / "out", capsys)
    for command in (of_run, printed(tmp_path / "out", tmp_path / "again", capsys)):
        assert "vllm serve " in command and "--enable-lora" in command
        assert command.startswith(FP8) == (form == "fp8")
        assert (INT4 in command) == (form == "int4")


def test_a_base_by_itself_needs_no_kernel_that_reads_adapters(on_gpus):
    command = serve_command.serve_command("base", None, 1, False, form="int4")
    assert str(command) == "vllm serve base"
