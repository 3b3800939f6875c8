"""Faults that are brought about inside a trainer rank: each is one that the run's checks see."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_moe_rl.chaos import hooks
from lora_moe_rl.errors import ReplayError
from lora_moe_rl.router_replay.packed import PackedRoutes
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import send


@given(st.floats(-4, 4, width=32))
def test_one_bit_of_the_exponent_is_flipped_and_what_comes_of_it_is_finite(value):
    before = struct.unpack("<i", struct.pack("<f", value))[0]
    after = hooks.flipped(before)
    changed = (before ^ after) & 0xFFFFFFFF
    assert changed.bit_count() == 1 and changed & 0x7F800000
    assert abs(struct.unpack("<f", struct.pack("<i", after))[0]) <= 8


def test_a_usual_weight_becomes_one_that_nobody_overlooks():
    before = struct.unpack("<i", struct.pack("<f", 1e-3))[0]
    after = struct.unpack("<f", struct.pack("<i", hooks.flipped(before)))[0]
    assert after == pytest.approx(1e-3 * 2**8)


def test_a_weight_is_flipped_only_for_as_long_as_it_is_sent():
    weights = torch.tensor([[0.5, -0.25]], requires_grad=True)
    one = weights.detach().view(-1)[:1]
    with hooks.flipped_weight(one):
        assert weights[0, 0].item() not in (0.5, 0) and weights[0, 1].item() == -0.25
    assert weights.tolist() == [[0.5, -0.25]]


def test_the_routes_of_every_sample_are_damaged_and_the_engines_own_are_not():
    ids = np.arange(2 * 7 * 2, dtype=np.uint8).reshape(7, 2, 2) % 8
    valid, offsets = np.ones((7, 2), dtype=bool), np.array([0, 3, 5, 7])
    sent = send(RouteTable(ids, valid, offsets, (0, 1), 8))
    damaged = hooks.with_flipped(sent)
    (part,) = damaged.blocks[0].parts
    packed = PackedRoutes.from_bytes(part)
    for sample in range(3):
        with pytest.raises(ReplayError, match="are corrupt"):
            packed.check(sample, "here")
    np.testing.assert_array_equal(sent.table().ids, ids)


def test_of_all_ranks_that_are_asked_one_has_the_fault(tmp_path, monkeypatch):
    monkeypatch.setenv(hooks.FOLDER, str(tmp_path))
    assert not hooks._taken("nan.grad")
    (tmp_path / "nan.grad.asked").touch()
    assert [hooks._taken("nan.grad") for _ in range(3)] == [True, False, False]
    hooks._done("nan.grad")
    assert [path.name for path in tmp_path.iterdir()] == ["nan.grad.done"]


class Gradients:
    """Of a rank: those of one tensor, and the sum over ranks, which here are one."""

    def __init__(self):
        self.flat = {"A": torch.ones(3)}
        self.summed = None

    def reduce(self) -> None:
        self.summed = self.flat["A"].clone()


def test_a_gradient_is_nan_when_it_is_summed_and_only_that_time(tmp_path, monkeypatch):
    monkeypatch.setenv(hooks.FOLDER, str(tmp_path))
    (tmp_path / "nan.grad.taken").touch()
    gradients = Gradients()
    with hooks._nan_in(gradients):  # type: ignore[arg-type]
        gradients.reduce()
    assert torch.isnan(gradients.summed).tolist() == [True, False, False]
    assert (tmp_path / "nan.grad.done").exists()
    gradients.flat["A"].fill_(2)
    gradients.reduce()
    assert gradients.summed.tolist() == [2, 2, 2]
