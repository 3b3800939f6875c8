"""What the keys and the config of a foreign PEFT file say. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from lora_moe_rl.adapters.families import ModelShape, hf_path, transformers_path
from lora_moe_rl.errors import AdapterError

LARGEST = 1e30  # rank or alpha; an honest one is far below
MATCH_S = 1.0  # longest match of a pattern from a file; an honest one takes microseconds

# With or without PEFT's prefix (verl, ms-swift), that of a language model in a larger one, and the
# name of the adapter, which raw state dicts have.
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?"
    r"layers\.(?P<layer>\d+)\.(?P<path>.+?)\.lora_(?P<matrix>[AB])(?:\.(?!weight$)[\w-]+)?(?:\.weight)?"
)
# Where stacked experts stand, below their layer: PEFT's wrappers, and plain names of parameters.
_STACKED = {
    "mlp.experts": None,  # down_proj, or the only one
    "mlp.experts.base_layer": "gate_up",
    "mlp.experts.gate_up_proj": "gate_up",
    "mlp.experts.down_proj": "down",
}
_OTHER = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "adapters on embeddings",
    "modules_to_save": "whole trained modules",
    "linear_fc": "Megatron's own names, which are cut as one layout had them",
    "linear_qkv": "Megatron's own names, which are cut as one layout had them",
}


@dataclass(frozen=True)
class Key:
    """One tensor: `expert` of a module stored one by one; `stacked` names a stack of all experts:
    "gate_up", "down", or "" where it does not say which of both."""

    layer: int
    module: str
    matrix: str
    expert: int | None = None
    stacked: str | None = None


def parse_keys(names: list[str], shape: ModelShape) -> dict[str, Key]:
    """Raises AdapterError that lists the keys that match no site of the model."""
    by_path = [_paths(shape, layer) for layer in range(shape.num_layers)]
    found: dict[str, Key] = {}
    unknown = []
    for name in names:
        key = _parse(name, by_path)
        if key is None:
            unknown.append(name)
        else:
            found[name] = key
    if unknown:
        why = sorted(
            {f"{part}: {why}" for n in unknown for part, why in _OTHER.items() if part in n}
        )
        raise AdapterError(
            f"{len(unknown)} of {len(names)} tensors match no site of {shape.architecture} with "
            f"{shape.num_layers} layers and would be lost: {', '.join(unknown[:8])}"
            f"{', ...' if len(unknown) > 8 else ''}{'. Among them ' if why else ''}"
            f"{'; '.join(why)}"
        )
    if len(set(found.values())) < len(found):
        seen: dict[Key, str] = {}
        for name, key in found.items():
            if key in seen:
                raise AdapterError(f"{seen[key]} and {name} are both {key.module} of one layer")
            seen[key] = name
    return found


def _paths(shape: ModelShape, layer: int) -> dict[str, str]:
    """`{path below the layer: module}`; what transformers 5 has other names for (Mixtral's experts,
    Hunyuan's shared ones) under those too."""
    modules = shape.modules(layer)
    paths = {
        path(shape, module): module for path in (transformers_path, hf_path) for module in modules
    }
    for part in ("gate", "up", "down"):
        if f"experts.{part}" in modules:
            paths[f"mlp.experts.{{}}.{part}_proj"] = f"experts.{part}"
    return paths


def _parse(name: str, by_path: list[dict[str, str]]) -> Key | None:
    match = _KEY.fullmatch(name)
    if match is None or int(match["layer"]) >= len(by_path):
        return None
    layer, path, matrix = int(match["layer"]), match["path"], match["matrix"]
    paths = by_path[layer]
    if path in _STACKED:
        if "experts.gate" not in paths.values():
            return None
        return Key(layer, "experts", matrix, stacked=_STACKED[path] or "")
    one = re.fullmatch(r"(.*\.experts\.)(\d{1,6})(\..*)", path)
    if one:
        module = paths.get(f"{one[1]}{{}}{one[3]}")
        return None if module is None else Key(layer, module, matrix, expert=int(one[2]))
    module = paths.get(path)
    return None if module is None else Key(layer, module, matrix)


@dataclass(frozen=True)
class PeftSettings:
    """What of `adapter_config.json` the function depends on."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> PeftSettings:
        """Raises AdapterError for what is not plain LoRA, and for values that cannot be."""
        for key, plain in _PLAIN.items():
            if config.get(key) not in plain:
                raise AdapterError(
                    f"adapter_config.json has {key}={config.get(key)!r:.60}: only plain LoRA is "
                    "read"
                )
        _check_start(config.get("init_lora_weights"))
        patterns = [config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
        numbers = [config.get("r"), config.get("lora_alpha")]
        for pattern in patterns:
            if not isinstance(pattern, dict):
                raise AdapterError(
                    f"adapter_config.json has the pattern {pattern!r}, which is no map"
                )
            numbers += pattern.values()
            for key in pattern:
                _check_pattern(key)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise AdapterError(
                    f"adapter_config.json has {number!r:.80} where a number is expected"
                )
            if not (0 < number < LARGEST):
                raise AdapterError(f"adapter_config.json has the rank or alpha {number!r:.40}")
        return cls(
            int(config["r"]), float(config["lora_alpha"]), bool(config.get("use_rslora")), *patterns
        )

    def scale(self, name: str, rank: int) -> float:
        """The scale of the module `name` (`model.layers.0.self_attn.q_proj`), as PEFT finds it.

        `rank`: that of its tensors. Raises AdapterError when the config says another.
        """
        expected = _by_pattern(self.rank_pattern, name, self.rank)
        if expected != rank:
            raise AdapterError(
                f"{name} has rank {rank} in its tensors and {expected} in adapter_config.json, so "
                f"that its scale cannot be known; mend r or rank_pattern"
            )
        alpha = _by_pattern(self.alpha_pattern, name, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    **dict.fromkeys(("use_qalora", "use_bdlora", "arrow_config", "kasa_config"), (None, False)),
    "monteclora_config": (None,),
}
# Starts that leave the base as it is. Others (PiSSA, OLoRA, LoftQ, CorDA, LoRA-GA) are taken off
# the base's weights whenever PEFT loads the file: its matrices are over what is left of them.
_STARTS = ("gaussian", "eva", "orthogonal", "mica")


def _check_start(start: Any) -> None:
    if start in (None, True, False) or (isinstance(start, str) and start.lower() in _STARTS):
        return
    raise AdapterError(
        f"adapter_config.json has init_lora_weights={start!r:.60}: PEFT takes such a start off the "
        "base's weights, and the tensors alone are no adapter of the base; write it anew with "
        "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
    )


def _check_pattern(key: str) -> None:
    """Patterns are regular expressions from a file: none that could take for ever to match."""
    if len(key) > 400 or re.search(r"[+*}]\??\)\??[+*{]", key):
        raise AdapterError(
            f"adapter_config.json has the pattern {key[:80]!r}, which is not matched"
        )
    try:
        re.compile(key)
        regex.compile(_at_the_end(key))
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise AdapterError(f"adapter_config.json has the pattern {key!r}: {error}") from error


def _at_the_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _by_pattern[T](patterns: Mapping[str, T], name: str, default: T) -> T:
    """PEFT's rule (`get_pattern_key`): the first pattern that matches the end of the name. PEFT
    looks up a linear that `target_parameters` names by the name of its weight."""
    for pattern, value in patterns.items():
        for candidate in (name, f"{name}.weight"):
            try:
                if regex.match(_at_the_end(pattern), candidate, timeout=MATCH_S):
                    return value
            except TimeoutError:
                raise AdapterError(
                    f"adapter_config.json has the pattern {pattern!r}, which takes for ever to "
                    f"match {candidate}"
                ) from None
    return default
