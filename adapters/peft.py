"""Writes an adapter as a PEFT directory: `adapter_model.safetensors` and `adapter_config.json`.

Two forms of routed experts, the rest is the same:

    2d  one by one, `mlp.experts.7.gate_proj.lora_A.weight`: what vLLM and Megatron-Bridge read, and
        PEFT from 0.21 with transformers 5, which stacks them while it loads
    3d  stacked, as PEFT itself saves them: `mlp.experts.base_layer.lora_A.weight` of gate_up_proj,
        `mlp.experts.lora_A.weight` of down_proj. A is [E * r, in] with the expert slowest, B is
        [out, r * E] with the expert fastest. Gate and up of ranks g and u are one adapter of rank
        g + u, A = [A_gate; A_up], B = diag(B_gate, B_up), with the rows of gate and up in turn
        where the base has its columns so. Those families have this form alone.

A tensor that all experts share is written for each of them: PEFT has no shared form. A layer with
adapters on some of gate, up and down gets zero ones on the others: both readers want all three.

`adapter_config.json` is made in `peft_config.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import numpy as np
import xxhash

from lora_moe_rl.adapters.families import ModelShape, hf_layer, hf_path
from lora_moe_rl.adapters.peft_config import EXPERTS, Form, common, completed, peft_config
from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import AdapterError
from lora_moe_rl.files.replacing import replacing
from lora_moe_rl.files.saving import stream_safetensors
from lora_moe_rl.rollout.facts import NOT_SERVABLE, SLOT_RANKS, slot_rank

# In the metadata of the file: how columns of stacked B stand, and a checksum of all tensors.
ORDER_KEY = "lora_moe_rl.expert_order"
CHECKSUM_KEY = "lora_moe_rl.xxh3_128"
BASE_KEY = "lora_moe_rl.base"  # the fingerprint of the base's files (models/fingerprint.py)
PREFIX = "base_model.model"
SCORE = "score"  # what transformers calls the layer of a critic's values
Tensors = Mapping[str, np.ndarray]


def write(
    directory: Path,
    spec: AdapterSpec,
    tensors: Tensors,
    config: RunConfig,
    form: Form | None = None,
    head: np.ndarray | None = None,
    beside: Mapping[str, str] | None = None,
    base: str | None = None,
) -> None:
    """`form`: by default the one that PEFT and vLLM both read of the family. Raises AdapterError
    for one that neither does.

    `head`, float32 [1, hidden], is a critic's: it goes in as the layer `score` of transformers'
    classes for the classification of sequences, whose one label is the value.

    `tensors` are asked for layer by layer, and those of one layer are in memory at a time, beside
    what the mapping itself holds. `beside`: further files by their text. `base`: the fingerprint of
    the base that they were trained on.

    Replaces `directory` as a whole: whenever the process is killed or the machine stops, either
    the old adapter or the new one is there. What an interrupted write left is gone after the next.
    Raises OSError when the disk refuses.
    """
    form = form_of(spec.shape, form)
    shapes, arrays = peft_shapes(spec, form), peft_tensors(spec, tensors, form)
    settings = peft_config(spec, config, form)
    if head is not None:
        name = f"{PREFIX}.{SCORE}.weight"
        shapes[name], arrays = head.shape, itertools.chain(arrays, [(name, head)])
        settings |= {"task_type": "SEQ_CLS", "modules_to_save": [SCORE]}
    digest = xxhash.xxh3_128()

    def metadata() -> dict[str, str]:
        of_base = {} if base is None else {BASE_KEY: base}
        return {"format": "pt", ORDER_KEY: "fastest", CHECKSUM_KEY: digest.hexdigest(), **of_base}

    with replacing(directory) as fresh:
        texts = {"adapter_config.json": json.dumps(settings, indent=2) + "\n"} | dict(beside or {})
        for file, text in texts.items():
            (fresh / file).write_text(text, encoding="utf-8")
        path = fresh / "adapter_model.safetensors"
        stream_safetensors(path, shapes, _digested(arrays, digest), metadata)


def form_of(shape: ModelShape, form: Form | None) -> Form:
    """The form of an adapter's files, where `form` was asked for. Raises AdapterError for one that
    nobody reads: experts that are one parameter in checkpoints have no names one by one."""
    if shape.family.experts == "modules" and form == "3d":
        raise AdapterError(
            f"experts of {shape.architecture} are modules one by one in its code, and have no name "
            "together: take the form 2d"
        )
    if shape.family.experts != "interleaved":
        return form or ("3d" if shape.family.experts == "stacked" else "2d")
    if form == "2d":
        raise AdapterError(
            f"experts of {shape.architecture} are one parameter of transformers and vLLM, and have "
            "no names one by one: take the form 3d"
        )
    return "3d"


def checksum(arrays: Tensors) -> str:
    """A checksum of names and values. It tells flipped bits, which safetensors alone does not."""
    digest = xxhash.xxh3_128()
    for _ in _digested(sorted(arrays.items()), digest):
        pass
    return digest.hexdigest()


def _digested(
    arrays: Iterable[tuple[str, np.ndarray]], digest: xxhash.xxh3_128
) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in arrays:
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values).data)
        yield name, values


def for_vllm(spec: AdapterSpec, tensors: Tensors) -> tuple[AdapterSpec, dict[str, np.ndarray]]:
    """The same function with one rank, a slot rank of vLLM, and one scale for all sites.

    Raises AdapterError for a rank that no slot holds, and for a module that vLLM would ignore.
    """
    if ignored := sorted({site.module for site in spec} & set(NOT_SERVABLE)):
        raise AdapterError(f"{ignored[0]}: {NOT_SERVABLE[ignored[0]]}; export --to merged")
    largest = max(site.rank for site in spec)
    if largest > SLOT_RANKS[-1]:
        raise AdapterError(
            f"rank {largest} is above {SLOT_RANKS[-1]}, vLLM's largest; "
            f"`lora-moe-rl adapter resize` makes it smaller"
        )
    most, rank = common(spec, "scale"), slot_rank(spec)
    padded = {}
    for site in spec:
        A, B = tensors[f"{site.name}.A"], tensors[f"{site.name}.B"] * _fold(site, most)
        padded[f"{site.name}.A"] = _pad(A, -2, rank)
        padded[f"{site.name}.B"] = _pad(B, -1, rank)
    sites = (replace(site, rank=rank, scale=most, frozen_rank=0) for site in spec)
    return AdapterSpec(spec.shape, tuple(sites)), padded


def _pad(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return np.pad(array, widths)


def _fold(site: Site, most: float) -> np.float32:
    return np.float32(site.scale / most)


def peft_shapes(spec: AdapterSpec, form: Form = "2d") -> dict[str, tuple[int, ...]]:
    """{PEFT key: shape} of all that `peft_tensors` gives, float32."""
    found: dict[str, tuple[int, ...]] = {}
    stacked: dict[int, dict[str, Site]] = {}
    for site in completed(spec):
        if form == "3d" and site.num_experts is not None:
            stacked.setdefault(site.layer, {})[site.module] = site
            continue
        A, B = (site.rank, site.in_features), (site.out_features, site.rank)
        for expert in [None] if site.num_experts is None else range(site.num_experts):
            found |= {key(spec, site, "A", expert): A, key(spec, site, "B", expert): B}
    for layer, sites in stacked.items():
        gate, up, down = (sites[module] for module in EXPERTS)
        count, rank, out = down.num_experts or 1, gate.rank + up.rank, 2 * gate.out_features
        path = _stacked_path(spec.shape, layer)
        found[f"{path}.base_layer.lora_A.weight"] = (count * rank, gate.in_features)
        found[f"{path}.base_layer.lora_B.weight"] = (out, rank * count)
        found[f"{path}.lora_A.weight"] = (count * down.rank, down.in_features)
        found[f"{path}.lora_B.weight"] = (down.out_features, down.rank * count)
    return found


def peft_tensors(
    spec: AdapterSpec, tensors: Tensors, form: Form = "2d"
) -> Iterator[tuple[str, np.ndarray]]:
    """(PEFT key, float32 array) of every site; of every expert of a routed one, or stacked. In the
    order of the keys: layer after layer."""
    whole = completed(spec)
    most = common(whole, "scale")
    for layer in sorted({site.layer for site in whole}, key=str):
        part = AdapterSpec(spec.shape, tuple(site for site in whole if site.layer == layer))
        there = {
            name: tensors[name] if name in spec.tensor_shapes else np.zeros(shape, np.float32)
            for name, shape in part.tensor_shapes.items()
        }
        yield from sorted(_of_layer(part, there, most, form), key=itemgetter(0))


def _of_layer(
    spec: AdapterSpec, tensors: Tensors, most: float, form: Form
) -> Iterator[tuple[str, np.ndarray]]:
    for site in spec:
        if form == "3d" and site.num_experts is not None:
            continue
        for matrix in "AB":
            whole = tensors[f"{site.name}.{matrix}"]
            if matrix == "B" and site.scale != most:
                whole = whole * _fold(site, most)
            for expert, values in _each(site, matrix, whole):
                name = key(spec, site, matrix, expert)
                yield name, np.ascontiguousarray(values, dtype=np.float32)
    if form == "3d" and spec.has_experts:
        yield from _stacked(spec, tensors, most)


def key(spec: AdapterSpec, site: Site, matrix: str, expert: int | None) -> str:
    """The name of a tensor in the 2d form; of one of its experts if it is a routed one's."""
    path = hf_path(spec.shape, site.module).format(expert)
    return f"{PREFIX}.{hf_layer(spec.shape, site.layer)}.{path}.lora_{matrix}.weight"


