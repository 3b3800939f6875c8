"""The section `trainer`: Megatron-core."""

from __future__ import annotations

import math
from importlib.machinery import PathFinder
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lora_moe_rl.config.section import LONGEST_WAIT_S, Section
from lora_moe_rl.errors import ConfigError

MOST_RANKS = 65_536  # layouts of more would be planned for minutes
OFFLOAD_BYTES = 64 * 2**20  # of parameters whose moments are on the device at once (offload)


def has_transformer_engine() -> bool:
    """Whether the package is installed. Looks at the path, past `sys.modules`: where it is not,
    the trainer's bridge has put a stub of that name there."""
    return PathFinder.find_spec("transformer_engine") is not None


def check_context(trainer: TrainerConfig, transformer_engine: bool) -> None:
    """Raises ConfigError where layers of Transformer Engine would attend to slices of tokens that
    they take for others."""
    if trainer.cp > 1 and transformer_engine:
        raise ConfigError(
            f"trainer.cp={trainer.cp}: Transformer Engine, which is installed here, cuts the "
            "tokens of context parallelism in another way than the trainer; uninstall it (pip "
            "uninstall transformer_engine), or set trainer.cp=1"
        )


def check_gloo(trainer: TrainerConfig) -> None:
    """Raises ConfigError where ranks on CPUs would gather unequal numbers of tokens."""
    if trainer.ep > 1 and trainer.etp > 1:
        raise ConfigError(
            f"trainer.ep={trainer.ep} with trainer.etp={trainer.etp}: the ranks that share an "
            "expert gather tokens of unequal numbers, which torch.distributed's gloo, the way of "
            "ranks on CPUs, does not; set one of the two to 1, or train on GPUs"
        )


