"""Starts that are taken from a base weight, against PEFT's own and numpy's SVD."""

from __future__ import annotations

import typing

import numpy as np
import peft
import pytest
import torch

from lora_moe_rl.adapters.starts import STARTS, start
from lora_moe_rl.config import AdapterConfig

RANK, ALPHA = 3, 8
SCALE = ALPHA / RANK
SHAPES = [(12, 7), (7, 12), (3, 9), (9, 3), (8, 8)]


def peft_layer(weight: torch.Tensor, init: str, rank: int = RANK):
    """PEFT's layer with that start on the weight, which PEFT moves."""
    model = torch.nn.Sequential(torch.nn.Linear(*reversed(weight.shape), bias=False))
    model[0].weight.data.copy_(weight)
    config = peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=["0"], init_lora_weights=init)
    return peft.get_peft_model(model, config).base_model.model[0]


def drawn(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def singular(weight: torch.Tensor, which: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(U, S, V) of numpy, float64."""
    U, S, Vt = np.linalg.svd(weight.double().numpy(), full_matrices=False)
    return U[:, which], S[which], Vt[which].T


def close(found: torch.Tensor, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found.double().numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_every_start_that_a_config_can_name_is_there():
    names = typing.get_args(AdapterConfig.model_fields["init"].annotation)
    assert set(names) == {"kaiming", *STARTS}


@pytest.mark.parametrize("shape", SHAPES)
def test_olora_is_pefts(shape):
    weight = drawn(shape)
    A0, B0 = start("olora", weight, RANK, SCALE)
    theirs = peft_layer(weight, "olora")
    close(A0, theirs.lora_A["default"].weight.detach().double().numpy())
    close(B0, theirs.lora_B["default"].weight.detach().double().numpy())


@pytest.mark.parametrize("shape", SHAPES)
def test_pissa_is_pefts_but_for_the_signs_of_pairs(shape):
    weight = drawn(shape)
    A0, B0 = start("pissa", weight, RANK, SCALE)
    theirs = peft_layer(weight, "pissa")
    A, B = (one["default"].weight.detach().double() for one in (theirs.lora_A, theirs.lora_B))
    signs = (A0.double() * A).sum(1).sign()
    close(A0, (signs[:, None] * A).numpy())
    close(B0, (B * signs).numpy())
    moved = theirs.base_layer.weight.detach().double()
    close(weight - SCALE * B0 @ A0, moved.numpy())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "which"), [("pissa", slice(RANK)), ("milora", slice(-RANK, None))]
)
def test_what_pissa_and_milora_take_off_is_that_part_of_the_weight(name, which, shape):
    weight = drawn(shape)
    A0, B0 = start(name, weight, RANK, SCALE)
    U, S, V = singular(weight, which)
    close(SCALE * B0 @ A0, U * S @ V.T)
    close((A0 * A0).sum(1), S / SCALE)  # both halves have the root of it
    close((B0 * B0).sum(0), S / SCALE)


@pytest.mark.parametrize("shape", SHAPES)
def test_olora_tail_is_the_smallest_singular_vectors(shape):
    weight = drawn(shape)
    A0, B0 = start("olora_tail", weight, RANK, SCALE)
    U, _, V = singular(weight, slice(-RANK, None))
    close(B0 @ A0, U @ V.T)
    close(A0 @ A0.T, np.eye(RANK))
    close(B0.T @ B0, np.eye(RANK))


@pytest.mark.parametrize("name", ["olora_tail", "pissa", "milora"])
@pytest.mark.parametrize("shape", [(12, 7), (7, 12)])
def test_pairs_do_not_depend_on_a_solvers_signs(name, shape, monkeypatch):
    weight, plain = drawn(shape), torch.linalg.eigh
    wanted = start(name, weight, RANK, SCALE)

    def flipped(matrix):
        values, vectors = plain(matrix)
        return torch.return_types.linalg_eigh((values, -vectors))

    monkeypatch.setattr(torch.linalg, "eigh", flipped)
    for one, other in zip(start(name, weight, RANK, SCALE), wanted, strict=True):
        assert torch.equal(one, other)


def test_a_weight_that_lacks_ranks_has_directions_all_the_same():
    """Of a padded weight: its smallest singular values are zero."""
    weight = drawn((9, 6))
    weight[:, 4:] = 0
    A0, B0 = start("olora_tail", weight, 2, SCALE)
    close(A0 @ A0.T, np.eye(2))
    close(B0.T @ B0, np.eye(2))
    close(weight @ A0.T, np.zeros((9, 2)))
    A0, B0 = start("milora", weight, 2, SCALE)
    close(B0 @ A0, np.zeros((9, 6)))


def test_small_singular_values_are_found_beside_large_ones():
    """By squares in float32 those below 3e-4 of the largest would be noise."""
    U, _ = torch.linalg.qr(drawn((16, 6)).double())
    V, _ = torch.linalg.qr(drawn((6, 6)).double())
    S = torch.tensor([1.0, 0.5, 0.1, 1e-4, 3e-5, 1e-5], dtype=torch.float64)
    A0, B0 = start("olora_tail", (U * S @ V.T).float(), 3, SCALE)
    np.testing.assert_allclose(B0.double() @ A0.double(), U[:, 3:] @ V[:, 3:].T, atol=2e-2)


@pytest.mark.parametrize("name", STARTS)
def test_a_rank_above_the_weight_is_refused(name):
    with pytest.raises(ValueError, match=r"rank 8 is not within a weight of shape \(12, 7\)"):
        start(name, drawn((12, 7)), 8, SCALE)
