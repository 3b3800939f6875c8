"""Files of tensors have the mode that other files have."""

import os

import numpy as np
import pytest
from safetensors.numpy import load_file

from lora_moe_rl.files.saving import save_safetensors


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_the_umask_decides_who_may_read(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_safetensors({"x": np.arange(3)}, tmp_path / "a.safetensors", {"format": "pt"})
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    assert load_file(tmp_path / "a.safetensors")["x"].tolist() == [0, 1, 2]
