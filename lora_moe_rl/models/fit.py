"""Whether a layout fits a model: checked from `config.json` alone, before anything starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lora_moe_rl.adapters.sharding import dense_kind
from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.config import RolloutConfig, RunConfig, TrainerConfig
from lora_moe_rl.config.keys import value_text
from lora_moe_rl.config.trainer import has_transformer_engine
from lora_moe_rl.errors import ConfigError, ModelError
from lora_moe_rl.models.quantised import AS_NUMBERS, WHOLE
from lora_moe_rl.upstream.versions import importable


def check_layout(shape: ModelShape, config: RunConfig, form: str | None = None) -> None:
    """Raises ConfigError, naming both numbers, for a size that does not divide the model, and for a
    layout of experts if it has none. `form`: of a base whose experts are packed."""
    if not shape.moe_layers:
        _check_dense(shape, config)
    if shape.linear_layers:
        _check_linear(shape, config, form)
    trainer, dims = config.trainer, shape.dims
    heads = {"attention heads": dims["heads"]}
    if "kv_heads" in dims:
        heads["key/value heads"] = dims["kv_heads"]
    sizes = [
        ("trainer.ep", trainer.ep, {"experts": shape.num_experts}),
        ("trainer.etp", trainer.etp, {"columns of an expert": dims["moe_intermediate"]}),
        ("trainer.tp", trainer.tp, heads),
        ("trainer.tp", trainer.tp, _widths(shape)),
        ("rollout.tp", config.rollout.tp, {"attention heads": dims["heads"]} | _widths(shape)),
    ]
    if not config.rollout.ep:
        of_expert = {"columns of an expert": dims["moe_intermediate"]}
        sizes.append(("rollout.tp", config.rollout.tp, of_expert))
    for key, size, numbers in sizes:
        for what, number in numbers.items():
            if number % size:
                raise ConfigError(
                    f"{key}={size} does not divide the model's {number} {what}; use a divisor of "
                    f"{number}"
                )
    _check_context_heads(trainer, heads)
    if shape.family.experts == "interleaved":
        _check_interleaved(shape, config)
    if form in WHOLE and dims["moe_intermediate"] % (trainer.etp * WHOLE[form]):
        raise ConfigError(
            f"trainer.etp={trainer.etp} cuts experts of the width {dims['moe_intermediate']}, "
            f"{form}, and not into whole groups of {WHOLE[form]}; use a smaller trainer.etp, and "
            "trainer.ep for the rest"
        )
    if config.rollout.dp > max(1, shape.num_experts):
        raise ConfigError(
            f"rollout.dp={config.rollout.dp} ranks are more than the model's {shape.num_experts} "
            "experts, which are spread over them; lower it"
        )
    _check_engine_heads(shape, config.rollout.tp)
    chunks = trainer.pp * trainer.vpp
    if chunks > shape.num_layers:
        raise ConfigError(
            f"trainer.pp={trainer.pp} with trainer.vpp={trainer.vpp} wants {chunks} pieces of a "
            f"model of {shape.num_layers} layers; lower one of them"
        )
    if config.model.max_length > shape.max_positions:
        raise ConfigError(
            f"model.max_length={config.model.max_length} is more than the model's "
            f"{shape.max_positions} positions"
        )


def check_stops(shape: ModelShape, config: RunConfig, own: Collection[int] = ()) -> None:
    """Raises ConfigError for a token that is to end responses and that no model can sample, and
    ModelError where it is one that the model's files name (`own`)."""
    size = shape.vocab_size
    if strange := [token for token in own if token >= size]:
        raise ModelError(
            f"the model's generation_config.json or config.json has the eos_token_id "
            f"{', '.join(map(str, strange))}, and its token ids are 0 to {size - 1}; mend it there"
        )
    if strange := [token for token in config.rollout.stop_token_ids if not 0 <= token < size]:
        raise ConfigError(
            f"rollout.stop_token_ids has {', '.join(map(str, strange))}, which would end no "
            f"response: the model's token ids are 0 to {size - 1}; leave it out, or take the id "
            "that the model's tokenizer.json has for the text"
        )


