"""What of the base trainer and engines hold once (`model.held_once`), and what it takes.

`base/layout.py` says what is cut alike. On GPUs one copy serves a trainer rank and an engine rank
that stand on the same GPU; on the CPU one serves all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lora_moe_rl.base.layout import SMALL, Tensor, attention_apart, rule
from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.base import PARTS, BaseTensor, base_tensors, held_by
from lora_moe_rl.planner.facts import Facts, Format
from lora_moe_rl.planner.formats import tensor_bytes, trainer_bytes
from lora_moe_rl.planner.rollout import engine_shape
from lora_moe_rl.planner.trainer import FORMATS
from lora_moe_rl.refit.plan import trainer_ranks

FORMS: tuple[Format, ...] = (*FORMATS, "float32")
# A part of the model, and a piece of the names that the rule has for it: the first that is found.
NAMES = {
    ".experts.": "experts",
    "shared_expert": "shared experts",
    "mlp.": "dense MLPs",
    "self_attn": "attention",
    "embed_tokens": "embeddings",
    "lm_head": "embeddings",
}
Kind = tuple[str, str]  # a part of the model, the last of Megatron's name


@dataclass(frozen=True)
class HeldPart:
    """Bytes of a part of the model on a trainer rank and on an engine rank, by format. `shared`:
    what of the trainer rank's the engine rank's serves; `why` not all, '' where it does."""

    part: str
    trainer: dict[Format, int]
    engine: dict[Format, int]
    shared: dict[Format, int]
    why: str

    def together(self, form: Format, once: bool) -> int:
        return self.engine[form] + self.trainer[form] - (self.shared[form] if once else 0)


def held_parts(
    facts: Facts, config: RunConfig, weights: Format, gpus_per_node: int
) -> list[HeldPart]:
    """What the first trainer rank and the first rank of an engine hold; reasons are those of a base
    in the format `weights`."""
    trainer, shared = _of_stage(facts, config, 0, gpus_per_node)
    engine = Counter()
    for tensor in base_tensors(facts):
        shape = engine_shape(facts, tensor, config.rollout.tp, config.rollout.ep)
        for form in FORMS:
            engine[tensor.part, form] += tensor_bytes(tensor, shape, form)
    reasons = _reasons(facts, config, weights, gpus_per_node)
    return [
        HeldPart(
            part,
            {form: trainer[part, form] for form in FORMS},
            {form: engine[part, form] for form in FORMS},
            {form: shared[part, form] for form in FORMS},
            _why([reason for (of, _), reason in reasons.items() if of == part]),
        )
        for part in PARTS
        if engine[part, "bf16"]
    ]


def shared_bytes(
    facts: Facts, config: RunConfig, stage: int, form: Format, gpus_per_node: int
) -> int:
    """What a trainer rank of a pipeline stage does not hold itself."""
    _, shared = _of_stage(facts, config, stage, gpus_per_node)
    return sum(size for (_, of), size in shared.items() if of == form)


def _of_stage(
    facts: Facts, config: RunConfig, stage: int, gpus_per_node: int
) -> tuple[Counter[tuple[str, Format]], Counter[tuple[str, Format]]]:
    """Bytes by part and format of the first rank of a stage, and those that an engine's serve."""
    trainer = config.trainer
    rank = trainer_ranks(trainer, facts.shape.num_layers)[stage * trainer.world_size // trainer.pp]
    every, shared = Counter(), Counter()
    reasons = {form: _reasons(facts, config, form, gpus_per_node) for form in FORMS}
    for tensor, box in held_by(facts, rank).items():
        for form in FORMS:
            size = trainer_bytes(tensor, box.shape, form, trainer)
            every[tensor.part, form] += size
            if not reasons[form].get(_kind(tensor), SMALL):
                shared[tensor.part, form] += size
    return every, shared


def _why(reasons: list[str]) -> str:
    """Why not all of a part is shared, of which these are the reasons."""
    if not reasons:
        return SMALL
    return next((reason for reason in reasons if reason), "")


def _reasons(facts: Facts, config: RunConfig, form: Format, gpus_per_node: int) -> dict[Kind, str]:
    """Why each kind of tensor is held twice; '' for one that is not. Norms and routers have
    none."""
    if why := attention_apart(facts.shape):
        return {_kind(tensor): why for tensor in base_tensors(facts)}
    on_gpus = config.trainer.device == "cuda"
    apart = _apart(config, gpus_per_node) if on_gpus else ""
    tensors = rule(facts.shape, config.trainer, config.rollout, form, on_gpus and not apart)
    return {kind: one.reason or apart for one in tensors for kind in _kinds(one)}


def _kinds(one: Tensor) -> Iterator[Kind]:
    """What a tensor of the rule is for Megatron, which has some of a linear apart."""
    part = next((part for piece, part in NAMES.items() if piece in one.name), None)
    for name in one.megatron.split(", ") if part else ():
        yield str(part), name.rpartition(".")[2]


def _kind(tensor: BaseTensor) -> Kind:
    return tensor.part, tensor.name.removesuffix(".weight").rpartition(".")[2]


def _apart(config: RunConfig, gpus_per_node: int) -> str:
    """Why no GPU has anything of both."""
    if not config.placement.colocated:
        return (
            "trainer and engines stand on GPUs of their own: set placement.mode=colocated, so that "
            "they share them"
        )
    if config.trainer.world_size > gpus_per_node:
        return "trainer and engines stand on several nodes, and a base is held once on one alone"
    return ""
