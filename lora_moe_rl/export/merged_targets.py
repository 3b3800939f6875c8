"""Which tensors of a base checkpoint hold the weights that an adapter changes, or that are written
as numbers, and in what form.

float   `….weight`, F32, BF16 or F16; or all experts of a layer in one, as transformers 5 keeps
        them: `….experts.gate_up_proj` [E, 2I, H] and `….experts.down_proj` [E, H, I]
fp8     `….weight` F8_E4M3 and `….weight_scale_inv`: blocks of 128 x 128 (DeepSeek-V3)
int4    `….weight_packed` I32, `….weight_scale` and `….weight_shape`: groups of 32
        (compressed-tensors' pack-quantized, Kimi-K2-Thinking)
mxfp4   `….weight_packed` U8 and `….weight_scale` U8, exponents: groups of 32
        (compressed-tensors' mxfp4-pack-quantized)
mxfp4_stack   all experts of a layer in one, as gpt-oss's: `…_proj_blocks` U8 [E, out, in / 32, 16]
        and `…_proj_scales` U8 [E, out, in / 32]; as numbers `…_proj` [E, in, out]. Not merged into
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lora_moe_rl.adapters.families import hf_layer, hf_path
from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.errors import ExportError
from lora_moe_rl.files.untrusted import Entry, SafeWeights
from lora_moe_rl.models import quantised

FLOATS = ("F32", "BF16", "F16")
BLOCKS = "_blocks"  # behind the name of a stack
FP8_BLOCK, INT4_GROUP, INT4_IN_WORD = 128, 32, 8
MXFP4_GROUP, MXFP4_IN_BYTE = 32, 2
# That a float is stored as.
CODES = ("U8", "I8", "U16", "I16", "U32", "I32", "F8_E4M3", "F8_E5M2", "F8_E8M0")
SHOWN = 5
WAY_OUT = "write another form with --dtype bfloat16"
TURNED = "mxfp4_stack"  # whose matrices are the other way round as numbers


@dataclass(frozen=True)
class Part:
    """Rows of a matrix, and the site whose B A is added to them."""

    first_row: int
    rows: int
    site: Site
    expert: int | None


@dataclass(frozen=True)
class StoredWeight:
    """One weight `[out, in]`, or a stack `[E, out, in]`. `name` is that of its unquantised tensor,
    `tensors` are `{role: tensor}` with the roles weight, scale and shape. `parts` has an element
    for each matrix, or none when no adapter changes it."""

    name: str
    form: str
    shape: tuple[int, ...]
    tensors: Mapping[str, str]
    parts: tuple[tuple[Part, ...], ...] = ()

    @property
    def as_numbers(self) -> tuple[int, ...]:
        """The shape of its unquantised tensor."""
        *stack, out, in_features = self.shape
        return (*stack, in_features, out) if self.form == TURNED else self.shape

    def role_of(self, tensor: str) -> str:
        return next(role for role, name in self.tensors.items() if name == tensor)


def find(
    base: SafeWeights, config: Mapping[str, Any], spec: AdapterSpec, dtype: str | None
) -> dict[str, StoredWeight]:
    """`{name: weight}` of all that adapters change and, when `dtype` is given, of all that gets
    another form. Raises ExportError for a site that has no weight in the base, a weight of another
    shape, and a form that is not known."""
    found: dict[str, StoredWeight] = {}
    missing: list[str] = []
    for site in spec:
        for weight in _weights_of(base, spec, site, missing):
            known = found.get(weight.name)
            if known is not None:  # gate and up in one stack
                parts = tuple(a + b for a, b in zip(known.parts, weight.parts, strict=True))
                weight = StoredWeight(known.name, known.form, known.shape, known.tensors, parts)
            found[weight.name] = weight
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise ExportError(
            f"{base.directory} has no weights for {len(missing)} adapted linears: "
            f"{'; '.join(missing[:SHOWN])}{more}. Is it the base of this adapter?"
        )
    check_quantisation(config, {w.form for w in found.values()}, dtype)
    paths = {weight.name.removesuffix(".weight") for weight in found.values()}
    _check_beside(base, [n for n in base.file_of if dtype or n.rpartition(".")[0] in paths])
    if dtype is None:
        _require_float32_scales(base, found.values())
    else:
        found |= {w.name: w for w in _others(base, found)}
        check_quantisation(config, {w.form for w in found.values()}, dtype)
    return found


def _check_beside(base: SafeWeights, names: Iterable[str]) -> None:
    """What no weight that is read has beside it. What is copied as it is may have it."""
    for reason in quantised.tensors_refused(set(names)):
        raise ExportError(f"{base.directory}: {reason}")


def _require_float32_scales(base: SafeWeights, found: Iterable[StoredWeight]) -> None:
    """New scales of FP8 are float32."""
    for weight in found:
        if weight.form == "fp8" and (scale := base.entry(weight.tensors["scale"])).dtype != "F32":
            raise ExportError(f"{base.directory}: {scale.name} is {scale.dtype}; {WAY_OUT}")


def of_numbers(base: SafeWeights, config: Mapping[str, Any]) -> dict[str, StoredWeight]:
    """The same of a checkpoint that no adapter changes. Raises ExportError for one that has nothing
    quantised."""
    _check_beside(base, base.file_of)
    found: dict[str, StoredWeight] = {}
    for weight in _others(base, {}):
        if weight.name in found:
            raise ExportError(f"{base.directory} has {weight.name} twice, as numbers and packed")
        found[weight.name] = weight
    forms = {weight.form for weight in found.values()}
    if forms == {"float"}:
        said = config.get("quantization_config")
        method = (said or {}).get("quant_method")
        end = (
            f", and quantization_config says quant_method={method!r}: it is not known"
            if said
            else ": it can be taken as it is"
        )
        raise ExportError(f"{base.directory} holds numbers already{end}")
    check_quantisation(config, forms, "")
    return found


def _weights_of(
    base: SafeWeights, spec: AdapterSpec, site: Site, missing: list[str]
) -> Iterator[StoredWeight]:
    path = f"{hf_layer(spec.shape, site.layer)}.{hf_path(spec.shape, site.module)}"
    shape = (site.out_features, site.in_features)
    if site.num_experts is None:
        yield from _one(base, path, shape, Part(0, shape[0], site, None), missing)
        return
    if (stack := _stack(base, spec, site)) is not None:
        yield stack
        return
    for expert in range(site.num_experts):
        part = Part(0, shape[0], site, expert)
        yield from _one(base, path.format(expert), shape, part, missing)
    beyond = path.format(site.num_experts)
    if names := _below(base, beyond):
        raise ExportError(
            f"{base.directory} has {names[0]}, and the adapter has {site.num_experts} experts in "
            f"{site.name}: it belongs to another base"
        )


def _one(
    base: SafeWeights, path: str, shape: tuple[int, int], part: Part, missing: list[str]
) -> Iterator[StoredWeight]:
    weight = stored(base, path)
    if weight is None:
        there = _below(base, path)
        note = f" (it has {', '.join(there)}, a form that is not known)" if there else ""
        missing.append(f"{path}.weight of {part.site.name}{note}")
        return
    if weight.shape != shape:
        raise ExportError(
            f"{base.directory}: {weight.name} is {list(weight.shape)}, and the adapter's site "
            f"{part.site.name} takes {list(shape)}: it belongs to another base"
        )
    yield StoredWeight(weight.name, weight.form, weight.shape, weight.tensors, ((part,),))


def stored(base: SafeWeights, path: str) -> StoredWeight | None:
    """The linear at `path`, or None when it is not there in a form that is known. Raises
    ExportError when its tensors do not belong together."""
    name, packed = f"{path}.weight", f"{path}.weight_packed"
    if packed in base.file_of:
        return _mxfp4(base, path) if base.entry(packed).dtype == "U8" else _int4(base, path)
    if name not in base.file_of:
        return None
    entry = base.entry(name)
    if entry.dtype in FLOATS:
        return StoredWeight(name, "float", entry.shape, {"weight": name})
    scale = f"{path}.weight_scale_inv"
    if entry.dtype != "F8_E4M3" or scale not in base.file_of:
        return None
    blocks = tuple(-(-size // FP8_BLOCK) for size in entry.shape)
    _require(base, base.entry(scale), blocks, FLOATS)
    return StoredWeight(name, "fp8", entry.shape, {"weight": name, "scale": scale})


def _int4(base: SafeWeights, path: str) -> StoredWeight | None:
    names = {
        "weight": f"{path}.weight_packed",
        "scale": f"{path}.weight_scale",
        "shape": f"{path}.weight_shape",
    }
    packed = base.entry(names["weight"])
    if packed.dtype != "I32" or len(packed.shape) != 2 or any(
        name not in base.file_of for name in names.values()
    ):  # fmt: skip
        return None
    out, in_features = packed.shape[0], packed.shape[1] * INT4_IN_WORD
    written = tuple(base.read(names["shape"]).tolist())
    if written != (out, in_features):
        raise ExportError(
            f"{base.directory}: {names['shape']} says {list(written)}, and {packed.name} holds "
            f"{[out, in_features]}"
        )
    groups = (out, in_features // INT4_GROUP)
    _require(base, base.entry(names["scale"]), groups, FLOATS)
    if in_features % INT4_GROUP:
        raise ExportError(f"{packed.name}: {in_features} columns are no whole groups of 32")
    return StoredWeight(f"{path}.weight", "int4", (out, in_features), names)


def _mxfp4(base: SafeWeights, path: str) -> StoredWeight | None:
    names = {"weight": f"{path}.weight_packed", "scale": f"{path}.weight_scale"}
    packed = base.entry(names["weight"])
    if len(packed.shape) != 2 or names["scale"] not in base.file_of:
        return None
    out, in_features = packed.shape[0], packed.shape[1] * MXFP4_IN_BYTE
    if in_features % MXFP4_GROUP:
        raise ExportError(f"{packed.name}: {in_features} columns are no whole groups of 32")
    _require(base, base.entry(names["scale"]), (out, in_features // MXFP4_GROUP), ("U8",))
    return StoredWeight(f"{path}.weight", "mxfp4", (out, in_features), names)


def _mxfp4_stack(base: SafeWeights, name: str) -> StoredWeight | None:
    names = {"weight": f"{name}{BLOCKS}", "scale": f"{name}_scales"}
    blocks = base.entry(names["weight"])
    if blocks.dtype != "U8" or len(blocks.shape) != 4 or names["scale"] not in base.file_of:
        return None
    experts, out, groups, _ = blocks.shape
    _require(base, blocks, (experts, out, groups, MXFP4_GROUP // MXFP4_IN_BYTE), ("U8",))
    _require(base, base.entry(names["scale"]), (experts, out, groups), ("U8",))
    return StoredWeight(name, TURNED, (experts, out, groups * MXFP4_GROUP), names)


def _require(base: SafeWeights, entry: Entry, shape: tuple, dtypes: tuple[str, ...]) -> None:
    if entry.shape != shape or entry.dtype not in dtypes:
        raise ExportError(
            f"{base.directory}: {entry.name} is {entry.dtype} {list(entry.shape)}, and its weight "
            f"takes {' or '.join(dtypes)} {list(shape)}"
        )


def _stack(base: SafeWeights, spec: AdapterSpec, site: Site) -> StoredWeight | None:
    """All experts of a layer in one tensor, or None."""
    assert site.num_experts is not None
    down = site.module == "experts.down"
    blocks = dict.fromkeys((spec.shape.family.moe_block, "mlp"))
    layer = hf_layer(spec.shape, site.layer)
    for block in blocks:
        name = f"{layer}.{block}.experts.{'down' if down else 'gate_up'}_proj"
        if f"{name}_blocks" in base.file_of:
            raise ExportError(
                f"{base.directory} has {name}_blocks: experts in gpt-oss's stacks of MXFP4, which "
                "a merge does not write; known are the experts one by one, as compressed-tensors "
                "has them"
            )
        if name not in base.file_of:
            continue
        if spec.shape.family.experts == "interleaved":
            raise ExportError(
                f"{base.directory} has {name} with gate and up in turn, which a merge does not "
                "write: export the adapter (--to peft), and merge it with PEFT's merge_and_unload, "
                "or leave experts out of adapter.targets"
            )
        rows = site.out_features * (1 if down else 2)
        shape = (site.num_experts, rows, site.in_features)
        _require(base, base.entry(name), shape, FLOATS)
        first = site.out_features if site.module == "experts.up" else 0
        parts = tuple((Part(first, site.out_features, site, expert),) for expert in range(shape[0]))
        return StoredWeight(name, "float", shape, {"weight": name}, parts)
    return None


def _below(base: SafeWeights, path: str) -> list[str]:
    return [name for name in base.file_of if name.startswith(f"{path}.")]


def _others(base: SafeWeights, found: Mapping[str, StoredWeight]) -> Iterator[StoredWeight]:
    """What no adapter changes and another dtype does: quantised weights, and the tensors of the
    main dtype. What is kept in another one on purpose, as a router's corrections, stays."""
    owned = {tensor for weight in found.values() for tensor in weight.tensors.values()}
    for name in base.file_of:
        path, _, last = name.rpartition(".")
        stack = last.endswith(BLOCKS)
        if (stack or last in ("weight_packed", "weight_scale_inv")) and name not in owned:
            weight = _mxfp4_stack(base, name.removesuffix(BLOCKS)) if stack else stored(base, path)
            if weight is None:
                raise ExportError(f"{base.directory}: the form of {name} is not known")
            owned |= set(weight.tensors.values())
            yield weight
    for entry in base.entries():
        if entry.dtype in CODES and entry.name not in owned:
            raise ExportError(
                f"{base.directory}: {entry.name} is {entry.dtype}, and no scales that are known "
                "belong to it: it cannot be written as numbers"
            )
    main = main_dtype(base)
    for entry in base.entries():
        if entry.dtype == main and entry.name not in owned:
            columns = entry.shape[-1] if len(entry.shape) > 1 else 1
            rows = math.prod(entry.shape) // max(columns, 1)
            yield StoredWeight(entry.name, "float", (rows, columns), {"weight": entry.name})


