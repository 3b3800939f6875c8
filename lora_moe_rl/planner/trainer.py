"""What a trainer rank holds, by class of rank.

Ranks of one pipeline stage hold equally much: every cut divides evenly. A class is one or several
stages with the same figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.sharding import RankLayout, pipeline_chunks
from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.algorithms.base import Algorithm
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.config.trainer import OFFLOAD_BYTES
from lora_moe_rl.planner.activations import (
    Modules,
    communication,
    head,
    kept_by_layer,
    kept_when_recomputed,
    layer_work,
    modules_of,
)
from lora_moe_rl.planner.base import (
    PARTS,
    BaseTensor,
    tensors_before,
    tensors_behind,
    tensors_of_layer,
)
from lora_moe_rl.planner.facts import Facts, Format
from lora_moe_rl.planner.formats import itemsize, packed_in_trainer, scratch_bytes, trainer_bytes
from lora_moe_rl.planner.hardware import FRAGMENTATION, RUNTIME_BYTES
from lora_moe_rl.refit.transports import ON_GPU

FLOAT32 = 4
# Kinds of memory that stay between updates.
RESIDENT = ("base", "scratch", "adapter", "gradients", "optimizer", "refit", "runtime")
STEP = 4  # Adam's count of steps: one float32 a parameter tensor, on the host
FORMATS: tuple[Format, ...] = ("bf16", "fp8", "int4", "mxfp4")


# Kinds of memory as they are shown, and what is summed up in each.
SHOWN = {
    "base": ("base",),
    "adapter": ("adapter",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer", "Adam's step"),
    "activations": ("activations", "one layer's work"),
    "logits": ("logits",),
    "comm.": ("communication",),
    "other": ("scratch", "refit", "allocator", "runtime"),
}


@dataclass(frozen=True)
class RankClass:
    """Ranks with the same figures. `memory`: bytes by what they are for; `parts`: parameters of the
    base by part of the model; `base_bytes`: of the base in each format; `host`: bytes in the host's
    memory instead, and `host_in_step` those that are there in a step alone. Buffers of the base
    (router corrections, rotary tables: a few MB) are left out."""

    stages: tuple[int, ...]
    ranks: int
    layers: tuple[int, ...]  # of the first of the stages
    parts: dict[str, int]
    base_bytes: dict[Format, int]
    adapter_parameters: int
    trained_parameters: int
    memory: dict[str, int]
    host: int
    host_in_step: int

    @property
    def base_parameters(self) -> int:
        return sum(self.parts.values())

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def tensors(self) -> int:
        """What of `total` are tensors: without the CUDA context, and what the allocator keeps in
        reserve."""
        return self.total - self.memory["runtime"] - self.memory["allocator"]

    @property
    def shown(self) -> dict[str, int]:
        """Bytes by kind as in `SHOWN`."""
        return {kind: sum(self.memory[one] for one in of) for kind, of in SHOWN.items()}

    @property
    def largest(self) -> tuple[str, int]:
        """The kind that has most bytes, of those with a name of their own."""
        kind = max((k for k in SHOWN if k != "other"), key=lambda k: self.shown[k])
        return kind, self.shown[kind]

    @property
    def resident(self) -> int:
        """What of `total` stays between updates."""
        return sum(self.memory[kind] for kind in RESIDENT)

    @property
    def name(self) -> str:
        first, last = self.stages[0], self.stages[-1]
        return f"stage {first}" if first == last else f"stages {first}-{last}"


@dataclass(frozen=True)
class Held:
    """Elements and bytes of some of a rank's tensors; `packed`: shapes of those that it dequantises
    when it multiplies them."""

    parts: Counter[str]
    base_bytes: Counter[Format]
    packed: frozenset[tuple[int, ...]] = frozenset()
    adapters: int = 0
    trained: int = 0
    tensors: int = 0


class TrainerMemory:
    """Memory of trainer ranks of one model and adapter, under any layout.

    Layers of one kind (dense or MoE, of one attention, with the same adapters) are counted once
    a layout.
    """

    def __init__(
        self, facts: Facts, spec: AdapterSpec, weights: Format, modules: Modules | None = None
    ):
        """`modules`: that ranks are built of; None: `modules_of` each trainer."""
        self.facts, self.spec, self.modules = facts, spec, modules
        self.weights: Format = weights
        self.formats: list[Format] = sorted({*FORMATS, weights})
        sites: dict[int, list[Site]] = {}
        for site in spec:
            sites.setdefault(site.layer, []).append(site)
        kinds: dict[tuple, int] = {}
        self.kind = []  # of each layer: the first layer of its kind
        for layer in range(facts.shape.num_layers):
            adapted = tuple(
                (s.module, s.rank, s.frozen_rank, s.shared) for s in sites.get(layer, ())
            )
            key = (layer in facts.shape.moe_layers, facts.shape.attention_of(layer), adapted)
            self.kind.append(kinds.setdefault(key, layer))
        self._held: dict[tuple, Held] = {}

    def classes(self, config: RunConfig) -> list[RankClass]:
        """The classes of ranks in the order of the stages; neighbours with the same figures are one
        class."""
        classes: list[RankClass] = []
        trainer = config.trainer
        size = trainer.world_size // trainer.pp
        algorithm = algorithms.make(config)
        for stage, layers in enumerate(stage_layers(trainer, self.facts.shape.num_layers)):
            mine = self._stage(config, stage, layers, size, algorithm)
            if classes and _figures(classes[-1]) == _figures(mine):
                last = classes.pop()
                mine = replace(last, stages=last.stages + (stage,), ranks=last.ranks + size)
            classes.append(mine)
        return classes

    def _stage(
        self, config: RunConfig, stage: int, layers: list[int], ranks: int, algorithm: Algorithm
    ) -> RankClass:
        held = policy = self._all(config.trainer, layers)
        if algorithm.from_start:  # once more, frozen: without gradients and moments
            held = replace(held, adapters=held.adapters + held.trained)
        if algorithm.critic is not None:
            held = self._with_critic(held, layers)
        moments, host = 2 * FLOAT32 * held.trained, 0
        stepped = FLOAT32 * held.trained  # Adam's step holds one more copy
        if config.trainer.offloads_moments:
            moments, host = 0, moments
            stepped = 3 * min(stepped, OFFLOAD_BYTES)  # and two moments, of a part at a time
        on_gpu = config.refit.transport in ON_GPU and not config.offline  # a version stays
        memory = {
            "base": held.base_bytes[self.weights],
            "scratch": scratch_bytes(held.packed, self.weights, config.trainer.device),
            "adapter": FLOAT32 * held.adapters,
            "gradients": FLOAT32 * held.trained,
            "optimizer": moments + STEP * held.tensors,
            "refit": itemsize(self.weights) * policy.adapters * on_gpu,
        }
        moving, host_in_step = self._moving(config, stage, layers)
        in_step = sum(moving.values())
        # While Adam steps there are no activations.
        memory |= moving | {"Adam's step": max(0, stepped - in_step)}
        memory |= {"allocator": int(FRAGMENTATION * in_step), "runtime": RUNTIME_BYTES}
        return RankClass(
            (stage,),
            ranks,
            tuple(layers),
            {part: held.parts[part] for part in PARTS},
            {form: held.base_bytes[form] for form in self.formats},
            policy.adapters,
            held.trained,
            memory,
            host,
            host_in_step,
        )

    def _with_critic(self, held: Held, layers: list[int]) -> Held:
        """Adapters once more, of which all is trained; the last stage has the value head too."""
        shape, last = self.facts.shape, self.facts.shape.num_layers - 1 in layers
        more = held.trained + shape.hidden_size * last
        return replace(
            held,
            adapters=held.adapters + more,
            trained=held.trained + more,
            tensors=2 * held.tensors + last,
        )

    def _all(self, trainer: TrainerConfig, layers: list[int]) -> Held:
        facts = self.facts
        blocks = [self._layer(trainer, self.kind[layer]) for layer in layers]
        if 0 in layers:
            blocks.append(self._tensors(trainer, tensors_before(facts)))
        if facts.shape.num_layers - 1 in layers:
            blocks.append(self._tensors(trainer, tensors_behind(facts)))
        total = Held(Counter(), Counter())
        for block in blocks:
            total.parts.update(block.parts)
            total.base_bytes.update(block.base_bytes)
        sums = (sum(getattr(b, key) for b in blocks) for key in ("adapters", "trained", "tensors"))
        packed = frozenset().union(*(block.packed for block in blocks))
        return Held(total.parts, total.base_bytes, packed, *sums)

    def _layer(self, trainer: TrainerConfig, layer: int) -> Held:
        key = (layer, trainer.tp, trainer.ep, trainer.etp, trainer.device)
        if key not in self._held:
            base = self._tensors(trainer, tensors_of_layer(self.facts, layer))
            layout = _layout(trainer)
            sizes = adapter_sizes(self.spec, layout, layer)
            self._held[key] = replace(base, adapters=sizes[0], trained=sizes[1], tensors=sizes[2])
        return self._held[key]

    def _tensors(self, trainer: TrainerConfig, tensors: Iterable[BaseTensor]) -> Held:
        layout, held, packed = _layout(trainer), Held(Counter(), Counter()), set()
        for tensor in tensors:
            if not tensor.buffer:
                box = tensor.local(layout)
                held.parts[tensor.part] += box.size
                for form in self.formats:
                    held.base_bytes[form] += trainer_bytes(tensor, box.shape, form, trainer)
                if packed_in_trainer(tensor, box.shape, self.weights, trainer):
                    packed.add(box.shape)
        return replace(held, packed=frozenset(packed))

    def _moving(
        self, config: RunConfig, stage: int, layers: list[int]
    ) -> tuple[dict[str, int], int]:
        """What lives within a step: activations of the micro-batches in flight, the work of one
        layer, buffers of collectives, logits; and what is on the host."""
        trainer, shape, b = config.trainer, self.facts.shape, itemsize(self.weights)
        tokens = math.ceil(micro_batch_tokens(config) / trainer.cp)
        kinds = Counter(self.kind[layer] for layer in layers)
        built_of = trainer, b, self.modules or modules_of(trainer)
        full = {k: sum(kept_by_layer(self.facts, self.spec, k, *built_of).values()) for k in kinds}
        kept, work = full, layer_work(shape, trainer, b)
        if trainer.recompute == "full":
            kept = dict.fromkeys(full, kept_when_recomputed(shape, trainer.tp, b))
            work += max(full.values())
        flights = in_flight(trainer, stage, micro_batches(config))
        activations = tokens * flights * sum(kept[kind] * n for kind, n in kinds.items())
        on_host = 0
        if trainer.offloads_activations:  # the device has those of two layers at once
            on_host, here = activations, min(2, len(layers)) * max(kept.values())
            activations = min(activations, tokens * here)
        logits = 0
        if shape.num_layers - 1 in layers:
            own = algorithms.make(config)
            trained = own.trains_entropy, own.divergence is not None
            logits = head(shape, trainer.tp, tokens, b, *trained)
        moving = {
            "activations": int(activations),
            "one layer's work": int(tokens * work),
            "communication": int(tokens * communication(shape, trainer, b)),
            "logits": logits,
        }
        return moving, int(on_host)


def _figures(c: RankClass) -> tuple:
    return tuple(c.memory.items()), c.parts, c.adapter_parameters


def _layout(trainer: TrainerConfig) -> RankLayout:
    """The layout of the first rank of any stage: the others hold as much."""
    experts = trainer.etp * trainer.ep
    return RankLayout(
        tp=(0, trainer.tp),
        dp=(0, trainer.dense_dp),
        etp=(0, trainer.etp),
        ep=(0, trainer.ep),
        expert_dp=(0, trainer.stage_ranks // experts),
    )


def stage_layers(trainer: TrainerConfig, num_layers: int) -> list[list[int]]:
    """Global layers of each pipeline stage."""
    chunks = pipeline_chunks(num_layers, trainer.pp * trainer.vpp)
    ends = list(accumulate(chunks))
    spans = [range(end - size, end) for end, size in zip(ends, chunks, strict=True)]
    return [[i for span in spans[stage :: trainer.pp] for i in span] for stage in range(trainer.pp)]


def micro_batch_tokens(config: RunConfig) -> int:
    """The most tokens of one micro-batch: a longer sample has one of its own."""
    return max(config.trainer.micro_batch_tokens, config.model.max_length)


def micro_batches(config: RunConfig, sample_tokens: int | None = None) -> int:
    """Micro-batches of one rank and optimizer step, with samples of `sample_tokens` (by default the
    longest)."""
    algorithm, trainer = config.algorithm, config.trainer
    samples = algorithm.prompts_per_step * algorithm.group_size // algorithm.mini_batches
    tokens = samples * (sample_tokens or config.model.max_length)
    return max(1, math.ceil(tokens / (micro_batch_tokens(config) * trainer.dp)))


def in_flight(trainer: TrainerConfig, stage: int, num_micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, in whole stages: as Megatron's
    schedules warm up (1F1B; interleaved with virtual stages)."""
    if trainer.vpp == 1:
        return min(trainer.pp - stage, num_micro_batches)
    warm = 2 * (trainer.pp - stage - 1) + (trainer.vpp - 1) * trainer.pp + 1
    return min(warm, num_micro_batches * trainer.vpp) / trainer.vpp


def adapter_sizes(spec: AdapterSpec, layout: RankLayout, layer: int) -> tuple[int, int, int]:
    """(elements held, those trained, parameter tensors) of a rank's adapters of one layer.

    Tensors as `adapters/layers.py` holds them: the sites fused in one linear share an A, and each
    has its B.
    """
    whole = trained = 0
    mine = [site for site in spec if site.layer == layer]
    for site in mine:
        for matrix in "AB":
            size = sum(box.size for box in layout.boxes(site, matrix))
            whole += size
            trained += size // site.rank * site.trained_rank
    linears = {_linear(site.module, spec) for site in mine}
    return whole, trained, len(mine) + len(linears)


def _linear(module: str, spec: AdapterSpec) -> str:
    block, _, part = module.rpartition(".")
    if part in ("gate", "up"):
        return f"{block}.fc1"
    if spec.shape.family.attention != "mla" and part in ("q_proj", "k_proj", "v_proj"):
        return "qkv"
    return "in_proj" if part.startswith("in_proj") else module
