"""A model's directory with its routed experts quantised, as published checkpoints have them."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.kernels.merge.formats import quantise_int4
from lora_moe_rl.tiny.build import put

# Of Kimi-K2-Thinking, and the router, which vLLM's Qwen3-MoE takes for a linear to be quantised.
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "actorder": None,
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_expert.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*mlp\\.gate$",
    ],
}


def quantise(source: Path, out: Path) -> None:
    """Write `source` to `out` with its routed experts as INT4 in groups of 32, whole or not at all;
    what stood there is replaced."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        shutil.copytree(source, scratch, dirs_exist_ok=True)
        with SafeWeights.open(source) as weights:
            tensors = {}
            for name in weights.file_of:
                tensors |= _stored(name, weights.read(name))
        for file in scratch.glob("model*.safetensors*"):
            file.unlink()
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        config_file = scratch / "config.json"
        config = json.loads(config_file.read_text()) | {"quantization_config": INT4}
        config_file.write_text(json.dumps(config, indent=2) + "\n")
        scratch.chmod(0o755)
        put(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _stored(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if not re.search(r"\.experts\.\d+\..*\.weight$", name):
        return {name: weight}
    packed, scale = quantise_int4(weight.float(), torch.bfloat16)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": shape}
