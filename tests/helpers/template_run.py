"""A run directory with one checkpoint and a chat template of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import write_checkpoint
from safetensors.numpy import save_file

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.files import settings_file
from lora_moe_rl.models.fingerprint import base_record

STEP = 3


def save_run(
    folder: Path, base: Path, template: str | None, noted: str | None = None, **sections: Any
) -> Path:
    """A run whose config.yaml has `template`, and whose settings.json, if it has one, says that the
    checkpoint was made with `noted`. `sections`: of the config besides."""
    model = {"path": str(base), "chat_template": template} | sections.pop("model", {})
    config = RunConfig(model=model, adapter={"rank": 2}, **sections)
    shape = ModelShape.from_hf_config(json.loads((base / "config.json").read_text()))
    spec = AdapterSpec.build(shape, config.adapter)
    tensors = {
        f"adapter|{name}|{','.join('0' * len(size))}": np.full(size, 0.01, np.float32)
        for name, size in spec.tensor_shapes.items()
    }
    metadata = {
        "step": STEP,
        "adapter": config.adapter.model_dump(mode="json"),
        "base": base_record(str(base), base),
        "trainer": {"version": STEP, "optimizer_steps": STEP},
    }
    with write_checkpoint(folder / "checkpoints", STEP, 1, metadata) as directory:
        save_file(tensors, directory / "trainer_00000.safetensors")
    (folder / "config.yaml").write_text(to_yaml(config))
    if noted is not None:
        model = {"path": str(base), "chat_template": noted}
        settings_file.note(folder, 0, RunConfig(model=model, adapter={"rank": 2}))
        settings_file.note(folder, STEP, config)
    return folder
