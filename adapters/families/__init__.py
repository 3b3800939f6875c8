"""Model families, and what the rest of the system needs to know of a model's `config.json`.

A family is one file of this folder: all that is particular to it stands there, and being there is
all that it takes to be found. What families share is in `common/`. Torch-free: a family's
Megatron-Bridge class is imported when `trainer/bridge.py` asks for it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from lora_moe_rl.adapters.families.common import linears
from lora_moe_rl.adapters.families.common.family import Around, Config, Dims, Family
from lora_moe_rl.errors import ModelError

__all__ = [
    "FAMILIES",
    "Config",
    "Dims",
    "Family",
    "ModelShape",
    "around",
    "check_around",
    "check_variant",
    "hf_embedding",
    "hf_layer",
    "hf_name",
    "hf_path",
    "hf_prefix",
    "language_config",
    "transformers_path",
]


# What no model comes near: of each key of a config.json that says a size, the largest.
_LARGEST = {"num_hidden_layers": 1 << 12} | dict.fromkeys(
    (
        "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
        "n_shared_experts", "num_attention_heads", "num_key_value_heads",
        "moe_num_experts", "moe_k", "moe_num_shared_experts", "num_shared_experts",
        "linear_num_key_heads", "linear_num_value_heads",
    ),
    1 << 15,
) | dict.fromkeys(
    (
        "hidden_size", "vocab_size", "max_position_embeddings", "intermediate_size",
        "moe_intermediate_size", "shared_expert_intermediate_size", "head_dim", "q_lora_rank",
        "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "kv_lora_rank",
        "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
    ),
    1 << 28,
)  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes. `dims` depends on the attention: see `common/linears.py`.

    A dense model has no `moe_layers`, and `num_experts` and `top_k` of 0.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]  # global layer numbers, from 0
    dims: Mapping[str, int]
    linear_layers: tuple[int, ...] = ()  # with gated DeltaNet in the place of attention

    @classmethod
    def from_hf_config(cls, config: Config) -> ModelShape:
        """Raises ModelError for an architecture or a variant that is not supported, a missing key,
        and a value that is none of its kind."""
        named = config.get("architectures") or ["missing"]
        architecture = str(named[0]) if isinstance(named, list) else str(named)
        family = FAMILIES.get(architecture)
        if family is None:
            check_around(architecture)
            listing = "; ".join(f"{name}: {f.title}" for name, f in FAMILIES.items())
            raise ModelError(
                f"architecture {architecture} is not supported; supported are {listing}"
            )
        try:
            language = _language(family, config)
            _check_sizes(architecture, language)
            check_variant(architecture, config)
            return _read(family, language)
        except KeyError as error:
            raise ModelError(f"config.json of {architecture} lacks the key {error}") from error
        except (TypeError, AttributeError, ArithmeticError) as error:
            raise ModelError(
                f"config.json of {architecture} has a value that is none of its kind: {error}"
            ) from error

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    def attention_of(self, layer: int) -> str:
        """The kind of attention of a global layer, a key of `linears.ATTENTION`."""
        return (
            self.family.linear_attention if layer in self.linear_layers else self.family.attention
        )

    def modules(self, layer: int) -> dict[str, Dims]:
        """`{module: (in_features, out_features, num_experts or None)}` of one global layer."""
        d, hidden = self.dims, self.hidden_size
        attention = linears.ATTENTION[self.attention_of(layer)].linears(d, hidden)
        if layer not in self.moe_layers:
            return attention | linears.mlp("mlp", hidden, d["intermediate"], None)
        experts = linears.mlp("experts", hidden, d["moe_intermediate"], self.num_experts)
        modules = attention | experts
        if d["shared_intermediate"]:
            modules |= linears.mlp("shared_expert", hidden, d["shared_intermediate"], None)
        return modules

    def blocks(self, module: str) -> tuple[int, ...]:
        """See `linears.blocks`."""
        return linears.blocks(module, self.dims)


def _check_sizes(architecture: str, config: Config) -> None:
    """Raises ModelError for a size that no model has: what is computed from it would fill the
    memory."""
    for key, largest in _LARGEST.items():
        value = config.get(key)
        if value is not None and not (type(value) is int and 0 <= value <= largest):
            raise ModelError(
                f"config.json of {architecture} has {key}={value!r:.40}: it is a number from 0 to "
                f"{largest:,}"
            )


def language_config(config: Config) -> Config:
    """What a config.json says of the language model, as that of the model by itself would: of most
    it is the config as it is."""
    named = config.get("architectures")
    family = FAMILIES.get(str(named[0])) if isinstance(named, list) and named else None
    return config if family is None else _language(family, config)


def _language(family: Family, config: Config) -> Config:
    if (inside := family.inside) is None:
        return config
    tied = config.get("tie_word_embeddings", False)
    own = {"architectures": [inside.architecture], "model_type": inside.model_type}
    return config[inside.key] | own | {"tie_word_embeddings": tied}


def around(architecture: str) -> tuple[Family, Around] | None:
    """The family of its language model, of a larger model that is not taken as it is."""
    for family in FAMILIES.values():
        for one in family.around:
            if one.architecture == architecture:
                return family, one
    return None


def check_around(architecture: str) -> None:
    """Raises ModelError for a larger model whose language model is supported, with the way out."""
    if around(architecture) is not None:
        raise ModelError(
            f"architecture {architecture} is of text and images, and its language model alone is "
            "supported: `lora-moe-rl language-model MODEL --out DIR` writes that as a checkpoint "
            "of its own"
        )


def check_variant(architecture: str, config: Config) -> None:
    """Raises ModelError, naming the key, its value and the reason, for what trainer and engine
    would not compute as it was trained."""
    family = FAMILIES[architecture]
    for reason in family.refused(_language(family, config)):
        raise ModelError(f"config.json of {architecture}: {reason}")


def hf_layer(shape: ModelShape, layer: int) -> str:
    """The path of a global layer, as checkpoints and PEFT files have it."""
    return f"{hf_prefix(shape)}layers.{layer}"


def hf_prefix(shape: ModelShape) -> str:
    """What the names of the model's weights begin with, all but the head's."""
    inside = shape.family.inside
    return "model." if inside is None else inside.prefix


def hf_path(shape: ModelShape, module: str) -> str:
    """The path of a canonical module below its layer, as checkpoints and PEFT files have it.

    `{}` stands for the expert: `mlp.experts.{}.gate_proj`.
    """
    family = shape.family
    block, _, part = module.rpartition(".")
    if block == "experts":
        name = family.expert_names[("gate", "up", "down").index(part)]
        return f"{family.moe_block}.experts.{{}}.{name}"
    if block == "shared_expert":
        return f"mlp.{family.shared_expert}.{part}_proj"
    if block == "mlp":
        return f"mlp.{part}_proj"
    if module.startswith("in_proj_") or module == "out_proj":
        return f"linear_attn.{module}"
    name = "kv_a_proj_with_mqa" if module == "kv_a_proj" else module
    return f"{hf_name(shape, 'self_attn')}.{hf_name(shape, name)}"


def hf_name(shape: ModelShape, usual: str) -> str:
    """What a family calls what most call `usual` (`Family.names`)."""
    return shape.family.names.get(usual, usual)


def hf_embedding(shape: ModelShape) -> str:
    """The name of the embedding's weight, as checkpoints have it."""
    return f"{hf_prefix(shape)}{hf_name(shape, 'embed_tokens')}.weight"


