"""A model's directory quantised as published checkpoints are."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.kernels.dequant import Form
from lora_moe_rl.kernels.merge.formats import quantise_fp8, quantise_int4, quantise_mxfp4
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

_WEIGHTS = INT4["config_groups"]["group_0"]["weights"]
_GROUP = INT4["config_groups"]["group_0"] | {"weights": _WEIGHTS | {"type": "float"}}
MXFP4 = INT4 | {"format": "mxfp4-pack-quantized", "config_groups": {"group_0": _GROUP}}
# Of DeepSeek-V3.
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_LINEARS = {
    "int4": r"\.experts\.\d+\..*\.weight$",  # routed experts alone
    "mxfp4": r"\.experts\.\d+\..*\.weight$",
    "fp8": r"\.layers\..*_proj(_with_mqa)?\.weight$",  # every linear of a layer but the router
}


def quantise(source: Path, out: Path, form: Form = "int4") -> None:
    """Write `source` to `out` as `form`, whole or not at all; what stood there is replaced. Of INT4
    and MXFP4 are the routed experts, as Kimi-K2-Thinking has it; of FP8 all linears of a layer, as
    DeepSeek-V3."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        shutil.copytree(source, scratch, dirs_exist_ok=True)
        with SafeWeights.open(source) as weights:
            tensors = {}
            for name in weights.file_of:
                tensors |= _stored(name, weights.read(name), form)
        for file in scratch.glob("model*.safetensors*"):
            file.unlink()
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        config_file = scratch / "config.json"
        config = json.loads(config_file.read_text())
        said = {"int4": INT4, "mxfp4": MXFP4, "fp8": FP8 | _kept(tensors)}
        config["quantization_config"] = said[form]
        config_file.write_text(json.dumps(config, indent=2) + "\n")
        scratch.chmod(0o755)
        put(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _stored(name: str, weight: torch.Tensor, form: Form) -> dict[str, torch.Tensor]:
    if not re.search(_LINEARS[form], name):
        return {name: weight}
    if form == "fp8":
        value, scale_inv = quantise_fp8(weight.float())
        return {name: value, f"{name}_scale_inv": scale_inv}
    if form == "mxfp4":
        packed, scale = quantise_mxfp4(weight.float())
        return {f"{name}_packed": packed, f"{name}_scale": scale}
    packed, scale = quantise_int4(weight.float(), torch.bfloat16)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": shape}


def _kept(tensors: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """vLLM's Qwen3-MoE takes the router for a linear to be quantised."""
    routers = sorted(name for name in tensors if name.endswith(".mlp.gate.weight"))
    return {"modules_to_not_convert": ["lm_head", *(n.removesuffix(".weight") for n in routers)]}
