"""PEFT 0.21.2's own LoRA on the Hugging Face model, in canonical terms.

transformers stacks experts as `gate_up_proj [E, 2I, H]` and `down_proj [E, H, I]`, which PEFT
adapts through `target_parameters`: one A and one B for gate and up together. Separate gate and up
sites of rank r are such an adapter of rank 2r, A = [A_gate; A_up] and B = diag(B_gate, B_up). PEFT
stores A `[E * r, in]` with the expert slowest, and B `[out, r * E]` with the expert fastest.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch

from lora_moe_rl.adapters.families import hf_path
from lora_moe_rl.adapters.spec import AdapterSpec, Site

# So that PEFT's one rank and one alpha hold all sites: gate and up have half of each.
RANK, ALPHA = 4, 8.0
ADAPTER = {
    "rank": RANK,
    "alpha": ALPHA,
    "rank_pattern": {"experts.gate": RANK // 2, "experts.up": RANK // 2},
    "alpha_pattern": {"experts.gate": ALPHA / 2, "experts.up": ALPHA / 2},
}


def dense_name(spec: AdapterSpec, site: Site) -> str:
    return f"model.layers.{site.layer}.{hf_path(spec.shape, site.module)}"


def wrap(model, spec: AdapterSpec, **options):
    """PEFT's model, in which the sites of the spec are adapted and nothing else trains."""
    import peft  # not in trainer ranks, where a stub stands for Transformer Engine

    layers = {site.layer for site in spec if site.num_experts is not None}
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=[dense_name(spec, site) for site in spec if site.num_experts is None],
        target_parameters=[
            name
            for name, _ in model.named_parameters()
            if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            and int(name.split(".")[2]) in layers
        ],
        **options,
    )
    # PEFT takes every target named gate_proj, up_proj or down_proj for an old name of the stacked
    # experts, those of dense layers and shared experts too, and would not adapt these.
    rewrite = "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"
    with mock.patch(rewrite):
        return peft.get_peft_model(model, config)


def views(model, spec: AdapterSpec, of=lambda parameter: parameter.data) -> dict[str, torch.Tensor]:
    """`{canonical name: view}` of PEFT's parameters, or of a tensor `of` each, as its gradient."""
    base = model.base_model.model
    out = {}
    for site in spec:
        if site.num_experts is None:
            lora = base.get_submodule(dense_name(spec, site))
            A, B = of(lora.lora_A["default"].weight), of(lora.lora_B["default"].weight)
        else:
            A, B = _expert_views(base, site, of)
        out |= {f"{site.name}.A": A, f"{site.name}.B": B}
    return out


def _expert_views(base, site: Site, of) -> tuple[torch.Tensor, torch.Tensor]:
    lora = base.get_submodule(f"model.layers.{site.layer}.mlp.experts")
    wanted = "down_proj" if site.module == "experts.down" else "gate_up_proj"
    while lora.parameter_name != wanted:  # one wrapper a parameter, one in the other
        lora = lora.base_layer
    experts = site.num_experts
    A = of(lora.lora_A["default"].weight).view(experts, RANK, -1)
    B = of(lora.lora_B["default"].weight).view(-1, RANK, experts).permute(2, 0, 1)
    if site.module == "experts.down":
        return A, B
    half = 0 if site.module == "experts.gate" else 1
    return A.chunk(2, 1)[half], B.chunk(2, 1)[half].chunk(2, 2)[half]


@torch.no_grad()
def load(model, spec: AdapterSpec, tensors: dict[str, np.ndarray]) -> None:
    """Writes canonical tensors; the blocks of B that are no site's stay zero."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.zero_()
    for name, view in views(model, spec).items():
        view.copy_(torch.from_numpy(tensors[name]))
