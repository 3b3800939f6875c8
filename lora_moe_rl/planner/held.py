"""What of the base trainer and engines would hold once (`model.held_once`), and what it takes.

`base/layout.py` says what is cut alike. On GPUs one copy serves a trainer rank and an engine rank
that stand on the same GPU; of several GPUs this is a plan of what no run can do yet
(docs/held_once.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lora_moe_rl.base.layout import ExpertCut, rule
from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.base import PARTS, base_tensors, held_by
from lora_moe_rl.planner.facts import Facts, Format
from lora_moe_rl.planner.formats import tensor_bytes, trainer_bytes
from lora_moe_rl.planner.rollout import engine_shape
from lora_moe_rl.planner.trainer import FORMATS
from lora_moe_rl.refit.plan import trainer_ranks

ON_GPUS = "not done yet on several GPUs: each side has its own"
FORMS: tuple[Format, ...] = (*FORMATS, "float32")
# A part of the model, and a piece of the names that the rule has for it.
NAMES = {
    "embeddings": "embed_tokens",
    "attention": "self_attn",
    "router": "routers",
    "experts": ".experts.",
    "shared experts": "shared_expert",
    "dense MLPs": "mlp.gate_up_proj",
    "norms": "norms",
}


@dataclass(frozen=True)
class HeldPart:
    """Bytes of a part of the model on a trainer rank and on an engine rank, by format. `why`: why
    each has its own; '' where one copy serves both."""

    part: str
    trainer: dict[Format, int]
    engine: dict[Format, int]
    why: str

    def together(self, form: Format, once: bool) -> int:
        return self.engine[form] + (0 if once and not self.why else self.trainer[form])


def held_parts(facts: Facts, config: RunConfig, same_gpus: bool) -> list[HeldPart]:
    """Of the first trainer rank and the first rank of an engine. `same_gpus`: whether the two stand
    on the same."""
    (first, *_) = trainer_ranks(config.trainer, facts.shape.num_layers)
    trainer, engine = Counter(), Counter()
    for tensor, box in held_by(facts, first).items():
        for form in FORMS:
            held = trainer_bytes(tensor, box.shape, form, config.trainer)
            trainer[tensor.part, form] += held
    for tensor in base_tensors(facts):
        shape = engine_shape(facts, tensor, config.rollout.tp, config.rollout.ep)
        for form in FORMS:
            engine[tensor.part, form] += tensor_bytes(tensor, shape, form)
    reasons = dict(_reasons(facts, config, same_gpus))
    return [
        HeldPart(
            part,
            {form: trainer[part, form] for form in FORMS},
            {form: engine[part, form] for form in FORMS},
            reasons[part],
        )
        for part in PARTS
        if engine[part, "bf16"]
    ]


def shared_bytes(parts: list[HeldPart], form: Format) -> int:
    """What a trainer rank does not hold itself."""
    return sum(part.trainer[form] for part in parts if not part.why)


def on_several_gpus(config: RunConfig) -> bool:
    several = (config.trainer.world_size, config.rollout.tp) != (1, 1)
    return several and config.trainer.device == "cuda"


def _reasons(facts: Facts, config: RunConfig, same_gpus: bool) -> Iterator[tuple[str, str]]:
    """Why each part is held twice; '' for one that is not."""
    tensors = rule(facts.shape, config.trainer, config.rollout)
    for part, name in NAMES.items():
        why = next((one.reason for one in tensors if name in one.name and one.reason), "")
        if part != "experts" and on_several_gpus(config):
            why = why or ON_GPUS
        yield part, why or _apart(config, same_gpus)


def _apart(config: RunConfig, same_gpus: bool) -> str:
    """Why a GPU has not the same experts of both; on the CPU all are in one memory."""
    trainer, rollout = config.trainer, config.rollout
    if trainer.device != "cuda":
        return ""
    if not same_gpus:
        return (
            "trainer and engines stand on GPUs of their own: set placement.mode=colocated, so that "
            "they share them"
        )
    ours, theirs = ExpertCut.of_trainer(trainer), ExpertCut.of_engine(rollout)
    if trainer.pp > 1 or ours != theirs:
        return (
            f"a GPU has the trainer's experts of {trainer.pp} pipeline stages and 1 of "
            f"{ours.ranges} ranges, and the engine's of all layers and 1 of {theirs.ranges} ranges"
        )
    return ""
