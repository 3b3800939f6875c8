"""Other ranks for an adapter, and sums of adapters, from the factors alone.

B A is never formed. With B = Q_B R_B and A^T = Q_A R_A its singular values are those of the small
R_B R_A^T [r, r], so that the best approximation of a lower rank costs two QRs of tall matrices.
Growing keeps the factors as they are: new columns of B are zero, so that the function is the same
bit for bit, and new rows of A are random, so that they can be trained (zeros in both have no
gradient).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.errors import AdapterError

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Change:
    """What a new rank did to one site. Norms are Frobenius', of scale * B A over all experts."""

    site: str
    before: int
    after: int
    norm: float
    lost: float

    @property
    def relative(self) -> float:
        return self.lost / self.norm if self.norm else 0.0


def resize(
    spec: AdapterSpec, tensors: Tensors, rank_of: Callable[[Site], int], seed: int = 0
) -> tuple[AdapterSpec, dict[str, np.ndarray], list[Change]]:
    """The same adapter with the rank `rank_of(site)` at each site, scales as they are."""
    sites = (replace(site, rank=rank_of(site), frozen_rank=0) for site in spec)
    target = AdapterSpec(spec.shape, tuple(sites))
    resized, changes = fit(spec, tensors, target, seed)
    return target, resized, changes


def fit(
    spec: AdapterSpec, tensors: Tensors, target: AdapterSpec, seed: int = 0
) -> tuple[dict[str, np.ndarray], list[Change]]:
    """The tensors of `spec` as those of `target`, for the sites that both have.

    Ranks that differ are resized, scales that differ are folded into B, a tensor that all experts
    share is repeated where `target` has one for each. Raises AdapterError for a target that shares
    what the source does not.
    """
    out, changes = {}, []
    for site in target:
        old = spec.by_name.get(site.name)
        if old is None:
            continue
        A, B = tensors[f"{site.name}.A"], tensors[f"{site.name}.B"]
        if old.shared != site.shared:
            A, B = _each_expert(old, A, B)
            if site.shared is not None:
                raise AdapterError(
                    f"{site.name}: experts that each have their own {site.shared} cannot become "
                    f"expert_layout=shared_outer; use per_expert"
                )
        if old.scale != site.scale:
            B = B * np.float32(old.scale / site.scale)
        if old.rank != site.rank:
            A, B, change = _to_rank(site, old.rank, A, B, seed)
            changes.append(change)
        out[f"{site.name}.A"] = np.ascontiguousarray(A, np.float32)
        out[f"{site.name}.B"] = np.ascontiguousarray(B, np.float32)
    return out, changes


def _to_rank(site: Site, before: int, A: np.ndarray, B: np.ndarray, seed: int):
    norm = site.scale * math.sqrt(float(squared_norms(A, B).sum()))
    lost = 0.0
    if before > site.rank:
        small_A, small_B, lost = truncate(*_flat(site, A, B), site.rank)
        A, B = _unflat(site, small_A, small_B)
    if A.shape[-2] < site.rank:
        A, B = _grown(site, A, B, seed)
    return A, B, Change(site.name, before, site.rank, norm, site.scale * lost)


