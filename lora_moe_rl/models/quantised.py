"""What `quantization_config` of a config.json says, and which quantised bases are supported.

int4    compressed-tensors' pack-quantized, symmetric, groups of 32 (Kimi-K2-Thinking)
fp8     blocks of 128 x 128 with float32 scales (DeepSeek-V3)
mxfp4   compressed-tensors' mxfp4-pack-quantized: groups of 32 with exponents for scales
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_moe_rl.adapters.families.common.refusals import AS_NUMBERS
from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import read_json
from lora_moe_rl.models.quantised_names import TENSORS

if TYPE_CHECKING:
    from lora_moe_rl.kernels.dequant import Form

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 32}
PACKED = {"pack-quantized": INT4, "mxfp4-pack-quantized": MXFP4}  # of compressed-tensors
PACKED_AS: dict[Form, str] = {"int4": "pack-quantized", "mxfp4": "mxfp4-pack-quantized"}
# `actorder` of compressed-tensors 0.17.0 (quantization/quant_args.py) that leaves a group's columns
# side by side: with these it is a matter of calibration alone.
IN_ORDER = (None, False, "weight", "static")
_READ = {name for form in PACKED_AS for name in TENSORS[form] if name}
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
        kind = said.get("format")
        yield from packing_refused(said, kind)
        activations = ("input_activations", "output_activations")
        if any(group.get(one) for group in _groups(said) for one in activations):
            yield _refused(f"{kind} with quantised activations")
        if cache := said.get("kv_cache_scheme"):
            how = "remove that key from a copy of its config.json, and its k_scale and v_scale"
            yield _refused(f"kv_cache_scheme={cache!s:.80} (vLLM alone would round the cache)", how)
    elif method == "mxfp4":  # gpt-oss's
        yield _refused("quant_method='mxfp4'", AS_NUMBERS)
    else:
        yield _refused(f"quant_method={method!r}")
    yield from rotations_refused(said)


def packing_refused(said: Mapping[str, Any], kind: Any) -> Iterator[str]:
    """Why weights that are packed as `kind` are not what this code computes with, by what `said`,
    a quantization_config of compressed-tensors, has of them: for training, a merge and
    `dequantise` alike."""
    if said.get("format") != kind:
        yield _refused(f"format={said.get('format')!r} of weights that are packed as {kind!r}")
    weights = [group.get("weights") or {} for group in _groups(said)]
    wanted = PACKED.get(str(kind))
    wrong = [w for w in weights if wanted and any(w.get(k) != v for k, v in wanted.items())]
    if wanted is None or not weights or wrong:
        yield _refused(f"format={kind!r} with weights {wrong or weights}")
    for one in weights:
        order = one.get("actorder")
        if (order.lower() if isinstance(order, str) else order) not in IN_ORDER:
            yield _refused(f"{kind} with actorder={order!r} (columns in groups of another order)")


def rotations_refused(said: Mapping[str, Any]) -> Iterator[str]:
    """Why a model whose linears stand between Hadamard or other rotations is not computed with:
    its stored weights are rotated ones, those that are not quantised too."""
    for one in (said, *_groups(said)):
        found = one.get("transform_config")
        if found and found != {"config_groups": {}}:
            yield _refused(f"transform_config={found!s:.80} (rotations around its linears)")


def tensors_refused(names: Collection[str]) -> Iterator[str]:
    """The tensors beside a packed weight of a checkpoint that change what it is and that nobody
    here computes with: zero points, each column's group (`weight_g_idx`), a scale of all."""
    for name in names:
        path, _, last = name.rpartition(".")
        if last.startswith("weight_") and last not in _READ and f"{path}.weight_packed" in names:
            yield (
                f"{name} stands beside a packed weight, which is computed from "
                f"{', '.join(sorted(_READ))} alone; supported are {SUPPORTED}; take such a "
                "checkpoint, or one without"
            )


def _groups(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [group or {} for group in (said.get("config_groups") or {}).values()]


def _refused(what: str, way_out: str = "take such a checkpoint, or one without") -> str:
    return (
        f"quantization_config has {what}, which is not supported; supported are {SUPPORTED}; "
        f"{way_out}"
    )
