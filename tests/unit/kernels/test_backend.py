"""What the host knows, on a device. That nothing waits there is in tests/gpu/test_kernels.py."""

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


def test_no_numbers_are_integers_too():
    """An index of nothing; of floats torch would make one that no tensor takes."""
    found = on_device([], torch.device("cpu"))
    assert found.dtype == torch.int64 and torch.arange(3)[found].shape == (0,)


def test_what_goes_to_a_gpu_is_of_one_piece_and_nothing_else_is_locked(monkeypatch):
    """Of a strided tensor torch would lock all that lies between, and copy it by way of pages that
    are not."""
    locked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: locked.append(self) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)
    table = torch.arange(15).reshape(5, 3)
    assert on_device(table[:, 1], torch.device("cuda")).tolist() == [1, 4, 7, 10, 13]
    (one,) = locked
    assert one.is_contiguous() and one.untyped_storage().nbytes() == 5 * 8
