"""Whether a run holds its base once: decided before anything starts, from files and settings."""

from __future__ import annotations

import os
from pathlib import Path

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.base.dense import dense
from lora_moe_rl.base.layout import SMALL, Tensor, attention_apart, kind, rule
from lora_moe_rl.base.parts import engine_part
from lora_moe_rl.base.room import check_room, expandable_segments
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.sharing import gpus_together
from lora_moe_rl.errors import ConfigError, HeldBaseError, LoraMoeRlError
from lora_moe_rl.models import quantised
from lora_moe_rl.models.quantised_names import form_of
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.upstream.versions import installed, vllm_on_cpu

NAMED = 3


def why_private(config: RunConfig, shape: ModelShape, model_dir: Path) -> str:
    """Why the base of a run cannot be held once; '' when its routed experts, at least, can."""
    form = quantised.form_in(model_dir)
    return (
        _setting(config, shape)
        or _layout(experts(config, shape, form))
        or _weights(shape, model_dir)
        or ("" if on_gpu() else _room(config, shape, form))
    )


def decide(config: RunConfig, shape: ModelShape, model_dir: Path) -> str:
    """Why trainer and engines of a run hold a base each; '' when they hold it once. Raises
    ConfigError when model.held_once=on and it cannot be."""
    if config.model.held_once == "off":
        return "model.held_once=off"
    why = why_private(config, shape, model_dir)
    if why and config.model.held_once == "on":
        raise ConfigError(f"model.held_once=on: {why}; or set it to auto or off")
    return why


def held_share(config: RunConfig, shape: ModelShape, form: str | None) -> float:
    """The part of the base's parameters that is held once."""
    every = _rule(config, shape, form)
    held = sum(tensor.elements for tensor in every if not tensor.reason)
    return held / sum(tensor.elements for tensor in every)


def private(config: RunConfig, shape: ModelShape, form: str | None) -> dict[str, str]:
    """`{tensor: why each side has its own}` of what is not too small to tell."""
    every = _rule(config, shape, form)
    return {one.name: one.reason for one in every if one.reason not in ("", SMALL)}


def held_bytes(config: RunConfig, shape: ModelShape, form: str | None) -> int:
    """The bytes of the file that holds the base once. `form`: of a quantised base."""
    return expert_bytes(config, shape, form) + dense_bytes(config, shape, form)


def gpu_bytes(config: RunConfig, shape: ModelShape, form: str | None) -> int:
    """What is held once on the GPU of an engine's first rank, which others have as much of."""
    rollout, reasons = config.rollout, {t.name: t.reason for t in _rule(config, shape, form)}
    parts = (
        engine_part(one, rollout.tp, rollout.ep, 0).size
        for one in dense(shape, rollout.tp)
        if not reasons[kind(one)]
    )
    experts_here = expert_bytes(config, shape, form) // rollout.tp
    return experts_here + int(sum(parts) * _bits(config) / 8)


def expert_bytes(config: RunConfig, shape: ModelShape, form: str | None) -> int:
    elements = sum(tensor.elements for tensor in experts(config, shape, form))
    return int(elements * _bits(config, form) / 8)


def dense_bytes(config: RunConfig, shape: ModelShape, form: str | None) -> int:
    """The bytes held of linears, embedding and head that engines have as numbers."""
    found = dense(shape, config.rollout.tp)
    kept = (one.elements for one in found if form != "fp8" or not one.modules)
    return int(sum(kept) * _bits(config) / 8)


def _bits(config: RunConfig, form: str | None = None) -> float:
    """How many bits a weight takes, with what is held of its scale."""
    half = config.trainer.dtype == "bfloat16" or (config.trainer.dtype == "auto" and on_gpu())
    number = 16 if half else 32
    return {"fp8": 8, "int4": 4 + number / 32, "mxfp4": 4 + 8 / 32}.get(str(form), number)


def experts(config: RunConfig, shape: ModelShape, form: str | None) -> list[Tensor]:
    return [one for one in _rule(config, shape, form) if ".experts." in one.name]


def _rule(config: RunConfig, shape: ModelShape, form: str | None) -> list[Tensor]:
    return rule(shape, config.trainer, config.rollout, form, on_gpu())


def _setting(config: RunConfig, shape: ModelShape) -> str:
    if config.offline:
        return f"algorithm={config.algorithm.name} has no engine to share with"
    if not shape.moe_layers:
        return f"this {shape.architecture} is dense, and only bases with routed experts are shared"
    if why := attention_apart(shape):
        return why
    if config.refit.mode == "merged":
        return "refit.mode=merged writes adapters into the engine's own weights"
    if config.rollout.dp > 1:
        return (
            f"rollout.dp={config.rollout.dp} gives each rank of an engine experts that no other "
            "has, and only those of tensor-parallel ranks are shared"
        )
    if on_gpu():
        if why := _gpu(config):
            return why
    elif config.trainer.device == "cuda":
        return "vLLM is its CPU build here, and a base is then held once on the CPU alone"
    if "RAY_ADDRESS" in os.environ:
        return "a base is held once on one machine alone, and RAY_ADDRESS names a cluster"
    return ""


def on_gpu() -> bool:
    """Whether engines run on GPUs here, and a base is held in their memory."""
    return not vllm_on_cpu()


def _gpu(config: RunConfig) -> str:
    """What sharing the memory of GPUs cannot do."""
    if config.trainer.device == "cpu":
        return "trainer.device=cpu, and the engines are on GPUs"
    if not config.placement.colocated:
        return (
            "placement.mode is not colocated, and a base is held once by a trainer rank and an "
            "engine's rank that are on the same GPU"
        )
    try:
        gpus_together(config)
    except ConfigError as error:
        return str(error)
    if name := expandable_segments():
        return f"{name} has expandable_segments:True, whose memory cannot be shared: take it out"
    if installed("transformer-engine") is not None:
        return "Transformer Engine is installed, and its layers have weights of their own"
    return ""


def _layout(tensors: list[Tensor]) -> str:
    """Names the tensors that the two cut differently."""
    unlike = [tensor for tensor in tensors if tensor.reason]
    if not unlike:
        return ""
    names = ", ".join(tensor.name for tensor in unlike[:NAMED])
    more = f" and {len(unlike) - NAMED} more" if len(unlike) > NAMED else ""
    return f"{names}{more} cannot be shared: {unlike[0].reason}"


def _weights(shape: ModelShape, model_dir: Path) -> str:
    """Why a checkpoint's experts cannot be held: they are neither numbers nor all quantised as its
    config says. '' when they can."""
    try:
        base, form = Base(str(model_dir)), quantised.form_in(model_dir)
        for layer in shape.moe_layers:
            for module in ("experts.gate", "experts.up", "experts.down"):
                if form is None:
                    base.check(layer, module)
                for expert in range(shape.num_experts if form else 0):
                    path = base.name(layer, module, expert)
                    if (found := form_of(path, base.weights.file_of)) != form:
                        return f"{path} is {found or 'not quantised'}, and the base {form}"
    except LoraMoeRlError as error:
        return str(error)
    return ""


def _room(config: RunConfig, shape: ModelShape, form: str | None) -> str:
    try:
        check_room(Path(config.model.held_dir), held_bytes(config, shape, form))
    except HeldBaseError as error:
        return str(error)
    return ""