def _each(site: Site, matrix: str, whole: np.ndarray) -> Iterable[tuple[int | None, np.ndarray]]:
    if site.num_experts is None:
        return [(None, whole)]
    if site.shared == matrix:
        return ((expert, whole) for expert in range(site.num_experts))
    return enumerate(whole)


def _stacked_path(shape: ModelShape, layer: int) -> str:
    return f"{PREFIX}.{hf_layer(shape, layer)}.mlp.experts"


def _stacked(spec: AdapterSpec, tensors: Tensors, most: float) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one layer, of stacked experts."""
    layer, pairs = spec.sites[0].layer, []
    path = _stacked_path(spec.shape, layer)
    for module in EXPERTS:
        site = spec.by_name[f"layers.{layer}.{module}"]
        A, B = (
            np.stack([one for _, one in _each(site, m, tensors[f"{site.name}.{m}"])]) for m in "AB"
        )
        pairs.append((A, B * _fold(site, most)))
    (gate_A, gate_B), (up_A, up_B), down = pairs
    both_B = np.concatenate(
        [_pad(gate_B, -1, gate_B.shape[-1] + up_B.shape[-1]), _pad_front(up_B, gate_B.shape[-1])], 1
    )
    if spec.shape.family.experts == "interleaved":  # row 2 i is gate's, row 2 i + 1 up's
        both_B = both_B[:, np.arange(both_B.shape[1]).reshape(2, -1).T.ravel()]
    gate_up = np.concatenate([gate_A, up_A], 1), both_B
    for name, (A, B) in ((f"{path}.base_layer", gate_up), (path, down)):
        flat_A = A.reshape(-1, A.shape[-1])
        flat_B = B.transpose(1, 2, 0).reshape(B.shape[1], -1)
        yield f"{name}.lora_A.weight", np.ascontiguousarray(flat_A, dtype=np.float32)
        yield f"{name}.lora_B.weight", np.ascontiguousarray(flat_B, dtype=np.float32)


def _pad_front(array: np.ndarray, columns: int) -> np.ndarray:
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(columns, 0)])
