"""What `quantization_config` of a config.json says, and which quantised bases are supported.

int4    compressed-tensors' pack-quantized, symmetric, groups of 32 (Kimi-K2-Thinking)
fp8     blocks of 128 x 128 with float32 scales (DeepSeek-V3)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from lora_moe_rl.files.untrusted import read_json

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
FP8_BLOCK = [128, 128]
# Columns of an expert that stay together when experts are cut.
WHOLE = {"int4": 32, "fp8": 128}
SUPPORTED = (
    "int4 (quant_method compressed-tensors, format pack-quantized, symmetric groups of 32, as "
    "Kimi-K2-Thinking) and fp8 (quant_method fp8, blocks of 128 x 128, as DeepSeek-V3)"
)


def form(config: Mapping[str, Any]) -> Literal["int4", "fp8"] | None:
    """int4, fp8, or None for a base that is not quantised. Of a config that `refused` lets pass."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    return None if method is None else "fp8" if method == "fp8" else "int4"


def form_in(model_dir: Path) -> Literal["int4", "fp8"] | None:
    """`form` of a Hugging Face directory."""
    return form(read_json(model_dir / "config.json"))


def refused(config: Mapping[str, Any]) -> Iterator[str]:
    """Why a quantised base cannot be trained and served, if it cannot."""
    said = config.get("quantization_config")
    if not said:
        return
    method = said.get("quant_method")
    if method == "fp8":
        if said.get("weight_block_size") != FP8_BLOCK:
            yield _refused(f"fp8 with weight_block_size={said.get('weight_block_size')}")
        if said.get("activation_scheme", "dynamic") != "dynamic":
            yield _refused(f"fp8 with activation_scheme={said['activation_scheme']!r}")
    elif method == "compressed-tensors":
        groups = said.get("config_groups") or {}
        weights = [(group or {}).get("weights") or {} for group in groups.values()]
        wrong = [w for w in weights if any(w.get(k) != v for k, v in INT4.items())]
        if said.get("format") != "pack-quantized" or not weights or wrong:
            yield _refused(f"format={said.get('format')!r} with weights {wrong or weights}")
        if any((group or {}).get("input_activations") for group in groups.values()):
            yield _refused("pack-quantized with quantised activations")
        if any(w.get("actorder") for w in weights):
            yield _refused("pack-quantized with actorder")
    else:
        yield _refused(f"quant_method={method!r}")


def _refused(what: str) -> str:
    return (
        f"quantization_config has {what}, which is not supported; supported are {SUPPORTED}. Use "
        "such a checkpoint, or one that is not quantised"
    )
