"""What `quantization_config` of a config.json says, and which quantised bases are supported.

int4    compressed-tensors' pack-quantized, symmetric, groups of 32 (Kimi-K2-Thinking)
fp8     blocks of 128 x 128 with float32 scales (DeepSeek-V3)
mxfp4   compressed-tensors' mxfp4-pack-quantized: groups of 32 with exponents for scales
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_moe_rl.adapters.families.common.refusals import AS_NUMBERS
from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import read_json

if TYPE_CHECKING:
    from lora_moe_rl.kernels.dequant import Form

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 32}
PACKED = {"pack-quantized": INT4, "mxfp4-pack-quantized": MXFP4}  # of compressed-tensors
FP8_BLOCK = [128, 128]
# Columns of an expert that stay together when experts are cut.
WHOLE = {"int4": 32, "fp8": 128, "mxfp4": 32}
SUPPORTED = (
    "int4 (quant_method compressed-tensors, format pack-quantized, symmetric groups of 32, as "
    "Kimi-K2-Thinking), mxfp4 (compressed-tensors, format mxfp4-pack-quantized) and fp8 "
    "(quant_method fp8, blocks of 128 x 128, as DeepSeek-V3)"
)


def said_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of quantisation, {} where it says nothing. Raises ModelError for what
    nobody has written so."""
    said = config.get("quantization_config") or {}
    groups = (said.get("config_groups") or {}) if isinstance(said, dict) else None
    if not isinstance(groups, dict) or not all(
        isinstance(group or {}, dict) and isinstance((group or {}).get("weights") or {}, dict)
        for group in groups.values()
    ):
        raise ModelError(
            f"config.json has quantization_config={said!r:.80}, and it is a map with maps of "
            "config_groups in all that is supported; fetch or write the model again"
        )
    return said


def form(config: Mapping[str, Any]) -> Form | None:
    """None for a base that is not quantised. Of a config that `refused` lets pass."""
    said = said_of(config)
    method = said.get("quant_method")
    if method in (None, "fp8"):
        return method
    return "mxfp4" if said.get("format") == "mxfp4-pack-quantized" else "int4"


def form_in(model_dir: Path) -> Form | None:
    """`form` of a Hugging Face directory."""
    return form(read_json(model_dir / "config.json"))


def refused(config: Mapping[str, Any]) -> Iterator[str]:
    """Why a quantised base cannot be trained and served, if it cannot."""
    if not (said := said_of(config)):
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
        kind = said.get("format")
        wanted = PACKED.get(str(kind))
        wrong = [w for w in weights if wanted and any(w.get(k) != v for k, v in wanted.items())]
        if wanted is None or not weights or wrong:
            yield _refused(f"format={kind!r} with weights {wrong or weights}")
        if any((group or {}).get("input_activations") for group in groups.values()):
            yield _refused(f"{kind} with quantised activations")
        if any(w.get("actorder") for w in weights):
            yield _refused(f"{kind} with actorder")
    elif method == "mxfp4":  # gpt-oss's
        yield _refused("quant_method='mxfp4'", AS_NUMBERS)
    else:
        yield _refused(f"quant_method={method!r}")


def _refused(what: str, way_out: str = "take such a checkpoint, or one without") -> str:
    return (
        f"quantization_config has {what}, which is not supported; supported are {SUPPORTED}; "
        f"{way_out}"
    )
