"""The adapter in a checkpoint, read tensor by tensor from the files of several ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lora_moe_rl.errors import AdapterError
from lora_moe_rl.files import checkpoint_tensors as module
from lora_moe_rl.files.checkpoint_tensors import CheckpointTensors
from lora_moe_rl.files.saving import save_safetensors
from lora_moe_rl.files.trainer_state import BEGAN, CRITIC, file_name, key

DRAW = np.random.default_rng(0)
WHOLE = {
    "layers.0.q_proj.A": DRAW.standard_normal((6, 4), np.float32),
    "layers.0.experts.up.B": DRAW.standard_normal((6, 3, 2), np.float32),
}
SPEC: Any = SimpleNamespace(
    tensor_shapes={name: values.shape for name, values in WHOLE.items()}, by_name={}
)


@pytest.fixture
def written(tmp_path):
    """Three ranks, each with a third of every tensor, of its moments, and of a critic's."""
    for rank in range(3):
        at = slice(2 * rank, 2 * rank + 2)
        mine = {key("adapter", n, (2 * rank, *[0] * (v.ndim - 1))): v[at] for n, v in WHOLE.items()}
        moments = {text.replace("adapter", "exp_avg"): values + 1 for text, values in mine.items()}
        began = {key(BEGAN, f"layers.{rank}.q_proj", (0,)): np.array([3])}
        save_safetensors(tmp_path / file_name(rank), mine | moments | began)
        critic = {text: values - 1 for text, values in mine.items()}
        save_safetensors(tmp_path / file_name(rank, CRITIC), critic)
    return tmp_path


def open_here(folder) -> int:
    held = (os.path.join("/proc/self/fd", one) for one in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(one) and str(folder) in os.readlink(one) for one in held)


@pytest.mark.parametrize("most", [1, 2, 64])
def test_tensors_are_put_together_and_few_files_are_open(written, monkeypatch, most):
    monkeypatch.setattr(module, "MOST_OPEN", most)
    with CheckpointTensors(written, SPEC) as tensors:
        assert list(tensors) == list(WHOLE) and len(tensors) == 2
        for _ in range(2):
            for name, values in tensors.items():
                np.testing.assert_array_equal(values, WHOLE[name])
                assert values.dtype == np.float32 and 0 < open_here(written) <= most
    assert open_here(written) == 0


def test_a_tensor_of_which_a_part_is_missing_is_refused(written):
    (written / file_name(1)).unlink()
    with (
        CheckpointTensors(written, SPEC) as tensors,
        pytest.raises(AdapterError, match="8 elements missing"),
    ):
        tensors["layers.0.q_proj.A"]
