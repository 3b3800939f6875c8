"""What the host knows, on a device. The way to a GPU is in tests/gpu/test_kernels.py."""

from __future__ import annotations

import pytest
import torch

from lora_moe_rl.kernels.backend import on_device


@pytest.mark.parametrize("values", [[3, 0, 4], torch.tensor([3, 0, 4])])
def test_numbers_of_the_host_are_what_they_were(values):
    found = on_device(values, torch.device("cpu"))
    assert found.tolist() == [3, 0, 4] and found.dtype == torch.int64
    assert on_device(found, torch.device("cpu")) is found
    assert on_device(values, torch.device("meta")).shape == (3,)
