"""Starts that are taken from a base weight W `[out, in]` = U S V^T: A0 `[r, in]` and B0 `[out, r]`.

name        A0                      B0                      of
olora       Q^T W                   Q of qr(W[:, :r])       OLoRA, arXiv:2406.01775
olora_tail  V^T of the last r       U of the last r         orthonormal, no singular values in it:
                                                            Mind Lab, arXiv:2606.02437
pissa       sqrt(S / s) V^T         U sqrt(S / s), first r  PiSSA, arXiv:2404.02948, as PEFT has it
milora      sqrt(S / s) V^T         U sqrt(S / s), last r   MiLoRA, arXiv:2406.09044, likewise

s is the adapter's scale: with pissa and milora `s B0 A0` is the part of W itself. Where A0 and B0
begin, and what takes them off again, is told in `base_start.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Factors = tuple[torch.Tensor, torch.Tensor]


def start(name: str, weight: torch.Tensor, rank: int, scale: float) -> Factors:
    """(A0 `[rank, in]`, B0 `[out, rank]`), float32, on the weight's device.

    Raises ValueError for a rank above either dimension, which has no such factors.
    """
    if not 0 < rank <= min(weight.shape):
        raise ValueError(f"rank {rank} is not within a weight of shape {tuple(weight.shape)}")
    A0, B0 = STARTS[name](weight, rank, scale)
    return A0.to(torch.float32), B0.to(torch.float32)


def _olora(weight: torch.Tensor, rank: int, scale: float) -> Factors:
    weight = weight.to(torch.float32)
    B0 = torch.linalg.qr(weight[:, :rank]).Q
    return B0.T @ weight, B0


def _olora_tail(weight: torch.Tensor, rank: int, scale: float) -> Factors:
    U, _, V = _singular(weight, slice(-rank, None))
    return V.T, U


def _pissa(weight: torch.Tensor, rank: int, scale: float) -> Factors:
    return _split(*_singular(weight, slice(None, rank)), scale)


def _milora(weight: torch.Tensor, rank: int, scale: float) -> Factors:
    return _split(*_singular(weight, slice(-rank, None)), scale)


STARTS: dict[str, Callable[[torch.Tensor, int, float], Factors]] = {
    "olora": _olora,
    "olora_tail": _olora_tail,
    "pissa": _pissa,
    "milora": _milora,
}


def _split(U: torch.Tensor, S: torch.Tensor, V: torch.Tensor, scale: float) -> Factors:
    root = (S / scale).sqrt()
    return root[:, None] * V.T, U * root


def _singular(
    weight: torch.Tensor, which: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(U `[out, r]`, S `[r]`, V `[in, r]`), float64, of the singular values `which` in falling
    order. From the smaller side's Gram matrix, several times as fast as an SVD; in float64 its
    squares cost nothing that float32 shows. Each pair's sign is that which makes the largest
    element of the smaller side's vector positive, so that ranks with copies agree."""
    weight = weight.to(torch.float64)
    wide = weight.shape[0] < weight.shape[1]
    tall = weight.T if wide else weight  # [long, short]
    inner = torch.linalg.eigh(tall.T @ tall).eigenvectors.flip(-1)[:, which]
    largest = inner.gather(0, inner.abs().argmax(0, keepdim=True))
    inner = inner * torch.where(largest < 0, -1.0, 1.0)
    # Its columns are orthogonal; QR also gives one for a singular value of zero a direction.
    outer, R = torch.linalg.qr(tall @ inner)
    S = R.diagonal()
    outer = outer * torch.where(S < 0, -1.0, 1.0)
    return (inner, S.abs(), outer) if wide else (outer, S.abs(), inner)
