"""Reads PEFT directories that others wrote into canonical tensors.

Routed experts one by one or stacked (see `peft.py`), with or without PEFT's prefix. Of stacked
experts a file does not say in what order the columns of B stand: PEFT has the expert fastest,
Unsloth before September 2026 and Megatron-Bridge 0.6.2 have it slowest, with the same names and
shapes. `expert_order` decides where something tells, and refuses where nothing does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lora_moe_rl.adapters.families import Dims, ModelShape, hf_layer, hf_path
from lora_moe_rl.adapters.peft import CHECKSUM_KEY, ORDER_KEY, checksum
from lora_moe_rl.adapters.peft_keys import Key, PeftSettings, parse_keys
from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.errors import AdapterError
from lora_moe_rl.files.untrusted import SafeWeights, inside, read_json

Order = Literal["fastest", "slowest"]
FLOATS = ("F64", "F32", "F16", "BF16")
# From this version on a stack's A is on its input side for experts stored [out, in].
_ORIENTED = (0, 19, 1)


@dataclass(frozen=True)
class _Found:
    """A, B and scale of one linear, or of a stack of them."""

    A: np.ndarray
    B: np.ndarray
    scale: float


def read(
    directory: Path, shape: ModelShape, order: Order | None = None
) -> tuple[AdapterSpec, dict[str, np.ndarray]]:
    """(spec, float32 tensors) of a PEFT directory on a base of the given shape. `order`: of the
    columns of stacked B, where the file does not tell.

    Raises FileError for files that are malformed or pickled, and AdapterError for tensors that
    match no site, have no partner, another shape or values that are not finite, for a wrong number
    of experts, for what is not plain LoRA, and for what cannot be told apart.
    """
    config = read_json(inside(directory, "adapter_config.json"))
    settings = PeftSettings.read(config)
    with SafeWeights.open(directory, "adapter_model") as weights:
        metadata = {k: v for file in weights.files.values() for k, v in file.metadata.items()}
        keys = parse_keys(list(weights.file_of), shape)
        if not keys:
            raise AdapterError(f"{directory} holds no adapter: its file has no tensors")
        modules = [shape.modules(layer) for layer in range(shape.num_layers)]
        _check_sizes(weights, keys, modules, shape.num_experts)
        arrays = {name: _array(weights, name) for name in keys}
        if CHECKSUM_KEY in metadata:
            _check_checksum(directory, metadata[CHECKSUM_KEY], arrays)
    if order is not None and all(key.stacked is None for key in keys.values()):
        raise AdapterError(
            f"{directory} has its experts one by one, or none: --expert-order {order} has no effect"
        )
    origin = _Origin(config, metadata, order)
    found: dict[tuple[int, str], dict[int | None, _Found] | _Found] = defaultdict(dict)
    for key, A, B in _pairs(arrays, keys):
        if key.stacked is not None:
            found |= _unstack(key, A, B, shape, settings, origin, found)
            continue
        where = f"{hf_layer(shape, key.layer)}.{hf_path(shape, key.module)}".format(key.expert)
        _check_shape(where, A, B, modules[key.layer][key.module][:2])
        of_site = found[key.layer, key.module]
        if isinstance(of_site, _Found):
            raise AdapterError(f"{where}: layer {key.layer} has its experts stacked and one by one")
        of_site[key.expert] = _Found(A, B, settings.scale(where, len(A)))
    return _assemble(shape, found)


def _check_sizes(
    weights: SafeWeights,
    keys: Mapping[str, Key],
    modules: Sequence[Mapping[str, Dims]],
    num_experts: int,
) -> None:
    """Raises AdapterError for a tensor that has more numbers than an adapter of the widest linear
    of its layer, at a rank as large as that is wide: before any memory is taken for it."""
    widest = [max(size for dims in of.values() for size in dims[:2]) for of in modules]
    for name, key in keys.items():
        got, width = weights.entry(name).shape, widest[key.layer]
        count = num_experts if key.stacked is not None else 1
        if math.prod(got) > 2 * count * width**2:  # gate and up are one where they are stacked
            raise AdapterError(
                f"{name} has the shape {got}: that is no adapter of a layer whose widest linear "
                f"has {width:,} inputs or outputs"
            )


def _array(weights: SafeWeights, name: str) -> np.ndarray:
    if (dtype := weights.entry(name).dtype) not in FLOATS:
        raise AdapterError(f"{name} is {dtype}; adapters are of {', '.join(FLOATS)}")
    array = weights.read(name).float().numpy()
    if not np.isfinite(array).all():
        raise AdapterError(f"{name} holds NaN or infinite values")
    return array


def _check_checksum(directory: Path, expected: str, arrays: Mapping[str, np.ndarray]) -> None:
    if checksum(arrays) != expected:
        raise AdapterError(
            f"{directory}/adapter_model.safetensors is corrupt: its tensors do not have the "
            f"checksum that was written with them; export it again"
        )


def _pairs(
    arrays: dict[str, np.ndarray], keys: Mapping[str, Key]
) -> Iterator[tuple[Key, np.ndarray, np.ndarray]]:
    """(key of A, A, B), which are taken out of `arrays`: an adapter may fill half the memory."""
    names = {key: name for name, key in keys.items()}
    for name, key in keys.items():
        other = Key(key.layer, key.module, "AB"["BA".index(key.matrix)], key.expert, key.stacked)
        if other not in names:
            raise AdapterError(f"{name} has no lora_{other.matrix} beside it")
        if key.matrix == "A":
            yield key, arrays.pop(name), arrays.pop(names[other])


def _check_shape(where: str, A: np.ndarray, B: np.ndarray, dims) -> None:
    if A.ndim != 2 or B.ndim != 2 or (A.shape[1], B.shape[0]) != dims or len(A) != B.shape[1]:
        raise AdapterError(
            f"{where}: A {A.shape} and B {B.shape} are no adapter of a linear with {dims[0]} "
            f"inputs and {dims[1]} outputs, which need (r, {dims[0]}) and ({dims[1]}, r)"
        )


# ----- stacked experts -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    """What may tell who wrote a file."""

    config: Mapping[str, Any]
    metadata: Mapping[str, str]
    given: Order | None

    @property
    def version(self) -> tuple[int, ...] | None:
        parts = str(self.config.get("peft_version") or "").split(".")[:3]
        numbers = [part for part in parts if part.isdigit()]
        return tuple(map(int, numbers)) if len(numbers) >= 2 else None

    @property
    def unsloth(self) -> bool:
        return "unsloth" in str(
            [self.config.get("auto_mapping"), self.config.get("base_model_name_or_path")]
        )

    def told(self) -> Order | None:
        """The order, where the user, the file or its config says it."""
        if self.given is not None:
            return self.given
        if ORDER_KEY in self.metadata:
            return "fastest" if self.metadata[ORDER_KEY] == "fastest" else "slowest"
        layout = self.config.get("lora_B_layout")  # Unsloth's, since September 2026
        if layout is not None:
            return "fastest" if layout == "rank_major" else "slowest"
        if self.version is not None and not self.unsloth:
            return "fastest"
        return None


def expert_order(origin: _Origin, B: np.ndarray, experts: int, gate_up: bool) -> Order:
    """Raises AdapterError when nothing tells. B: `[out, r * E]`."""
    rank = B.shape[1] // experts
    if rank == 1 or experts == 1:
        return "fastest"  # both orders are the same
    if (told := origin.told()) is not None:
        return told
    if gate_up:
        orders: tuple[Order, ...] = ("fastest", "slowest")
        fits: list[Order] = [o for o in orders if _is_block_diagonal(_columns(B, experts, o))]
        if len(fits) == 1:
            return fits[0]
    reason = (
        "it was made with Unsloth, whose order changed in September 2026"
        if origin.unsloth
        else "adapter_config.json names no peft_version"
    )
    raise AdapterError(
        f"the columns of stacked experts' lora_B may have the expert fastest (PEFT) or slowest "
        f"(Unsloth before September 2026, Megatron-Bridge), and nothing in this adapter tells "
        f"which: {reason}. The wrong one gives every expert another's columns. Find out what wrote "
        f"it, then say --expert-order fastest or --expert-order slowest to `adapter import`"
    )


def _columns(B: np.ndarray, experts: int, order: Order) -> np.ndarray:
    """`[out, r * E]` as `[E, out, r]`."""
    if order == "fastest":
        return B.reshape(len(B), -1, experts).transpose(2, 0, 1)
    return B.reshape(len(B), experts, -1).transpose(1, 0, 2)


def _is_block_diagonal(B: np.ndarray) -> bool:
    """Whether gate uses the first half of the ranks of gate_up_proj alone, and up the second."""
    half, middle = B.shape[2] // 2, B.shape[1] // 2
    return B.shape[2] % 2 == 0 and not (B[:, :middle, half:].any() or B[:, middle:, :half].any())


def _unstack(key: Key, A, B, shape: ModelShape, settings, origin: _Origin, found) -> dict:
    """{(layer, module): _Found} of a stack of gate_up_proj or down_proj."""
    modules = shape.modules(key.layer)
    hidden, width, experts = modules["experts.gate"]
    assert experts is not None
    sides = {"gate_up": (hidden, 2 * width), "down": (width, hidden)}
    where = f"{hf_layer(shape, key.layer)}.mlp.experts"
    interleaved = shape.family.experts == "interleaved"
    kind, swapped = _which(key, where, A, B, sides, experts, origin, oriented=interleaved)
    if interleaved and kind == "gate_up":
        B = np.concatenate([B[..., ::2, :], B[..., 1::2, :]], axis=-2)
    if A.ndim == 2:
        order = expert_order(origin, B, experts, kind == "gate_up")
        A, B = A.reshape(experts, -1, A.shape[-1]), _columns(B, experts, order)
    if swapped:
        A, B = B.swapaxes(-1, -2), A.swapaxes(-1, -2)
    scale = settings.scale(f"{where}.{kind}_proj", A.shape[1])
    sites = {"down": (A, B)}
    if kind == "gate_up":
        sites = {"gate": _used(A, B[:, :width]), "up": _used(A, B[:, width:])}
    out = {}
    for part, (of_A, of_B) in sites.items():
        place = (key.layer, f"experts.{part}")
        if found.get(place):
            raise AdapterError(f"{where}: layer {key.layer} has experts.{part} twice")
        out[place] = _Found(np.ascontiguousarray(of_A), np.ascontiguousarray(of_B), scale)
    return out


def _used(A: np.ndarray, B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A and B without the ranks that B multiplies by zero in every expert: those belong to the
    other half."""
    used = np.any(B, axis=(0, 1))
    if not used.any():
        used = np.arange(len(used)) == 0
    return A[:, used], B[:, :, used]


