"""Small bases to merge into, and steps that are small for them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_families
from merge_bases import random_adapter, shards_of, spec_of
from safetensors.torch import load_file

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.export import merged_plan


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """A PEFT directory beside its base."""
    folder = tmp_path_factory.mktemp("adapter")
    tiny_families.save("qwen3_moe", folder / "base")
    shape = ModelShape.from_hf_config(json.loads((folder / "base/config.json").read_text()))
    config = RunConfig(model={"path": str(folder / "base")}, adapter={"rank": 2})
    spec = AdapterSpec.build(shape, config.adapter)
    ones = {name: np.ones(size, np.float32) for name, size in spec.tensor_shapes.items()}
    peft.write(folder / "adapter", spec, ones, config)
    return folder / "adapter"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(directory, its tensors per expert, its config) of a small DeepSeek-V3 in float32."""
    folder = tmp_path_factory.mktemp("plain") / "base"
    sizes = {
        "q_lora_rank": 64,
        "hidden_size": 160,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_group": 2,
    }
    tiny_families.save("deepseek_v3", folder, intermediate_size=192, **sizes)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("never copied")
    return folder, load_file(folder / "model.safetensors"), json.loads(
        (folder / "config.json").read_text()
    )  # fmt: skip


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Several steps a matrix, as large weights have."""
    monkeypatch.setattr(merged_plan, "STEP_NUMBERS", 160 * 50)
    monkeypatch.setattr(merged_plan, "COPY_BYTES", 10_000)


@pytest.fixture
def sharded(plain, tmp_path):
    """(base of several shards, spec, adapter, out)."""
    _, weights, config = plain
    folder = shards_of(weights, config, tmp_path / "base", 9)
    spec = spec_of(folder)
    return folder, spec, random_adapter(spec), tmp_path / "out"
