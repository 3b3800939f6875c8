"""Writes an adapter as a PEFT directory: `adapter_model.safetensors` and `adapter_config.json`.

Two forms of routed experts, the rest is the same:

    2d  one by one, `mlp.experts.7.gate_proj.lora_A.weight`: what vLLM and Megatron-Bridge read, and
        PEFT from 0.21 with transformers 5, which stacks them while it loads
    3d  stacked, as PEFT itself saves them: `mlp.experts.base_layer.lora_A.weight` of gate_up_proj,
        `mlp.experts.lora_A.weight` of down_proj. A is [E * r, in] with the expert slowest, B is
        [out, r * E] with the expert fastest. Gate and up of ranks g and u are one adapter of rank
        g + u, A = [A_gate; A_up], B = diag(B_gate, B_up).

A tensor that all experts share is written for each of them: PEFT has no shared form. A layer with
adapters on some of gate, up and down gets zero ones on the others: both readers want all three.

Ranks that differ go into `rank_pattern`. vLLM ignores it and `alpha_pattern`, and scales every
module by the one `lora_alpha / r`, so that the patterns are written to give each module that same
scale, and what a module's own scale differs from it by is folded into its B. `for_vllm` pads all
ranks to one, for engines that want to know the largest from `r`.

PEFT 0.21.2 takes gate_proj, up_proj and down_proj in `target_modules` of a model whose experts
transformers 5 stacks for these experts alone, and forgets the linears of dense layers and shared
experts that have the same names (`_convert_peft_config_moe`). Those are named by their weights, in
`target_parameters`, which it leaves as they are. For Qwen2-MoE it does the opposite: it takes the
linears, and the stacked experts have to be named.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from lora_moe_rl.adapters.families import hf_path
from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import AdapterError
from lora_moe_rl.files.replacing import replacing
from lora_moe_rl.files.saving import save_safetensors
from lora_moe_rl.models.directory import base_name
from lora_moe_rl.rollout.facts import NOT_SERVABLE, SLOT_RANKS, slot_rank

Form = Literal["2d", "3d"]
EXPERTS = ("experts.gate", "experts.up", "experts.down")
# In the metadata of the file: how columns of stacked B stand, and a checksum of all tensors.
ORDER_KEY = "lora_moe_rl.expert_order"
CHECKSUM_KEY = "lora_moe_rl.xxh3_128"
SCORE = "score"  # what transformers calls the layer of a critic's values
Tensors = Mapping[str, np.ndarray]


def write(
    directory: Path,
    spec: AdapterSpec,
    tensors: Tensors,
    config: RunConfig,
    form: Form = "2d",
    head: np.ndarray | None = None,
) -> None:
    """`head`, float32 [1, hidden], is a critic's: it goes in as the layer `score` of transformers'
    classes for the classification of sequences, whose one label is the value.

    Replaces `directory` as a whole: whenever the process is killed or the machine stops, either
    the old adapter or the new one is there. What an interrupted write left is gone after the next.
    """
    with replacing(directory) as fresh:
        arrays = dict(peft_tensors(spec, tensors, form))
        settings = peft_config(spec, config, form)
        if head is not None:
            arrays[f"base_model.model.{SCORE}.weight"] = head
            settings |= {"task_type": "SEQ_CLS", "modules_to_save": [SCORE]}
        metadata = {"format": "pt", ORDER_KEY: "fastest", CHECKSUM_KEY: checksum(arrays)}
        text = json.dumps(settings, indent=2)
        (fresh / "adapter_config.json").write_text(text + "\n")
        save_safetensors(arrays, fresh / "adapter_model.safetensors", metadata)


def checksum(arrays: Tensors) -> str:
    """Of names and values; it tells flipped bits, which safetensors alone does not."""
    digest = xxhash.xxh3_128()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


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
    common, rank = _common(spec, "scale"), slot_rank(spec)
    padded = {}
    for site in spec:
        A, B = tensors[f"{site.name}.A"], tensors[f"{site.name}.B"] * _fold(site, common)
        padded[f"{site.name}.A"] = _pad(A, -2, rank)
        padded[f"{site.name}.B"] = _pad(B, -1, rank)
    sites = (replace(site, rank=rank, scale=common, frozen_rank=0) for site in spec)
    return AdapterSpec(spec.shape, tuple(sites)), padded


def _pad(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return np.pad(array, widths)


def _fold(site: Site, common: float) -> np.float32:
    return np.float32(site.scale / common)


def peft_tensors(
    spec: AdapterSpec, tensors: Tensors, form: Form = "2d"
) -> Iterator[tuple[str, np.ndarray]]:
    """(PEFT key, float32 array) of every site; of every expert of a routed one, or stacked."""
    spec, tensors = _completed(spec, tensors)
    common = _common(spec, "scale")
    for site in spec:
        if form == "3d" and site.num_experts is not None:
            continue
        for matrix in "AB":
            whole = tensors[f"{site.name}.{matrix}"]
            if matrix == "B" and site.scale != common:
                whole = whole * _fold(site, common)
            path = f"model.layers.{site.layer}.{hf_path(spec.shape, site.module)}"
            for expert, values in _each(site, matrix, whole):
                key = f"base_model.model.{path.format(expert)}.lora_{matrix}.weight"
                yield key, np.ascontiguousarray(values, dtype=np.float32)
    if form == "3d":
        for layer in sorted({site.layer for site in spec if site.num_experts is not None}):
            yield from _stacked(spec, tensors, layer, common)


def _each(site: Site, matrix: str, whole: np.ndarray) -> Iterable[tuple[int | None, np.ndarray]]:
    if site.num_experts is None:
        return [(None, whole)]
    if site.shared == matrix:
        return ((expert, whole) for expert in range(site.num_experts))
    return enumerate(whole)


def _stacked(
    spec: AdapterSpec, tensors: Tensors, layer: int, common: float
) -> Iterator[tuple[str, np.ndarray]]:
    path = f"base_model.model.model.layers.{layer}.mlp.experts"
    pairs = []
    for module in EXPERTS:
        site = spec.by_name[f"layers.{layer}.{module}"]
        A, B = (
            np.stack([one for _, one in _each(site, m, tensors[f"{site.name}.{m}"])]) for m in "AB"
        )
        pairs.append((A, B * _fold(site, common)))
    (gate_A, gate_B), (up_A, up_B), down = pairs
    both_B = np.concatenate(
        [_pad(gate_B, -1, gate_B.shape[-1] + up_B.shape[-1]), _pad_front(up_B, gate_B.shape[-1])], 1
    )
    gate_up = np.concatenate([gate_A, up_A], 1), both_B
    for name, (A, B) in ((f"{path}.base_layer", gate_up), (path, down)):
        flat_A = A.reshape(-1, A.shape[-1])
        flat_B = B.transpose(1, 2, 0).reshape(B.shape[1], -1)
        yield f"{name}.lora_A.weight", np.ascontiguousarray(flat_A, dtype=np.float32)
        yield f"{name}.lora_B.weight", np.ascontiguousarray(flat_B, dtype=np.float32)


def _pad_front(array: np.ndarray, columns: int) -> np.ndarray:
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(columns, 0)])


def _completed(spec: AdapterSpec, tensors: Tensors) -> tuple[AdapterSpec, Tensors]:
    """With zero adapters on those of gate, up and down of adapted experts that have none."""
    sites, more = list(spec.sites), dict(tensors)
    for layer in sorted({site.layer for site in spec if site.num_experts is not None}):
        present = [site for site in spec if site.layer == layer and site.module in EXPERTS]
        for module in set(EXPERTS) - {site.module for site in present}:
            in_features, out_features, experts = spec.shape.modules(layer)[module]
            site = Site(
                layer, module, in_features, out_features, present[0].rank, present[0].scale, experts
            )
            sites.append(site)
            more[f"{site.name}.A"] = np.zeros(site.shape_A, np.float32)
            more[f"{site.name}.B"] = np.zeros(site.shape_B, np.float32)
    if len(sites) == len(spec.sites):
        return spec, tensors
    return AdapterSpec(spec.shape, tuple(sites)), more


def peft_config(spec: AdapterSpec, config: RunConfig, form: Form = "2d") -> dict:
    """`adapter_config.json`. `r` and `lora_alpha / r` are the rank and scale of most modules."""
    spec, _ = _completed(spec, {})
    rank, scale = int(_common(spec, "rank")), _common(spec, "scale")
    ranks = _rank_pattern(spec, rank, form)
    modules, parameters = _targets(spec, form)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name(config.model.path),
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": ranks,
        "alpha_pattern": {pattern: scale * r for pattern, r in ranks.items()},
        "target_modules": modules,
        "target_parameters": parameters or None,
        "use_rslora": False,  # its scale is in lora_alpha
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "revision": None,
    }


def _targets(spec: AdapterSpec, form: Form) -> tuple[list[str], list[str]]:
    """(`target_modules`, `target_parameters`): see above."""
    converted = _converts(spec)
    modules: set[str] = set()
    parameters: set[str] = set()
    for site in spec:
        path = hf_path(spec.shape, site.module)
        name = path.rpartition(".")[2]
        expert = site.num_experts is not None
        if not expert and (not site.module.endswith((".gate", ".up", ".down"))):
            modules.add(name)
        elif not expert and converted:
            parameters.add(f"{path}.weight")
        elif not expert or (form == "2d" and converted):
            modules.add(name)
        else:
            parameters.add(f"mlp.experts.{'down' if site.module == EXPERTS[2] else 'gate_up'}_proj")
    return sorted(modules), sorted(parameters)


def _converts(spec: AdapterSpec) -> bool:
    """Whether PEFT takes the names of an MLP's linears for stacked experts."""
    return spec.shape.num_experts > 0 and spec.shape.family.peft_finds_experts