def main_dtype(base: SafeWeights) -> str:
    """The dtype of most bytes among F32, BF16 and F16; the scales of INT4 weights do not count."""
    nbytes = dict.fromkeys(FLOATS, 0)
    for entry in base.entries():
        if entry.dtype in nbytes and not entry.name.endswith((".weight_scale", "_scale_inv")):
            nbytes[entry.dtype] += entry.nbytes
    return max(nbytes, key=lambda dtype: nbytes[dtype])


def check_quantisation(config: Mapping[str, Any], forms: set[str], dtype: str | None) -> None:
    """Raises ExportError when config.json says of a quantised base what `forms` are not."""
    said = quantised.said_of(config)
    if "fp8" in forms:
        method, block = said.get("quant_method"), said.get("weight_block_size")
        if method != "fp8" or block != [FP8_BLOCK, FP8_BLOCK]:
            raise ExportError(
                f"the base's weights are F8_E4M3, and quantization_config in config.json says "
                f"quant_method={method!r}, weight_block_size={block}; known is 'fp8' with "
                f"{[FP8_BLOCK, FP8_BLOCK]}"
            )
        if said.get("scale_fmt") not in (None, "float") and dtype is None:
            raise ExportError(
                f"the base's FP8 scales have scale_fmt={said['scale_fmt']!r}, which a merge does "
                f"not write; {WAY_OUT}"
            )
    if TURNED in forms and said.get("quant_method") != "mxfp4":
        raise ExportError(
            "the base has stacks of MXFP4, and quantization_config in config.json says "
            f"quant_method={said.get('quant_method')!r}; known is 'mxfp4'"
        )
    kinds = [kind for form, kind in quantised.PACKED_AS.items() if form in forms]
    packings = (quantised.packing_refused(said, kind) for kind in kinds)
    for reason in chain(*packings, quantised.rotations_refused(said)):
        raise ExportError(f"config.json of the base: {reason}")
