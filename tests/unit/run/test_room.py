"""What checkpoints and the PEFT directory take, beside what is written."""

from __future__ import annotations

import errno
import shutil
from collections import namedtuple

import numpy as np
import pytest
from published_configs import QWEN3_30B_A3B, shrunk
from safetensors.numpy import load_file

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError, DiskWait
from lora_moe_rl.run.room import check_room, room

FORMS = {
    "all": {},
    "one by one": {"rank": 8, "expert_layout": "per_expert", "expert_rank": 3},
    "shared": {"rank": 8, "expert_layout": "shared_outer"},
    "down alone": {"targets": ("experts.down",)},
    "attention": {"targets": ("*_proj",)},
}
Usage = namedtuple("Usage", "total used free")


def made(tmp_path, adapter) -> tuple[RunConfig, AdapterSpec]:
    config = RunConfig(adapter=adapter, logging={"run_dir": str(tmp_path / "run")})
    shape = ModelShape.from_hf_config(shrunk(QWEN3_30B_A3B))
    return config, AdapterSpec.build(shape, config.adapter)


@pytest.mark.parametrize("kind", FORMS)
def test_the_room_of_an_adapter_is_what_is_written(kind, tmp_path):
    config, spec = made(tmp_path, FORMS[kind])
    zeros = {name: np.zeros(shape, np.float32) for name, shape in spec.tensor_shapes.items()}
    peft.write(tmp_path / "adapter", spec, zeros, config)
    written = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert room(config, spec).adapter == sum(values.nbytes for values in written.values())


def test_a_disk_with_room_for_the_canonical_numbers_alone_is_too_small(tmp_path, monkeypatch):
    config, spec = made(tmp_path, FORMS["shared"])
    found = room(config, spec)
    assert found.adapter > 1.5 * 4 * spec.num_parameters
    for free in (found.checkpoint + 4 * spec.num_parameters, found.first - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(0, 0, free))
        with pytest.raises(ConfigError, match="no room for one checkpoint"):
            check_room(config, spec)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    (run / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(DiskWait, match="no room for one checkpoint"):  # it goes on later
        check_room(config, spec)

    def away(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(shutil, "disk_usage", away)
    with pytest.raises(DiskWait, match="Stale file handle"):
        check_room(config, spec)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, found.first))
    text, warnings = check_room(config, spec)
    assert "a checkpoint has" in text and len(warnings) == 1