class TrainerConfig(Section):
    steps: int = Field(40, ge=1, description="Rollout-and-update steps of the run.")
    world_size: int = Field(
        1,
        ge=1,
        le=MOST_RANKS,
        description="Megatron ranks: tp * cp * pp * (data parallel size).",
    )
    tp: int = Field(1, ge=1, description="Tensor-parallel size.")
    pp: int = Field(1, ge=1, description="Pipeline-parallel size.")
    vpp: int = Field(
        1, ge=1, description="Virtual pipeline: pieces of the model that each pipeline rank holds."
    )
    cp: int = Field(
        1,
        ge=1,
        description="Context-parallel size: ranks that share a micro-batch's tokens, and in "
        "attention its heads (Ulysses).",
    )
    ep: int = Field(
        1, ge=1, description="Expert-parallel size; divides tp * cp * (data parallel size)."
    )
    etp: int = Field(
        1, ge=1, description="Expert-tensor-parallel size: ranks that share an expert; divides tp."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the trainer runs; auto: cuda when there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Dtype of the frozen base; auto: bfloat16 on cuda, float32 on the CPU."
    )
    lora_kernel: Literal["auto", "triton", "torch"] = Field(
        "auto", description="Kernels of the experts' adapters; auto: triton on cuda, else torch."
    )
    fp8_forward: Literal["dequantise", "engine"] = Field(
        "dequantise",
        description="What linears of an FP8 base read in the forward: activations as they are, or "
        "in 8 bits as the engine's kernels (engine); of other bases only the first.",
    )
    gpus_per_rank: float = Field(
        1.0, gt=0, le=1, description="Share of a GPU one rank holds (Ray)."
    )
    lr: float = Field(1e-4, gt=0, description="Peak learning rate of Adam.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up to lr.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="After the warm-up: lr stays, or falls to min_lr over the run."
    )
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of a schedule.")
    lr_ratio_B: float = Field(
        1.0, gt=0,
        description="Learning rate of the adapters' B over that of A (LoRA+, arXiv:2402.12354).",
    )  # fmt: skip
    lr_pattern: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {},
        description="Factors of the learning rate for some modules and layers, as "
        'adapter.rank_pattern: {"experts.*": 0.5}; 0 trains them not at all.',
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of the adapters.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Adam beta1.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="Adam beta2.")
    adam_eps: float = Field(1e-8, gt=0, description="Adam epsilon.")
    clip_grad: float = Field(
        1.0, ge=0, description="Clip the global gradient norm to this; 0: never."
    )
    micro_batch_tokens: int = Field(
        4096,
        ge=1,
        description="Most tokens packed into one micro-batch, which ranks of tp and cp share.",
    )
    share_prompts: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compute the prompt of several samples once in a micro-batch, where its tokens "
        "and routes are the same (on), or once a sample (off); auto: on, but for a GPU with "
        "Transformer Engine.",
    )
    recompute: Literal["none", "full"] = Field(
        "none",
        description="Activations of a layer: kept for backward (none), or computed again (full).",
    )
    offload: Literal["none", "optimizer", "activations", "both"] = Field(
        "none",
        description="Held in the host's memory (pinned, beside a GPU): nothing; Adam's moments "
        "(optimizer), which go through the device a few at a time in each step; activations of a "
        "layer from its forward to its backward (activations); or both.",
    )
    max_skipped_steps: int = Field(
        3,
        ge=1,
        description="Stop after this many steps in a row with NaN or inf, without any reward, "
        "without a token in the loss, or with a loss of 0 of every token by a correction or "
        "rejection.",
    )
    max_restarts: int = Field(
        2, ge=0,
        description="How often a run starts all its ranks anew because one has died or hangs; 0: "
        "never.",
    )  # fmt: skip
    start_timeout_s: float = Field(
        3600, gt=0, le=LONGEST_WAIT_S, description="Longest wait for the ranks to start."
    )
    timeout_s: float = Field(
        3600, gt=0, le=LONGEST_WAIT_S,
        description="Longest wait for an answer of the ranks, which may be a whole update; those "
        "that are silent for longer hang.",
    )  # fmt: skip
    max_copy_gib: float = Field(
        0.5, ge=0,
        description="Hold a copy of adapter and Adam's moments in memory (Ray's object store) "
        "after each step, if it is no larger than this, for ranks that are started anew. Without "
        "one they go on from a checkpoint of the step before, if there is one.",
    )  # fmt: skip

    @model_validator(mode="after")
    def _layout(self):
        if self.min_lr > self.lr:
            raise ValueError(
                f"trainer.min_lr={self.min_lr:g} is above trainer.lr={self.lr:g}, from which the "
                "learning rate falls to it"
            )
        together = {"tp": self.tp} | ({"cp": self.cp} if self.cp > 1 else {}) | {"pp": self.pp}
        if self.world_size % math.prod(together.values()):
            raise ValueError(
                f"trainer.world_size={self.world_size} does not match the layout: it must be a "
                f"multiple of {' * '.join(together)} = {' * '.join(map(str, together.values()))} = "
                f"{math.prod(together.values())}"
            )
        if self.stage_ranks % (self.ep * self.etp):
            experts = f"trainer.ep={self.ep}"
            if self.etp > 1:
                experts += f" * trainer.etp={self.etp}"
            cp = f"cp={self.cp} * " if self.cp > 1 else ""
            raise ValueError(
                f"{experts} does not divide the {self.stage_ranks} ranks of a pipeline "
                f"stage (tp={self.tp} * {cp}dp={self.dp} with world_size={self.world_size}); raise "
                f"trainer.world_size or lower trainer.ep"
            )
        if self.tp % self.etp:
            raise ValueError(
                f"trainer.etp={self.etp} does not divide trainer.tp={self.tp}: expert-tensor-"
                "parallel ranks gather each other's tokens and must hold equally many, as the "
                "ranks of one tp group do; raise trainer.tp or use trainer.ep"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"trainer.vpp={self.vpp} needs pipeline stages: trainer.pp is 1")
        if self.offloads_activations and self.recompute == "full":
            raise ValueError(
                f"trainer.offload={self.offload} moves activations, and trainer.recompute=full "
                "keeps none but layers' inputs; set trainer.recompute=none, or offload none"
            )
        return self

    @property
    def offloads_moments(self) -> bool:
        return self.offload in ("optimizer", "both")

    @property
    def offloads_activations(self) -> bool:
        return self.offload in ("activations", "both")

    @property
    def shares_prompts(self) -> bool:
        """Whether prompts are computed once. Transformer Engine's attention cannot."""
        if self.share_prompts == "auto":
            return self.device == "cpu" or not has_transformer_engine()
        return self.share_prompts == "on"

    @property
    def dp(self) -> int:
        """Data-parallel size: ranks that see different samples."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def dense_dp(self) -> int:
        """Ranks that hold the same part of a dense weight: each sees other samples, or other tokens
        of a sample."""
        return self.dp * self.cp

    @property
    def stage_ranks(self) -> int:
        return self.world_size // self.pp