def _which(
    key, where, A, B, sides, experts: int, origin: _Origin, oriented: bool
) -> tuple[str, bool]:
    """("gate_up" or "down", whether A is on the output side). `oriented`: of experts stored
    [in, out], whose A every PEFT has on their input side."""
    stacked = 3 if A.ndim == 3 else 2
    ranks = (A.shape[0], B.shape[-1]) if stacked == 2 else (A.shape[1], B.shape[-1])
    counts = {A.shape[0], B.shape[0]} if stacked == 3 else {experts}
    whole = stacked == 3 or not A.shape[0] % experts
    if B.ndim != stacked or ranks[0] != ranks[1] or counts != {experts} or not whole:
        raise AdapterError(
            f"{where}: A {A.shape} and B {B.shape} are not stacks of {experts} experts, of which "
            f"the base has that many"
        )
    got = (A.shape[-1], B.shape[-2])
    kinds = [key.stacked] if key.stacked else list(sides)
    fits = [(kind, got != sides[kind]) for kind in kinds if got in (sides[kind], sides[kind][::-1])]
    if len(fits) != 1:
        raise AdapterError(
            f"{where}: A {A.shape} and B {B.shape} fit neither gate_up_proj, with (in, out) "
            f"{sides['gate_up']}, nor down_proj, with {sides['down']}"
        )
    ((kind, swapped),) = fits
    if oriented:
        if swapped:
            raise AdapterError(f"{where}: A {A.shape} of {kind}_proj is not on its input side")
        return kind, False
    if sides[kind][0] == sides[kind][1] and ORDER_KEY not in origin.metadata:
        # A square parameter: only the version tells on which side A is.
        if origin.version is None:
            raise AdapterError(
                f"{where}: {kind}_proj is square, PEFT before 0.19.1 has A on its output side, and "
                f"adapter_config.json names no peft_version"
            )
        swapped = origin.version < _ORIENTED
    return kind, swapped