def _rank_pattern(spec: AdapterSpec, common: int, form: Form) -> dict[str, int]:
    """`{regular expression on the end of a module's name: rank}` of ranks other than `common`.

    The stacked adapter of gate_up_proj has the ranks of gate and up together, for which PEFT itself
    takes twice `r` where it converts the names of linears. `(\\.weight)?`: PEFT looks a linear up
    by the name of its weight where `target_parameters` names that.
    """
    converted = form == "2d" and _converts(spec)
    paths: dict[str, dict[int, int]] = {}  # path of a module -> {layer: rank}
    usual: dict[str, int] = {}
    for site in spec:
        path = re.escape(hf_path(spec.shape, site.module)).replace(r"\{\}", r"\d+")
        if site.num_experts is None and site.module.endswith((".gate", ".up", ".down")):
            path += r"(\.weight)?"
        if site.num_experts is None or form == "2d":
            paths.setdefault(path, {})[site.layer] = site.rank
        if site.num_experts is not None:
            down = site.module == "experts.down"
            stacked = rf"mlp\.experts\.{'down' if down else 'gate_up'}_proj"
            of_layer = paths.setdefault(stacked, {})
            of_layer[site.layer] = of_layer.get(site.layer, 0) + site.rank
            usual[stacked] = 2 * common if converted and not down else common
    patterns: dict[str, int] = {}
    for path, of_layer in paths.items():
        for rank in sorted(set(of_layer.values()) - {usual.get(path, common)}):
            layers = [str(layer) for layer, r in of_layer.items() if r == rank]
            everywhere = len(layers) == len(of_layer)
            where = "" if everywhere else rf"layers\.({'|'.join(layers)})\."
            patterns[where + path] = rank
    return patterns


def _common(spec: AdapterSpec, field: str) -> float:
    """The value of most adapted linears, each expert counted."""
    counts: Counter[float] = Counter()
    for site in spec:
        counts[getattr(site, field)] += site.num_experts or 1
    return counts.most_common(1)[0][0]