def check_replay(shape: ModelShape, config: RunConfig) -> None:
    """Raises ConfigError when the decisions of routers are to be replayed and there are none."""
    if not shape.moe_layers and config.replay.mode != "off":
        raise ConfigError(
            f"replay.mode={config.replay.mode} replays the decisions of routers, and this "
            f"{shape.architecture} is dense, it has none; set replay.mode=off"
        )


def check_blocks(shape: ModelShape, config: RunConfig, form: str | None) -> None:
    """Raises ConfigError where ranks of engines cut weights of `form` that they cannot."""
    if form == "fp8" and (cut := cut_block(shape, config.rollout)):
        raise ConfigError(cut)


def cut_block(shape: ModelShape, rollout: RolloutConfig) -> str:
    """Where ranks of an engine would cut the blocks that scales of FP8 weights are of, and the way
    out; '' where they do not. vLLM refuses it while it starts
    (`vllm/model_executor/layers/quantization/utils/fp8_utils.py`)."""
    block = WHOLE["fp8"]
    for layer in range(shape.num_layers):
        for module, (inputs, outputs, experts) in shape.modules(layer).items():
            if rollout.tp == 1 or (experts is not None and rollout.ep):
                continue
            kind = dense_kind(module)
            if kind == "replicated":
                continue
            size = inputs if kind == "row" else outputs
            cut = size // rollout.tp
            if module.endswith(("k_proj", "v_proj")):  # heads are repeated, not cut
                cut = max(cut, size // shape.dims["kv_heads"])
            if cut % block:
                ep = "rollout.ep=true, or " if experts is not None else ""
                return (
                    f"rollout.tp={rollout.tp} cuts {module} of layer {layer}, of the width {size}, "
                    f"into {cut}, and not into whole blocks of {block}, as this model's FP8 "
                    f"weights have scales of; use {ep}a smaller rollout.tp"
                )
    return ""


def _check_dense(shape: ModelShape, config: RunConfig) -> None:
    for option, value, other in (
        ("trainer.ep", config.trainer.ep, 1),
        ("trainer.etp", config.trainer.etp, 1),
        ("rollout.dp", config.rollout.dp, 1),
        ("rollout.ep", config.rollout.ep, False),
    ):
        if value != other:
            raise ConfigError(
                f"{option}={value_text(value)} has no effect: this {shape.architecture} is dense, "
                f"it has no experts; set {option}={value_text(other)}"
            )


def _widths(shape: ModelShape) -> dict[str, int]:
    """The widths of the MLPs that tensor-parallel ranks share."""
    found = {"columns of a shared expert": shape.dims["shared_intermediate"]}
    if len(shape.moe_layers) < shape.num_layers:
        found["columns of a dense MLP"] = shape.dims["intermediate"]
    return found


def check_start(spec: AdapterSpec, config: RunConfig) -> None:
    """Raises ConfigError where a start from the base would look for weights that no checkpoint of
    the family has one by one."""
    family = spec.shape.family
    one_by_one = family.experts not in ("stacked", "interleaved")
    if not config.adapter.starts_from_base or one_by_one:
        return
    if experts := sorted({site.module for site in spec if site.num_experts is not None}):
        raise ConfigError(
            f"adapter.init={config.adapter.init} starts from each expert's own weight, and "
            f"checkpoints of {spec.shape.architecture} have all experts of a layer in one: use "
            f"adapter.init=kaiming, or leave {', '.join(experts)} out of adapter.targets"
        )


def _check_linear(shape: ModelShape, config: RunConfig, form: str | None) -> None:
    """What is not supported, or not shown to be right, where layers have linear attention."""
    what = f"this {shape.architecture} has layers with linear attention"
    trainer = config.trainer
    if form in WHOLE:
        raise ConfigError(
            f"the base is {form}, and {what}, which is supported in float dtypes; {AS_NUMBERS}"
        )
    if config.refit.mode == "merged" and shape.family.experts == "stacked":
        raise ConfigError(
            f"refit.mode=merged: checkpoints of {shape.architecture} have the experts of a layer "
            "in one, which are not merged in engines; use refit.mode=adapter"
        )
    if trainer.device != "cpu" and has_transformer_engine() and not importable("fla"):
        raise ConfigError(
            f"{what}, and Megatron-core computes it on GPUs with Transformer Engine by "
            "flash-linear-attention, which is not installed here: install that"
        )
    heads = shape.dims["linear_key_heads"]
    for key, size in (("trainer.tp", trainer.tp), ("rollout.tp", config.rollout.tp)):
        if heads % size:
            raise ConfigError(
                f"{key}={size} does not divide the model's {heads} key heads of linear attention; "
                f"use a divisor of {heads}"
            )
    if heads % (trainer.tp * trainer.cp):
        here = heads // trainer.tp
        raise ConfigError(
            f"trainer.cp={trainer.cp} does not divide the {here} key heads of linear attention "
            f"that trainer.tp={trainer.tp} leaves a rank, of which each context-parallel rank has "
            f"some; use a divisor of {here}"
        )


def _check_interleaved(shape: ModelShape, config: RunConfig) -> None:
    """What is not cut or written of experts whose gate and up are one, with biases, and how vLLM's
    model cuts them (`vllm/model_executor/models/gpt_oss.py`)."""
    trainer, rollout = config.trainer, config.rollout
    what = f"experts of {shape.architecture}, which have gate and up in turn and biases"
    if trainer.etp > 1:
        raise ConfigError(
            f"trainer.etp={trainer.etp} would cut {what}: set trainer.etp=1, and trainer.ep for "
            "the rest"
        )
    if rollout.fully_sharded:
        raise ConfigError(
            f"rollout.fully_sharded=true would cut adapter slots of {what}: leave it out"
        )
    if config.refit.mode == "merged":
        raise ConfigError(f"refit.mode=merged does not write {what}: use refit.mode=adapter")
    if config.adapter.expert_layout != "per_expert":
        raise ConfigError(
            f"adapter.expert_layout={config.adapter.expert_layout} has no slots in vLLM for {what}"
            ": use adapter.expert_layout=per_expert"
        )
    if rollout.dp > 1:
        raise ConfigError(
            f"rollout.dp={rollout.dp} spreads {what} over engines' ranks, which has not been "
            "compared: set rollout.dp=1, and rollout.engines for more"
        )
    numbers = {"key/value heads": shape.dims["kv_heads"]}
    numbers["experts" if rollout.ep else "columns of an expert"] = (
        shape.num_experts if rollout.ep else shape.dims["moe_intermediate"]
    )
    for name, number in numbers.items():
        if number % rollout.tp:
            raise ConfigError(
                f"rollout.tp={rollout.tp} does not divide the model's {number} {name}, as vLLM's "
                f"{shape.architecture} wants; use a divisor of {number}"
            )


def can_share(heads: int, cp: int, repeated: bool) -> bool:
    """Whether cp ranks can share a rank's heads in attention; fewer of them may be `repeated`."""
    return heads % cp == 0 or (repeated and cp % heads == 0)


def _check_context_heads(trainer: TrainerConfig, heads: Mapping[str, int]) -> None:
    """In attention context-parallel ranks share the heads; fewer key/value heads are repeated."""
    cp = trainer.cp
    for what, number in heads.items():
        here, repeated = number // trainer.tp, what == "key/value heads"
        if not can_share(here, cp, repeated):
            among = f", which trainer.tp={trainer.tp} leaves a rank" if trainer.tp > 1 else ""
            multiple = f" or a multiple of {here}" if repeated else ""
            raise ConfigError(
                f"trainer.cp={cp} cannot share the model's {here} {what}{among}: in attention each "
                f"of its ranks has some of them; use a divisor of {here}{multiple}"
            )


def _check_engine_heads(shape: ModelShape, tp: int) -> None:
    """vLLM repeats key/value heads where there are fewer than ranks, of most families."""
    kv_heads = shape.dims.get("kv_heads", tp)
    if kv_heads % tp and not shape.family.repeats_keys:
        raise ConfigError(
            f"rollout.tp={tp} does not divide the model's {kv_heads} key/value heads, which vLLM "
            f"does not repeat for this family; use a divisor of {kv_heads}"
        )
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(
            f"rollout.tp={tp} neither divides the model's {kv_heads} key/value heads nor is a "
            f"multiple of them; use a divisor or a multiple of {kv_heads}"
        )
