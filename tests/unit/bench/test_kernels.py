"""`bench kernels`: its gate, its loads and what it prints, without other packages' adapters."""

import io
import json

import pytest
import torch
from rich.console import Console

from lora_moe_rl import cli
from lora_moe_rl.bench import kernel_contenders, kernel_gate, kernel_tables, kernels
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.kernels.grouped_lora import grouped_lora

SMALL = ["--device", "cpu", "--shape", "qwen3-30b", "--tokens", "4", "--ranks", "8"]


def no_scale(x, A, Bs, counts, scales, *rest):
    return grouped_lora(x, A, Bs, counts, [1.0] * len(scales), *rest)


def last_token_skipped(x, *rest):
    y = grouped_lora(x, *rest)
    return y * (torch.arange(len(y)) < len(y) - 1)[:, None]


@pytest.mark.seconds
@pytest.mark.parametrize("broken", [no_scale, last_token_skipped])
def test_a_wrong_kernel_has_no_figures(monkeypatch, capsys, broken):
    monkeypatch.setattr(kernel_gate, "grouped_lora", broken)
    with pytest.raises(BenchmarkError, match="no figures, the kernels are wrong:\nadapters, gate"):
        kernels.main(["--json", *SMALL])
    assert capsys.readouterr().out == ""


@pytest.mark.seconds
def test_a_wrong_merge_closes_the_gate(monkeypatch):
    monkeypatch.setattr(kernel_gate.merge, "merge_delta_fp8_", lambda *_: None)
    (line,) = kernel_gate.gate("cpu", torch.float32)
    assert line.startswith("merge, fp8: off by")


def test_loads_have_all_rows():
    assert kernel_contenders.loads(4, 100, "balanced") == [25, 25, 25, 25]
    zipf = kernel_contenders.loads(4, 100, "zipf")
    assert sum(zipf) == 100 and zipf[0] >= 2 * zipf[1] - 2 > zipf[3] > 0


@pytest.mark.seconds
def test_what_is_printed(monkeypatch, capsys):
    def absent(layer):
        raise kernel_contenders.Unavailable("no such package")

    def failing(layer):
        raise ValueError("not on this device")

    few = {"ours": kernel_contenders.ours, "base layer": kernel_contenders.base, "PEFT": absent}
    few["Megatron-Bridge"] = failing
    monkeypatch.setattr(kernel_contenders, "CONTENDERS", few)
    monkeypatch.setattr(kernels, "CODEC_TOKENS", {"cpu": 4})
    monkeypatch.setattr(kernels, "busy_cores", lambda: 0.0)
    assert cli.main(["bench", "kernels", "--json", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["load"] for row in result["adapters"]} == {"balanced", "zipf"}
    reasons = {"PEFT": "no such package", "Megatron-Bridge": "ValueError: not on this device"}
    assert all(row["not_run"] == reasons for row in result["adapters"])
    assert all(row["seconds"]["ours"] > 0 for row in result["adapters"])
    assert [row["format"] for row in result["merge"]] == [
        "bfloat16",
        "fp8 block-128",
        "int4 group-32",
    ]
    assert result["gpu_figures"] == kernels.STILL_TO_COME
    monkeypatch.setattr(kernel_tables, "CONTENDERS", few)
    text = io.StringIO()
    Console(file=text, width=200).print(kernel_tables.adapters(result["adapters"]))
    assert "qwen3-30b (16 x 256/96, 1/8 sides)" in text.getvalue()


def test_ours_may_not_fail(monkeypatch):
    def failing(layer):
        raise ValueError("of ours")

    monkeypatch.setattr(kernel_contenders, "CONTENDERS", {"ours": failing})
    with pytest.raises(ValueError, match="of ours"):
        kernels.main(["--json", *SMALL])


def test_a_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(BenchmarkError, match="torch sees no GPU; use --device cpu"):
        kernels.main(["--device", "cuda"])
