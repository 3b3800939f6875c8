"""`export --to merged` from the command line: what is written, warned of and refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_families
import torch
from safetensors.torch import load_file, save_file

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cli import main
from lora_moe_rl.config import RunConfig


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> tuple[str, str]:
    """A bfloat16 base, and an adapter that changes it by a few ten thousandths."""
    folder = tmp_path_factory.mktemp("export")
    base, adapter = folder / "base", folder / "adapter"
    tiny_families.save("qwen3_moe", base)
    weights = load_file(base / "model.safetensors")
    half = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    save_file(half, base / "model.safetensors", {"format": "pt"})
    config = RunConfig(model={"path": str(base)}, adapter={"rank": 4})
    shape = ModelShape.from_hf_config(json.loads((base / "config.json").read_text()))
    spec = AdapterSpec.build(shape, config.adapter)
    rng = np.random.default_rng(0)
    sizes = {"A": 0.1, "B": 4e-6}
    tensors = {
        name: (sizes[name[-1]] * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in spec.tensor_shapes.items()
    }
    peft.write(adapter, spec, tensors, config)
    return str(base), str(adapter)


def export(paths, out, *options: str) -> int:
    base, adapter = paths
    return main(["export", adapter, "--to", "merged", "--base", base, "--out", str(out), *options])


def test_a_merge_that_loses_nearly_all_is_not_finished_and_then_warned_of(paths, tmp_path, capsys):
    out = tmp_path / "out"
    assert export(paths, out) == 1
    said = capsys.readouterr().err
    assert "out is not finished" in said and "of the change lost" in said and "above 0.9" in said
    assert not (out / "config.json").exists()
    assert export(paths, out, "--stop-lost", "1") == 0
    told = capsys.readouterr()
    assert "rounding: 9" in told.out and "these lost most; all are in" in told.out
    assert "warning: 9" in told.err and "--rounding stochastic" in told.err
    assert (out / "config.json").exists()


@pytest.mark.parametrize(
    "options", [("--rounding", "stochastic", "--seed", "3"), ("--adapted-float32",)]
)
def test_the_ways_out(paths, tmp_path, capsys, options):
    assert export(paths, tmp_path / "out", *options, "--warn-lost", "0.2") == 0
    assert "warning" not in capsys.readouterr().err
    fingerprint = json.loads((tmp_path / "out/merge.json").read_text())["merged"]["form"]
    assert ("seed=3" in fingerprint) == ("--seed" in options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--to", "peft", "--stop-lost", "0.5"], "--stop-lost has no effect with --to peft"),
        (["--to", "merged", "--seed", "1"], "--seed 1 has no effect without --rounding stochastic"),
        (["--to", "merged", "--adapted-float32", "--dtype", "float16"], "are both given"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, capsys, options, says):
    assert main(["export", "somewhere", "--out", str(tmp_path / "out"), *options]) == 2
    assert says in capsys.readouterr().err
