"""`verify base` with real engines and trainer ranks, and what it says of a base that is another."""

from __future__ import annotations

import json
import shutil

import pytest
from quantised import edit, make_pair, save_model

from lora_moe_rl.cli import main
from lora_moe_rl.verify import base, base_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHORT = ("--samples", "4", "--tokens", "24")


def rows_of(model, capsys, *options) -> tuple[int, dict[str, dict]]:
    code = main(["verify", "base", "--model", str(model), "--json", *SHORT, *options])
    rows = json.loads(capsys.readouterr().out)["rows"]
    print({row["name"]: row["error"] for row in rows})
    return code, {row["name"]: row for row in rows}


@pytest.mark.parametrize(
    ("form", "name", "forward"),
    [
        ("int4", "deepseek_v3", "dequantise"),
        ("mxfp4", "qwen3_moe", "dequantise"),
        pytest.param("fp8", "qwen3_moe", "engine", marks=pytest.mark.whole),
        ("fp8", "deepseek_v3", "engine"),
    ],
)
def test_trainer_engine_and_numbers_are_one_model(form, name, forward, tmp_path, capsys):
    packed, _ = make_pair(name, tmp_path, form)
    code, rows = rows_of(packed, capsys, f"trainer.fp8_forward={forward}")
    assert code == 0 and all(row["passed"] for row in rows.values())
    assert ("engine, mismatch/kl with activations as they are" in rows) == (forward == "engine")


def test_one_expert_that_the_engine_holds_otherwise_is_noticed(tmp_path, capsys, monkeypatch):
    packed, _ = make_pair("qwen3_moe", tmp_path, "int4")
    shutil.copytree(packed, tmp_path / "other")
    path = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    edit(tmp_path / "other", **{path: lambda scales: scales * 1.5})

    def served_otherwise(*arguments):
        return base_run.Verification(*arguments, served=tmp_path / "other")

    monkeypatch.setattr(base, "Verification", served_otherwise)
    code, rows = rows_of(packed, capsys)
    assert code == 1
    failed = {name for name, row in rows.items() if not row["passed"]}
    assert failed == rows.keys() - {"engine, largest |Δlogprob| without the adapter"}


def test_a_base_that_is_not_quantised_is_refused(tmp_path, capsys):
    save_model("qwen3_moe", tmp_path, "int4")
    assert main(["verify", "base", "--model", str(tmp_path)]) == 2
    assert "is not quantised" in capsys.readouterr().err
