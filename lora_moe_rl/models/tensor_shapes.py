"""Whether a checkpoint has the layers and experts that its config.json promises, and its tensors
the shapes.

Only headers are looked at, of which those of a trillion weights take seconds. Megatron-Bridge and
vLLM say it too, once the model is built: with a shape cut for one rank, and no file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from lora_moe_rl.adapters.families import ModelShape, hf_embedding, hf_name, hf_path, hf_prefix
from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import Entry, SafeFile

Shape = tuple[int, ...]
PACKED = {"I32": 8, "U8": 2}  # numbers in an element of `weight_packed`, by its dtype
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_SHOWN = 3
_TWO_MODELS = (
    "weights and config.json are of two models; fetch the model again, or put the config.json "
    "beside the weights that was saved with them"
)


def check_complete(path: Path, names: Iterable[str], shape: ModelShape, predicting: int) -> None:
    """Raises ModelError for a layer without tensors, for more layers than there are, and for a
    tensor that some routed experts of a layer have and others lack. `predicting`: layers after the
    last that may be there, which predict further tokens."""
    prefix = hf_prefix(shape)
    layers: set[int] = set()
    experts: Counter[tuple[int, str]] = Counter()
    for name in names:
        match = _LAYER.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is None:
            continue
        layers.add(layer := int(match[1]))
        if layer < shape.num_layers and _EXPERT.search(name):
            kind = _EXPERT.sub(".experts.N.", match[2])
            if kind.endswith((".weight", ".weight_packed")):
                experts[layer, kind.removesuffix("_packed")] += 1
    wrong = [f"layer {i} has no tensors" for i in range(shape.num_layers) if i not in layers]
    most = shape.num_layers + predicting
    wrong += [f"there is a layer {i}" for i in sorted(layers) if i >= most]
    wrong += [
        f"layers.{layer}.{kind} is there for {count} of {shape.num_experts} experts"
        for (layer, kind), count in sorted(experts.items())
        if count != shape.num_experts
    ]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
        raise ModelError(
            f"{path}: config.json has {shape.num_layers} layers, and of the weights "
            f"{'; '.join(wrong[:_SHOWN])}{more}: {_TWO_MODELS}"
        )


def check_shapes(files: Iterable[SafeFile], shape: ModelShape) -> None:
    """Raises ModelError for the tensors that have another shape. What config.json gives no shape,
    as scales of a quantised model, is passed over."""
    prefix = hf_prefix(shape)
    outside = _outside(shape, prefix)
    by_layer = [_of_layer(shape, i) for i in range(shape.num_layers)]
    wrong = []
    for file in files:
        for entry in file.entries.values():
            wanted = _wanted(entry, prefix, outside, by_layer)
            if wanted is not None and entry.shape != wanted:
                wrong.append(
                    f"{file.path}: {entry.name} is {list(entry.shape)}, and config.json makes it "
                    f"{list(wanted)}"
                )
    if wrong:
        more = f"; and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
        raise ModelError(f"{'; '.join(wrong[:_SHOWN])}{more}: {_TWO_MODELS}")


def _wanted(
    entry: Entry, prefix: str, outside: dict[str, Shape], by_layer: list[dict[str, Shape]]
) -> Shape | None:
    match = _LAYER.fullmatch(entry.name.removeprefix(prefix))
    if match is None or not entry.name.startswith(prefix):
        return outside.get(entry.name)
    if (layer := int(match[1])) >= len(by_layer):  # that of DeepSeek's prediction
        return None
    name = _EXPERT.sub(".experts.{}.", match[2])
    if not name.endswith(".weight_packed"):
        return by_layer[layer].get(name)
    whole = by_layer[layer].get(name.removesuffix("_packed"))
    if whole is None or entry.dtype not in PACKED:
        return None
    return *whole[:-1], whole[-1] // PACKED[entry.dtype]


def _outside(shape: ModelShape, prefix: str) -> dict[str, Shape]:
    """The shapes of the tensors that are of no layer."""
    table = shape.vocab_size, shape.hidden_size
    return {
        hf_embedding(shape): table,
        "lm_head.weight": table,
        f"{prefix}norm.weight": (shape.hidden_size,),
    }


def _of_layer(shape: ModelShape, layer: int) -> dict[str, Shape]:
    """The shapes of a layer's tensors, by the names behind `layers.N.`; `{}` stands for an
    expert."""
    hidden, experts = shape.hidden_size, shape.num_experts
    found: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    modules = shape.modules(layer)
    for module, (inputs, outputs, _) in modules.items():
        path = hf_path(shape, module)
        found[f"{path}.weight"], found[f"{path}.bias"] = (outputs, inputs), (outputs,)
    for norm, linear in (("q_a_layernorm", "q_b_proj"), ("kv_a_layernorm", "kv_b_proj")):
        if linear in modules:
            found[f"self_attn.{norm}.weight"] = (modules[linear][0],)
    if "head_dim" in shape.dims:
        for norm, heads in (("q_norm", "heads"), ("k_norm", "kv_heads")):
            together = shape.dims[heads] if shape.family.norm_over_heads else 1
            path = f"{hf_name(shape, 'self_attn')}.{hf_name(shape, norm)}"
            found[f"{path}.weight"] = (together * shape.dims["head_dim"],)
    if layer in shape.linear_layers:
        found |= _of_linear_attention(shape.dims)
    if layer in shape.moe_layers:
        block, width = shape.family.moe_block, shape.dims["moe_intermediate"]
        found[f"{block}.gate.weight"] = (experts, hidden)
        for router in (f"{block}.gate", block):
            for correction in ("e_score_correction_bias", "expert_bias"):
                found[f"{router}.{correction}"] = (experts,)
        found[f"{block}.router.gate.weight"] = (experts, hidden)
        found[f"{block}.moe_statics.e_score_correction_bias"] = (1, experts)
        # All experts of a layer in one, as transformers 5 keeps them.
        found[f"{block}.experts.gate_up_proj"] = (experts, 2 * width, hidden)
        found[f"{block}.experts.down_proj"] = (experts, hidden, width)
    if shape.family.experts == "interleaved":
        found |= _interleaved(shape, hidden, experts, shape.dims["moe_intermediate"])
    return found


def _of_linear_attention(d: Mapping[str, int]) -> dict[str, Shape]:
    """Beside the linears."""
    heads = d["linear_value_heads"]
    values = heads * d["linear_value_dim"]
    channels = 2 * d["linear_key_heads"] * d["linear_key_dim"] + values
    return {
        "linear_attn.conv1d.weight": (channels, 1, d["linear_kernel"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (d["linear_value_dim"],),
    }


def _interleaved(shape: ModelShape, hidden: int, experts: int, width: int) -> dict[str, Shape]:
    """What such a family has otherwise than the others, or alone."""
    stack = f"{shape.family.moe_block}.experts"
    return {
        f"{stack}.gate_up_proj": (experts, hidden, 2 * width),
        f"{stack}.gate_up_proj_bias": (experts, 2 * width),
        f"{stack}.down_proj": (experts, width, hidden),
        f"{stack}.down_proj_bias": (experts, hidden),
        f"{shape.family.moe_block}.router.weight": (experts, hidden),
        f"{shape.family.moe_block}.router.bias": (experts,),
        "self_attn.sinks": (shape.dims["heads"],),
    }