def transformers_path(shape: ModelShape, module: str) -> str:
    """The path below its layer that transformers' model has for a module that is no routed expert's
    (it stacks those). Of most it is the checkpoint's, as of the keys of PEFT files always."""
    path, name = hf_path(shape, module), shape.family.shared_in_transformers
    if name is None or not module.startswith("shared_expert."):
        return path
    return f"mlp.{name}.{path.rpartition('.')[2]}"


def _read(family: Family, c: Config) -> ModelShape:
    dims = linears.ATTENTION[family.attention].dims(c)
    linear_layers = () if family.linear_layers is None else family.linear_layers(c)
    if linear_layers:
        dims |= linears.ATTENTION[family.linear_attention].dims(c)
    dims |= {"moe_intermediate": 0, "shared_intermediate": 0}
    experts, top_k, moe_layers = 0, 0, ()
    if family.moe_layers is not None:
        experts = next((c[key] for key in family.num_experts if key in c), None)
        if experts is None:
            raise KeyError(" or ".join(family.num_experts))
        top_k = c[family.top_k]
        moe_layers = family.moe_layers(c) if experts > 0 else ()
        dims["moe_intermediate"] = c[family.moe_width]
        dims["shared_intermediate"] = family.shared_width(c)
    # Where every layer has experts, some families have no such key.
    every = len(moe_layers) == c["num_hidden_layers"]
    dims["intermediate"] = c.get("intermediate_size", 0) if every else c["intermediate_size"]
    return ModelShape(
        architecture=family.architecture,
        num_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        vocab_size=c["vocab_size"],
        max_positions=c["max_position_embeddings"],
        num_experts=experts,
        top_k=top_k,
        moe_layers=moe_layers,
        dims=dims,
        linear_layers=linear_layers,
    )


def _found() -> dict[str, Family]:
    """`{architecture: family}` of every file of this folder."""
    found: dict[str, Family] = {}
    files: dict[str, str] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        if name == "common":
            continue
        family: Family = import_module(f"{__name__}.{name}").FAMILY
        first = files.setdefault(family.architecture, name)
        if first != name:
            raise ValueError(f"{first} and {name} are both of {family.architecture}")
        found[family.architecture] = family
    return found


FAMILIES = _found()
