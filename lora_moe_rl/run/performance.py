"""What a step's time was used for, in figures: tokens a second, and the operations of the model;
and the memory that was planned for it.

Operations are those that the step needs, with LoRA counted right (docs/metrics.md, Performance):
the frozen base has a forward and the gradient of its inputs, and no gradient of its weights. What
is computed twice (recomputation, tokens that are fed again) is not counted twice, and a prompt that
is computed once for several samples counts once, but for its attention.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Sample
from lora_moe_rl.planner.compute import attention_of, flops
from lora_moe_rl.planner.facts import Facts, find
from lora_moe_rl.planner.hardware import GIB, GPUS
from lora_moe_rl.planner.trainer import TrainerMemory
from lora_moe_rl.rollout.facts import Dtype
from lora_moe_rl.run.machine import gpu_names
from lora_moe_rl.telemetry import names


class Performance:
    """What one run's work is measured by. `active` and `adapter`: parameters of base and adapters
    that multiply a token; `attention`: operations of a forward, a token and token of its context.
    `peak`: operations a second of one of the GPUs, None where that is not known. `planned`: GiB of
    tensors of the trainer rank that holds most, None off GPUs, where other things take more."""

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        facts: Facts,
        peak: float | None = None,
        planned: float | None = None,
    ):
        self.config, self.wanted = config, algorithms.passes(config)
        self.from_start = algorithms.make(config).from_start
        self.peak, self.planned = peak, planned
        one = flops(facts, spec, 0, "none")
        self.active, self.adapter, self.attention = one.active, one.adapter, attention_of(facts)

    @classmethod
    def of_model(
        cls, config: RunConfig, spec: AdapterSpec, model_dir: Path, dtype: Dtype
    ) -> Performance:
        """The figures of the model in a Hugging Face directory, trained in `dtype` on GPUs such as
        this machine's. Raises ModelError for a model that the planner cannot read."""
        gpus = gpu_names() if config.trainer.device != "cpu" else []
        peaks = {peak_of(name) for name in gpus} if dtype == "bfloat16" else set()
        peak, facts = peaks.pop() if len(peaks) == 1 else None, find(str(model_dir))
        planned = planned_gib(config, spec, facts, dtype) if gpus else None
        return cls(config, spec, facts, peak, planned)

    def operations(self, lengths: Sequence[int], shared: float = 0.0) -> float:
        """The operations of the update of a step whose samples have these lengths, prompt included,
        of which a share is computed for another sample. A token at place t attends to t others: n^2
        / 2 of a sample of n tokens."""
        tokens, contexts = sum(lengths) * (1 - shared), sum(n * n / 2 for n in lengths)
        base, adapter = 2 * tokens * self.active, 2 * tokens * self.adapter
        attention = self.attention * contexts
        forward = base + adapter + attention
        backward = base + 2 * adapter + 2 * attention
        train = self.config.algorithm.epochs * (forward + backward)
        total = train
        if "old" in self.wanted:
            total += forward
        if "reference" in self.wanted:  # of the base with adapters off
            total += forward if self.from_start else base + attention
        if "values" in self.wanted:  # a critic on the policy's base, with adapters of its own
            total += forward + train
        return total

    def of_step(
        self, samples: Sequence[Sample], train: float, step: float, shared: float = 0.0
    ) -> dict[str, float]:
        """`train` and `step`: seconds of the update and of the whole step. `shared`: the share of
        the samples' tokens that is computed for another one."""
        trainer, rollout = self.config.trainer, self.config.rollout
        lengths = [len(sample.token_ids) for sample in samples]
        ranks = trainer.world_size, self.config.num_engines * rollout.ranks
        gpus = max(ranks) if self.config.placement.colocated else sum(ranks)
        done = self.operations(lengths, shared) / trainer.world_size
        speed = done / max(train, 1e-9)
        found = {
            names.TOKENS_PER_GPU: sum(lengths) / max(step, 1e-9) / gpus,
            names.TFLOPS: speed / 1e12,
        }
        if self.planned is not None:
            found[names.MEMORY_PLANNED] = self.planned
        return found | ({names.MFU: speed / self.peak} if self.peak else {})


def planned_gib(config: RunConfig, spec: AdapterSpec, facts: Facts, dtype: Dtype) -> float:
    """GiB of tensors of the trainer rank that holds most, by `lora-moe-rl plan`."""
    classes = TrainerMemory(facts, spec, "bf16" if dtype == "bfloat16" else "float32")
    return max(one.tensors for one in classes.classes(config)) / GIB


def peak_of(name: str) -> float | None:
    """Dense bfloat16 operations a second of a GPU by nvidia-smi's name for it; None for one that
    the planner does not know, and for PCIe and NVL boards, which are slower than their name."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    if {"pcie", "nvl"} & set(words):
        return None
    return next((GPUS[word].flops for word in words if word in GPUS), None)
