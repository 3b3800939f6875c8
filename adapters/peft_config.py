"""`adapter_config.json` of a PEFT directory, whose tensors `peft.py` writes.

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

import re
from collections import Counter
from typing import Literal

from lora_moe_rl.adapters.families import hf_path, transformers_path
from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.config import RunConfig
from lora_moe_rl.models.directory import base_name

Form = Literal["2d", "3d"]
EXPERTS = ("experts.gate", "experts.up", "experts.down")


def peft_config(spec: AdapterSpec, config: RunConfig, form: Form = "2d") -> dict:
    """`adapter_config.json`. `r` and `lora_alpha / r` are the rank and scale of most modules."""
    spec = completed(spec)
    rank, scale = int(common(spec, "rank")), common(spec, "scale")
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
        "revision": config.model.revision,
    }


def _targets(spec: AdapterSpec, form: Form) -> tuple[list[str], list[str]]:
    """(`target_modules`, `target_parameters`): see above."""
    converted = _converts(spec)
    named = converted or spec.shape.family.experts == "modules"
    modules: set[str] = set()
    parameters: set[str] = set()
    for site in spec:
        path = hf_path(spec.shape, site.module)
        name = path.rpartition(".")[2]
        expert = site.num_experts is not None
        if not expert and (not site.module.endswith((".gate", ".up", ".down"))):
            modules.add(name)
        elif not expert and converted:
            parameters.add(f"{transformers_path(spec.shape, site.module)}.weight")
        elif not expert or (form == "2d" and named):
            modules.add(name)
        else:
            parameters.add(f"mlp.experts.{'down' if site.module == EXPERTS[2] else 'gate_up'}_proj")
    return sorted(modules), sorted(parameters)


def _converts(spec: AdapterSpec) -> bool:
    """Whether PEFT takes the names of an MLP's linears for stacked experts."""
    return spec.shape.num_experts > 0 and spec.shape.family.experts == "converted"


def _rank_pattern(spec: AdapterSpec, most: int, form: Form) -> dict[str, int]:
    """`{regular expression on the end of a module's name: rank}` of ranks other than `most`.

    The stacked adapter of gate_up_proj has the ranks of gate and up together, for which PEFT itself
    takes twice `r` where it converts the names of linears. `(\\.weight)?`: PEFT looks a linear up
    by the name of its weight where `target_parameters` names that.
    """
    converted = form == "2d" and _converts(spec)
    paths: dict[str, dict[int, int]] = {}  # path of a module -> {layer: rank}
    usual: dict[str, int] = {}
    for site in spec:
        named = hf_path if site.num_experts is not None else transformers_path
        path = re.escape(named(spec.shape, site.module)).replace(r"\{\}", r"\d+")
        if site.num_experts is None and site.module.endswith((".gate", ".up", ".down")):
            path += r"(\.weight)?"
        if site.num_experts is None or form == "2d":
            paths.setdefault(path, {})[site.layer] = site.rank
        if site.num_experts is not None and spec.shape.family.experts != "modules":
            down = site.module == "experts.down"
            stacked = rf"mlp\.experts\.{'down' if down else 'gate_up'}_proj"
            of_layer = paths.setdefault(stacked, {})
            of_layer[site.layer] = of_layer.get(site.layer, 0) + site.rank
            usual[stacked] = 2 * most if converted and not down else most
    patterns: dict[str, int] = {}
    for path, of_layer in paths.items():
        for rank in sorted(set(of_layer.values()) - {usual.get(path, most)}):
            layers = [str(layer) for layer, r in of_layer.items() if r == rank]
            everywhere = len(layers) == len(of_layer)
            where = "" if everywhere else rf"layers\.({'|'.join(layers)})\."
            patterns[where + path] = rank
    return patterns


def common(spec: AdapterSpec, field: str) -> float:
    """The value of most adapted linears, each expert counted."""
    counts: Counter[float] = Counter()
    for site in spec:
        counts[getattr(site, field)] += site.num_experts or 1
    return counts.most_common(1)[0][0]


def completed(spec: AdapterSpec) -> AdapterSpec:
    """The spec with adapters added to those of gate, up and down of adapted experts that have
    none."""
    sites = list(spec.sites)
    for layer in sorted({site.layer for site in spec if site.num_experts is not None}):
        present = [site for site in spec if site.layer == layer and site.module in EXPERTS]
        for module in sorted(set(EXPERTS) - {site.module for site in present}):
            in_features, out_features, experts = spec.shape.modules(layer)[module]
            like = (present[0].rank, present[0].scale)
            sites.append(Site(layer, module, in_features, out_features, *like, experts))
    return AdapterSpec(spec.shape, tuple(sites))
