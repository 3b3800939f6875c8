"""What Hugging Face says: forward passes with router choices given, and hand-merged adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from lora_moe_rl.adapters.peft import HF_PATHS
from lora_moe_rl.adapters.spec import AdapterSpec


def load(model_dir: Path):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@torch.no_grad()
def merge(model, spec: AdapterSpec, tensors: dict[str, np.ndarray]) -> None:
    """W += scale * B A, in place. transformers stacks experts: gate_up `[E, 2I, H]`, down
    `[E, H, I]`."""
    state = model.state_dict()
    for site in spec:
        A, B = (torch.from_numpy(tensors[f"{site.name}.{m}"]) for m in "AB")
        delta = site.scale * (B @ A)
        layer = f"model.layers.{site.layer}"
        if site.num_experts is None:
            state[f"{layer}.{HF_PATHS[site.module]}.weight"] += delta
        elif site.module == "experts.down":
            state[f"{layer}.mlp.experts.down_proj"] += delta
        else:
            weight = state[f"{layer}.mlp.experts.gate_up_proj"]
            width = weight.shape[1] // 2
            first = 0 if site.module == "experts.gate" else width
            weight[:, first : first + width] += delta


@torch.no_grad()
def logprobs(model, sequence) -> np.ndarray:
    """Log-probability of each token after the first, float32 `[L - 1]`."""
    ids = torch.as_tensor(np.asarray(sequence), dtype=torch.long)[None]
    scores = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0].numpy()
