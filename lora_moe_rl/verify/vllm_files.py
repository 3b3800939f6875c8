"""The files of an adapter as vLLM's own loader wants them for an engine as the run starts it.

It reads PEFT directories; but with slots that have once what all experts of a layer share
(`enable_moe_shared_loras`) the experts of a layer are three stacked linears w1, w2, w3 (gate, down,
up; `vllm/lora/utils.py`, process_packed_modules_mapping), and a shared tensor is a stack of one.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.peft_config import completed, peft_config
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import AdapterError
from lora_moe_rl.rollout.facts import in_halves

STACKED = {"experts.gate": "w1", "experts.down": "w2", "experts.up": "w3"}


def write(
    directory: Path, spec: AdapterSpec, tensors: dict[str, np.ndarray], config: RunConfig
) -> None:
    """Replaces what is in `directory`. Raises AdapterError where slots would differ though both are
    right: of gate and up in one slot ours has each in a half, vLLM's loader one behind the other.
    """
    if any(in_halves(site, spec.shape) for site in spec):
        raise AdapterError(
            f"vLLM's own loader fills slots of experts of {spec.shape.architecture} in another "
            "order than a refit does, and they are not compared: leave experts.gate and "
            "experts.up out of adapter.targets"
        )
    if not any(site.shared for site in spec):
        form = None if spec.shape.family.experts == "interleaved" else "2d"  # as engines read it
        peft.write(directory, spec, tensors, config, form)
        return
    whole = dict(peft.peft_tensors(spec, tensors))
    directory.mkdir(parents=True, exist_ok=True)
    for site in completed(spec):
        if site.num_experts is None:
            continue
        for matrix in "AB":
            first = peft.key(spec, site, matrix, 0)
            experts, _, _ = first.rpartition(".0.")
            stacked = f"{experts}.{STACKED[site.module]}.lora_{matrix}.weight"
            each = [whole.pop(peft.key(spec, site, matrix, e)) for e in range(site.num_experts)]
            whole[stacked] = np.stack(each[:1] if site.shared == matrix else each)
    save_file(whole, directory / "adapter_model.safetensors")
    settings = peft_config(spec, config)
    (directory / "adapter_config.json").write_text(json.dumps(settings) + "\n")
