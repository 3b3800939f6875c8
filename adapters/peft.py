"""Writes an adapter as a PEFT directory: `adapter_model.safetensors` and `adapter_config.json`.

Routed experts are written one by one (`mlp.experts.7.gate_proj.lora_A.weight`), the form that vLLM
and Megatron-Bridge read; a tensor that all experts share is written for each of them, since PEFT
has no shared form. Ranks that differ between modules go into `rank_pattern`. vLLM ignores
`rank_pattern` and `alpha_pattern` and scales every module by the one `lora_alpha / r`, so that the
patterns are written to give each module that same scale, and what a module's own scale differs from
it by is folded into its B: PEFT and vLLM then compute the same function.

What PEFT 0.21.2 on transformers 5 leaves out, without a word, when it loads such a directory: the
routed experts of Qwen2-MoE, and dense and shared-expert linears of the other families. vLLM serves
them all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lora_moe_rl.adapters.families import hf_path
from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.config import RunConfig


def write(
    directory: Path, spec: AdapterSpec, tensors: Mapping[str, np.ndarray], config: RunConfig
) -> None:
    """Replaces `directory` as a whole; an interrupted write leaves the old one."""
    fresh = directory.with_name(f"{directory.name}.tmp-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(dict(peft_tensors(spec, tensors)), fresh / "adapter_model.safetensors")
    text = json.dumps(peft_config(spec, config), indent=2)
    (fresh / "adapter_config.json").write_text(text + "\n")
    old = directory.with_name(f"{directory.name}.old-{os.getpid()}")
    if directory.exists():
        os.replace(directory, old)
    os.replace(fresh, directory)
    shutil.rmtree(old, ignore_errors=True)


def peft_tensors(
    spec: AdapterSpec, tensors: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """(PEFT key, float32 array) of every site, and of every expert of a routed site."""
    common = _common(spec, "scale")
    for site in spec:
        for matrix in ("A", "B"):
            whole = tensors[f"{site.name}.{matrix}"]
            if matrix == "B" and site.scale != common:
                whole = whole * np.float32(site.scale / common)
            path = f"model.layers.{site.layer}.{hf_path(spec.shape, site.module)}"
            for expert, values in _each(site, matrix, whole):
                key = f"base_model.model.{path.format(expert)}.lora_{matrix}.weight"
                yield key, np.ascontiguousarray(values, dtype=np.float32)


def _each(site: Site, matrix: str, whole: np.ndarray) -> Iterable[tuple[int | None, np.ndarray]]:
    if site.num_experts is None:
        return [(None, whole)]
    if site.shared == matrix:
        return ((expert, whole) for expert in range(site.num_experts))
    return enumerate(whole)


def peft_config(spec: AdapterSpec, config: RunConfig) -> dict:
    """`adapter_config.json`. `r` and `lora_alpha / r` are the rank and scale of most modules."""
    rank, scale = int(_common(spec, "rank")), _common(spec, "scale")
    ranks = _rank_pattern(spec, rank)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.path,
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": ranks,
        "alpha_pattern": {pattern: scale * r for pattern, r in ranks.items()},
        "target_modules": sorted(
            {hf_path(spec.shape, site.module).rpartition(".")[2] for site in spec}
        ),
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


def _rank_pattern(spec: AdapterSpec, common: int) -> dict[str, int]:
    """`{regular expression on the end of a module's name: rank}` of ranks other than `common`.

    transformers 5 keeps the experts of a layer as two parameters, and PEFT then stacks their
    adapters: that of `gate_up_proj` has the ranks of gate and up together, for which PEFT itself
    takes twice `r`. Where that is not so it needs a pattern too, as `down_proj` does.
    """
    paths: dict[str, dict[int, int]] = {}  # path of a module -> {layer: rank}
    usual: dict[str, int] = {}
    for site in spec:
        path = re.escape(hf_path(spec.shape, site.module)).replace(r"\{\}", r"\d+")
        paths.setdefault(path, {})[site.layer] = site.rank
        if site.num_experts is not None:
            down = site.module == "experts.down"
            stacked = rf"mlp\.experts\.{'down' if down else 'gate_up'}_proj"
            of_layer = paths.setdefault(stacked, {})
            of_layer[site.layer] = of_layer.get(site.layer, 0) + site.rank
            usual[stacked] = common if down else 2 * common
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