# ----- into a spec ---------------------------------------------------------------------------


def _assemble(shape: ModelShape, found) -> tuple[AdapterSpec, dict[str, np.ndarray]]:
    sites, tensors = [], {}
    for layer in range(shape.num_layers):
        for module, (in_features, out_features, experts) in shape.modules(layer).items():
            one = found.pop((layer, module), None)
            if not one:
                continue
            if isinstance(one, dict):
                one = one[None] if experts is None else _stack(layer, module, one, experts)
            if not (one := _without_padding(one)).A.size:
                continue  # PEFT's form has all of an expert's linears; the run had not
            site = Site(
                layer, module, in_features, out_features, one.A.shape[-2], one.scale, experts,
                blocks=shape.blocks(module),
            )  # fmt: skip
            sites.append(site)
            tensors[f"{site.name}.A"], tensors[f"{site.name}.B"] = one.A, one.B
    if not sites:
        raise AdapterError("all tensors of the adapter are zero, A as well as B: it does nothing")
    return AdapterSpec(shape, tuple(sites)), tensors


def _without_padding(one: _Found) -> _Found:
    """The same adapter without the ranks that are zero in A and in B: they say nothing, and have no
    gradient for whoever goes on from there."""
    across = tuple(range(one.A.ndim - 2))
    used = one.A.any((*across, -1)) | one.B.any((*across, -2))
    return one if used.all() else _Found(one.A[..., used, :], one.B[..., used], one.scale)


def _stack(layer: int, module: str, of_expert: dict[int | None, _Found], experts: int) -> _Found:
    """One by one to stacked; ranks that differ are padded, scales that differ folded into B."""
    numbers = {number for number in of_expert if number is not None}
    if numbers != set(range(experts)):
        missing, more = sorted(set(range(experts)) - numbers), sorted(numbers - set(range(experts)))
        raise AdapterError(
            f"layers.{layer}.{module}: the base has {experts} experts; the adapter lacks "
            f"{missing[:8] or 'none'} and has {more[:8] or 'none'} beyond them"
        )
    rank = max(len(one.A) for one in of_expert.values())
    first = of_expert[0]
    A = np.zeros((experts, rank, first.A.shape[1]), np.float32)
    B = np.zeros((experts, first.B.shape[0], rank), np.float32)
    for number in range(experts):
        one = of_expert[number]
        A[number, : len(one.A)] = one.A
        with np.errstate(over="ignore"):
            B[number, :, : len(one.A)] = one.B * np.float32(one.scale / first.scale)
    if not np.isfinite(B).all():
        raise AdapterError(
            f"layers.{layer}.{module}: the experts' scales are too far apart for one tensor; mend "
            "alpha_pattern"
        )
    return _Found(A, B, first.scale)