def _grown(site: Site, A: np.ndarray, B: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    there = A.shape[-2]
    A = np.concatenate([A, _fresh_rows(site, A.shape[:-2], there, seed)], -2)
    return A, np.concatenate([B, np.zeros((*B.shape[:-1], site.rank - there), B.dtype)], -1)


def truncate(A: np.ndarray, B: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(A `[..., r, in]`, B `[..., out, r]`, Frobenius norm of what is lost), float32.

    The best approximation of B A `[..., out, in]` of that rank; both have the roots of its singular
    values. r is the rank, or what is the most that B A can have, if that is less.
    """
    Q_B, R_B = np.linalg.qr(B.astype(np.float64))
    Q_A, R_A = np.linalg.qr(A.astype(np.float64).swapaxes(-1, -2))
    U, S, Vt = np.linalg.svd(R_B @ R_A.swapaxes(-1, -2), full_matrices=False)
    lost = math.sqrt(float((S[..., rank:] ** 2).sum()))
    root = np.sqrt(S[..., :rank])
    small_B = Q_B @ (U[..., :rank] * root[..., None, :])
    small_A = (root[..., None] * Vt[..., :rank, :]) @ Q_A.swapaxes(-1, -2)
    return small_A.astype(np.float32), small_B.astype(np.float32), lost


def squared_norms(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Squared Frobenius norm of B A, of each expert where there are any: sum of (B^T B)(A A^T)."""
    A, B = A.astype(np.float64), B.astype(np.float64)
    return ((B.swapaxes(-1, -2) @ B) * (A @ A.swapaxes(-1, -2))).sum((-1, -2)).clip(0)


def _flat(site: Site, A: np.ndarray, B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """With a shared tensor all experts are one matrix: only so can they go on sharing it."""
    if site.shared == "A":
        return A, B.reshape(-1, B.shape[-1])
    if site.shared == "B":
        return A.swapaxes(0, 1).reshape(A.shape[1], -1), B
    return A, B


def _unflat(site: Site, A: np.ndarray, B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if site.shared == "A":
        return A, B.reshape(site.num_experts or 1, -1, B.shape[-1])
    if site.shared == "B":
        return A.reshape(len(A), site.num_experts or 1, -1).swapaxes(0, 1), B
    return A, B


def _fresh_rows(site: Site, batch: tuple[int, ...], before: int, seed: int) -> np.ndarray:
    """Those after the first `before`, uniform in +-1/sqrt(in), as an adapter's start. Drawn anew at
    each growth: rows that are there already would add nothing."""
    label = f"{seed}/{site.name}/rows {before}-{site.rank}"
    digest = hashlib.sha256(label.encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    bound = 1 / math.sqrt(site.in_features)
    return generator.uniform(-bound, bound, (*batch, site.rank - before, site.in_features)).astype(
        np.float32
    )


def fresh(site: Site, seed: int) -> dict[str, np.ndarray]:
    """A new adapter of one site: A random, B zero."""
    shape = site.shape_A
    return {
        f"{site.name}.A": _fresh_rows(site, shape[:-2], 0, seed),
        f"{site.name}.B": np.zeros(site.shape_B, np.float32),
    }


def _each_expert(site: Site, A: np.ndarray, B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A and B with one of each expert, whatever was shared."""
    if site.num_experts is None:
        return A, B
    grow = site.num_experts
    if site.shared == "A":
        A = np.broadcast_to(A, (grow, *A.shape))
    if site.shared == "B":
        B = np.broadcast_to(B, (grow, *B.shape))
    return A, B


def combine(
    parts: Sequence[tuple[AdapterSpec, Tensors, float]],
) -> tuple[AdapterSpec, dict[str, np.ndarray]]:
    """The sum of weight * adapter, exactly: ranks are stacked, weights and scales go into B.

    A site that only some have is of those alone. Raises AdapterError for other bases' adapters.
    """
    shape = parts[0][0].shape
    if any(spec.shape != shape for spec, _, _ in parts):
        raise AdapterError("adapters of bases with other sizes cannot be combined")
    names = {site.name for spec, _, _ in parts for site in spec}
    sites, tensors = [], {}
    for layer in range(shape.num_layers):
        for module in shape.modules(layer):
            name = f"layers.{layer}.{module}"
            if name not in names:
                continue
            of_site = [(s.by_name[name], t, w) for s, t, w in parts if name in s.by_name]
            site, A, B = _stacked(of_site)
            sites.append(site)
            tensors[f"{name}.A"], tensors[f"{name}.B"] = A, B
    return AdapterSpec(shape, tuple(sites)), tensors


def _stacked(of_site: list[tuple[Site, Tensors, float]]) -> tuple[Site, np.ndarray, np.ndarray]:
    first = of_site[0][0]
    alike = all(site.shared == first.shared for site, _, _ in of_site)
    of_A, of_B = [], []
    for site, tensors, weight in of_site:
        A, B = tensors[f"{site.name}.A"], tensors[f"{site.name}.B"]
        if not alike:
            A, B = _each_expert(site, A, B)
        factor = weight * site.scale / first.scale
        with np.errstate(over="ignore"):
            B = B * np.float32(factor)
        if not np.isfinite(B).all():
            raise AdapterError(f"{site.name}: B times {factor:g} is too large for float32")
        of_A.append(A)
        of_B.append(B)
    A, B = np.concatenate(of_A, -2), np.concatenate(of_B, -1)
    shared = first.shared if alike else None
    return replace(first, rank=A.shape[-2], shared=shared, frozen_rank=0), A, B
