"""Canonical adapter tensors as one contiguous buffer, in the groups that vLLM's layers take.

vLLM fuses some linears: q, k and v are one module, gate and up another, all routed experts of a
layer a third. Each of its modules takes a fixed number of parts; part i has a pair

    A [r, in]      B [out, r]          a linear
    A [E, r, in]   B [E, out, r]       routed experts, parts in the order gate, down, up

with the scale folded into B. Parts may differ in rank. A tensor that all experts share travels
once, without E. A part that is not adapted is absent. The manifest says where each tensor lies in
the buffer and what its checksum is; it travels as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
import xxhash

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import NOT_SERVABLE, AdapterSpec, Site
from lora_moe_rl.errors import RefitError

Dtype = Literal["float32", "bfloat16"]
Matrix = Literal["A", "B"]

# numpy has no bfloat16: its bits travel as uint16.
STORAGE = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16)}
ALIGNMENT = 64  # bytes; a cache line, and more than any vector load asks for

# Our module name -> (vLLM's module below model.layers.N, part, number of parts). The names of the
# blocks of experts are their family's.
_COMMON = {
    "o_proj": ("self_attn.o_proj", 0, 1),
    "mlp.gate": ("mlp.gate_up_proj", 0, 2),
    "mlp.up": ("mlp.gate_up_proj", 1, 2),
    "mlp.down": ("mlp.down_proj", 0, 1),
    "experts.gate": ("{moe_block}.experts", 0, 3),
    "experts.down": ("{moe_block}.experts", 1, 3),
    "experts.up": ("{moe_block}.experts", 2, 3),
    "shared_expert.gate": ("{moe_block}.{shared_expert}.gate_up_proj", 0, 2),
    "shared_expert.up": ("{moe_block}.{shared_expert}.gate_up_proj", 1, 2),
    "shared_expert.down": ("{moe_block}.{shared_expert}.down_proj", 0, 1),
}
_GQA = {
    "q_proj": ("self_attn.qkv_proj", 0, 3),
    "k_proj": ("self_attn.qkv_proj", 1, 3),
    "v_proj": ("self_attn.qkv_proj", 2, 3),
}
_MLA = {
    "q_a_proj": ("self_attn.fused_qkv_a_proj", 0, 2),
    "kv_a_proj": ("self_attn.fused_qkv_a_proj", 1, 2),
    "q_b_proj": ("self_attn.q_b_proj", 0, 1),
}
_MLA_FULL_Q = {
    "q_proj": ("self_attn.q_proj", 0, 1),
    "kv_a_proj": ("self_attn.kv_a_proj_with_mqa", 0, 1),
}


@dataclass(frozen=True)
class Entry:
    """One tensor of the buffer. `offset` is in bytes; `checksum` is xxh3-64 of its bytes."""

    site: str
    module: str
    part: int
    parts: int
    matrix: Matrix
    shape: tuple[int, ...]
    offset: int
    checksum: str = ""

    def nbytes(self, dtype: Dtype) -> int:
        return math.prod(self.shape) * STORAGE[dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """What a buffer holds. `nbytes` is its size; `checksum` covers every name, shape and value."""

    version: int
    dtype: Dtype
    nbytes: int
    entries: tuple[Entry, ...]
    checksum: str = ""

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(entry.module for entry in self.entries))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        fields = json.loads(text)
        entries = tuple(
            Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in fields.pop("entries")
        )
        return cls(**fields, entries=entries)


def vllm_module(shape: ModelShape, site: Site) -> tuple[str, int, int]:
    """(vLLM's module, part, number of parts) that serves a site.

    Raises RefitError for one that vLLM serves no adapter of.
    """
    family = shape.family
    if family.attention == "mla":
        attention = _MLA if shape.dims["q_lora_rank"] else _MLA_FULL_Q
    else:
        attention = _GQA
    modules = _COMMON | attention
    if site.module not in modules:
        raise RefitError(f"{site.name} has no adapter slot in vLLM: {NOT_SERVABLE[site.module]}")
    suffix, part, parts = modules[site.module]
    suffix = suffix.format(moe_block=family.moe_block, shared_expert=family.shared_expert)
    return f"model.layers.{site.layer}.{suffix}", part, parts


def layout(spec: AdapterSpec, dtype: Dtype) -> Manifest:
    """Where every tensor of `spec` lies. The same for all versions; without checksums."""
    entries, offset = [], 0
    for site in spec:
        module, part, parts = vllm_module(spec.shape, site)
        matrices: list[tuple[Matrix, tuple[int, ...]]] = [("A", site.shape_A), ("B", site.shape_B)]
        for matrix, shape in matrices:
            entry = Entry(site.name, module, part, parts, matrix, shape, offset)
            entries.append(entry)
            offset += -(-entry.nbytes(dtype) // ALIGNMENT) * ALIGNMENT
    return Manifest(version=-1, dtype=dtype, nbytes=offset, entries=tuple(entries))


def pack(
    spec: AdapterSpec,
    plan: Manifest,
    tensors: Mapping[str, np.ndarray],
    version: int,
    buffer: np.ndarray,
) -> Manifest:
    """Writes whole float32 canonical `tensors` into `buffer` (uint8 `[plan.nbytes]`).

    Returns the manifest of `version`, with checksums.
    """
    entries = []
    for entry in plan.entries:
        values = tensors[f"{entry.site}.{entry.matrix}"]
        if entry.matrix == "B":
            values = values * np.float32(spec.by_name[entry.site].scale)
        view = _view(entry, plan.dtype, buffer)
        view[...] = _bfloat16_bits(values) if plan.dtype == "bfloat16" else values
        entries.append(replace(entry, checksum=xxhash.xxh3_64_hexdigest(view.data)))
    return replace(
        plan, version=version, entries=tuple(entries), checksum=_whole(plan.dtype, entries)
    )


def unpack(manifest: Manifest, buffer: np.ndarray) -> dict[str, list[list[np.ndarray] | None]]:
    """`{module: [[A, B] or None a part]}`, as views of `buffer`.

    Raises RefitError when the buffer is not what the manifest says.
    """
    if buffer.nbytes < manifest.nbytes:
        raise RefitError(
            f"adapter version {manifest.version}: {buffer.nbytes} bytes arrived, "
            f"{manifest.nbytes} were sent"
        )
    modules: dict[str, list[list[np.ndarray] | None]] = {}
    for entry in manifest.entries:
        view = _view(entry, manifest.dtype, buffer)
        if xxhash.xxh3_64_hexdigest(view.data) != entry.checksum:
            raise RefitError(
                f"adapter version {manifest.version}: the checksum of {entry.site}.{entry.matrix} "
                f"differs from the sender's"
            )
        parts = modules.setdefault(entry.module, [None] * entry.parts)
        pair = parts[entry.part]
        if pair is None:
            pair = parts[entry.part] = []
        pair.append(view)
    if _whole(manifest.dtype, manifest.entries) != manifest.checksum:
        raise RefitError(f"adapter version {manifest.version}: the manifest's checksum differs")
    return modules


def _view(entry: Entry, dtype: Dtype, buffer: np.ndarray) -> np.ndarray:
    raw = buffer[entry.offset : entry.offset + entry.nbytes(dtype)]
    return raw.view(STORAGE[dtype]).reshape(entry.shape)


def _whole(dtype: Dtype, entries) -> str:
    """One checksum of all: of the names, shapes and checksums of the entries."""
    lines = [f"{e.site}.{e.matrix} {e.shape} {e.checksum}" for e in entries]
    return xxhash.xxh3_128_hexdigest("\n".join([dtype, *lines]).encode())


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
