"""What a family's file says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Config = Mapping[str, Any]
# (in_features, out_features, number of routed experts or None) of one linear
Dims = tuple[int, int, int | None]


def never(config: Config) -> bool:
    return False


# A router's scores; all but those of a plain softmax have a correction for the choice alone.
Router = Literal["softmax", "corrected_softmax", "sigmoid"]
# How the routed experts of a layer stand in checkpoints and in transformers' model, and what PEFT
# 0.21.2 takes the names of their linears for (adapters/peft_config.py):
#   converted    one by one in checkpoints, stacked in the model; PEFT finds the stacks
#   unconverted  the same; PEFT finds linears of dense layers and shared experts alone
#   modules      one by one in both: files of the 3d form would name nothing
#   stacked      stacked in both; PEFT reads the 3d form alone, vLLM wants a flag for the 2d form
#   interleaved  stacked in both and in vLLM, gate and up in turn, each with a bias:
#                `mlp.experts.gate_up_proj` [E, hidden, 2 * width] and `gate_up_proj_bias`
Experts = Literal["converted", "unconverted", "modules", "stacked", "interleaved"]


@dataclass(frozen=True)
class Inside:
    """Where a language model is in a larger one: under `key` of config.json, its weights under
    `prefix`. By itself it is an `architecture` of its own, with a `model_type` of its own, whose
    bridge it takes. Weights under `left_out` are another part's, which is neither trained nor
    served."""

    architecture: str
    model_type: str
    key: str
    prefix: str
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Around:
    """A larger model, of text and images, around one of the family, which is neither trained nor
    served: `lora-moe-rl language-model` writes the language model as a checkpoint of its own. Its
    config is under `key` of config.json, its weights have `prefix` before the names that they have
    by themselves, and those under `left_out` are the other parts'."""

    architecture: str
    key: str
    prefix: str
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face. Functions of a `Config` take the model's `config.json`, or
    of a model inside a larger one `language_config` of that.

    refused      the reasons why a config is not supported, as texts; `refusals.py` has the usual
    linear_layers  the global numbers of the layers with gated DeltaNet in the place of attention
    linear_attention  its kind, a key of `linears.ATTENTION`
    inside       the family is of a language model inside a larger one
    around       larger models that are not taken as they are, but whose language model is
    bridge       imports Megatron and returns the family's class for `trainer/bridge.py` to register
                 (`trainer/bridge_parts.py`)
    moe_layers   the global numbers of the layers with routed experts; None: the family is dense,
                 and what follows about experts means nothing
    moe_block, expert_names  (gate, up, down): the names that checkpoints, vLLM and adapters use for
                 routed experts
    router, experts  see `Router` and `Experts`
    names        {ours: Hugging Face's} of what is not called as usual: self_attn, o_proj, q_norm,
                 k_norm, embed_tokens
    reference_class  the class of the reference, where transformers has none of the architecture's
                 name; imports Megatron-Bridge, which has it
    shared_expert  its Hugging Face name below `mlp`; `shared_width`: its width, 0 if there is none
    """

    architecture: str
    title: str
    model_types: tuple[str, ...]  # the first is the one that transformers knows
    attention: Literal["gqa", "fused_gqa", "gated_gqa", "mla"]
    refused: Callable[[Config], Iterable[str]]
    bridge: Callable[[], type]
    linear_layers: Callable[[Config], tuple[int, ...]] | None = None
    linear_attention: Literal["gated_delta", "separate_delta"] = "gated_delta"
    inside: Inside | None = None
    around: tuple[Around, ...] = ()
    qkv_bias: Callable[[Config], bool] = never
    qk_norm: Callable[[Config], bool] = never  # norms on the queries and keys of GQA
    norm_over_heads: bool = False  # each of these norms is over all heads together
    # Whether vLLM serves it on more tensor-parallel ranks than it has key/value heads.
    repeats_keys: bool = True

    moe_layers: Callable[[Config], tuple[int, ...]] | None = None
    moe_width: str = "moe_intermediate_size"
    moe_block: str = "mlp"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # The keys of how many experts a layer has, of which the first that is there is read (of
    # Qwen3-MoE transformers 5 writes the second), and of how many are chosen.
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    top_k: str = "num_experts_per_tok"
    experts: Experts = "converted"
    router: Router = "softmax"
    shared_expert: str | None = None
    shared_in_transformers: str | None = None  # its name in transformers' model, where another
    shared_width: Callable[[Config], int] = lambda c: 0
    shared_gate: bool = False  # the shared expert's output is weighed by a sigmoid of its own

    names: Mapping[str, str] = field(default_factory=dict)
    served_attention: str = "self_attn"  # vLLM's name of a layer's attention
    # Why vLLM cannot serve adapters of the family; '' if it can.
    not_served: str = ""
    # What transformers' config is given beside config.json, to compute what was trained.
    reference_keys: Callable[[Config], dict[str, Any]] = lambda c: {}
    reference_class: Callable[[], Any] | None = None
    # Mends a decoder layer of transformers' model in place, given that and the model's config, so
    # that it computes what was trained (verify/hf_load.py).
    mend_reference: Callable[[Any, Any], None] | None = None
