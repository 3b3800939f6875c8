"""What a run is: one typed, frozen config. Importing this file imports no torch.

Every default stands here and nowhere else. An unknown key is an error; an option that does not
apply to the chosen mode is an error that names both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from lora_moe_rl.config.plugins import ALGORITHMS, ENVIRONMENTS, TRACKERS, Kind
from lora_moe_rl.refit.transports import transport_names
from lora_moe_rl.rollout.facts import SLOT_RANKS


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


class ModelConfig(Section):
    path: str = Field(
        "qwen3_moe",
        description="Hugging Face directory or hub name, or the tiny qwen3_moe or deepseek_v3.",
    )
    max_length: int = Field(512, ge=2, description="Longest prompt plus response, in tokens.")


class AdapterConfig(Section):
    rank: int = Field(16, ge=1, description="Rank of every adapter outside the routed experts.")
    expert_rank: int | None = Field(
        None, ge=1, description="Rank of each routed expert's adapters; null: the same as rank."
    )
    expert_rank_over_top_k: bool = Field(
        False, description="Rank of each routed expert's adapters: rank // (experts a token)."
    )
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(
        {},
        description='Other ranks for some modules and layers: {"experts.*": 8, '
        '"layers.0-3.q_proj": 32}; of those that match the last counts.',
    )
    alpha: float = Field(
        32.0, gt=0, description="LoRA alpha: the update is scaled by alpha / rank."
    )
    expert_alpha: float | None = Field(
        None, gt=0, description="Alpha of the routed experts' adapters; null: the same as alpha."
    )
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="Other alphas for some modules and layers, as rank_pattern."
    )
    rslora: bool = Field(False, description="Scale by alpha / sqrt(rank) instead of alpha / rank.")
    expert_layout: Literal["per_expert", "shared_outer"] = Field(
        "per_expert",
        description="Adapters of routed experts: A and B for each, or with A of gate and up and B "
        "of down shared by all experts of a layer.",
    )
    init: Literal["kaiming", "olora"] = Field(
        "kaiming",
        description="Start: A random and B zero, or both from the base weight's QR (OLoRA; served "
        "and exported with twice the rank, the base weights stay as they are).",
    )
    init_from: str | None = Field(
        None,
        description="Start from this adapter: a PEFT directory, a run or a checkpoint. A resumed "
        "run goes on from its own checkpoint.",
    )
    resize: bool = Field(
        False,
        description="Let a resumed run, or one with init_from, change ranks and alphas by an SVD "
        "of B A; Adam begins anew for what changed.",
    )
    targets: tuple[str, ...] = Field(
        ("*",),
        description="Modules to adapt, as names or patterns (q_proj, experts.*, shared_expert.up); "
        "'*' is everything the architecture has that vLLM can serve.",
    )

    @model_validator(mode="after")
    def _servable(self):
        ranks = {"rank": self.rank, "expert_rank": self.expert_rank or self.rank}
        ranks |= {f"rank_pattern[{key!r}]": rank for key, rank in self.rank_pattern.items()}
        largest, times = SLOT_RANKS[-1], 2 if self.init == "olora" else 1
        for key, rank in ranks.items():
            if rank * times > largest:
                twice = f" with adapter.init=olora, which serves {2 * rank}," if times == 2 else ""
                raise ValueError(
                    f"adapter.{key}={rank}{twice} is not a rank vLLM can serve: its largest "
                    f"adapter slot is {largest}; use a rank from 1 to {largest // times}"
                )
        if not self.targets:
            raise ValueError("adapter.targets is empty: nothing would be trained; use '*' for all")
        return self

    @model_validator(mode="after")
    def _together(self):
        if self.expert_rank_over_top_k and self.expert_rank is not None:
            raise ValueError(
                f"adapter.expert_rank={self.expert_rank} and adapter.expert_rank_over_top_k=true "
                f"both set the rank of experts; set one of them"
            )
        if self.init_from is not None and self.init == "olora":
            raise ValueError(
                f"adapter.init_from={self.init_from} and adapter.init=olora both say where the "
                f"adapter starts; set one of them"
            )
        if self.expert_layout == "shared_outer" and self.init == "olora":
            raise ValueError(
                "adapter.init=olora starts each expert from its own weight, which "
                "adapter.expert_layout=shared_outer cannot hold; use per_expert or kaiming"
            )
        return self


class TrainerConfig(Section):
    steps: int = Field(40, ge=1, description="Rollout-and-update steps of the run.")
    world_size: int = Field(1, ge=1, description="Megatron ranks: tp * pp * (data parallel size).")
    tp: int = Field(1, ge=1, description="Tensor-parallel size.")
    pp: int = Field(1, ge=1, description="Pipeline-parallel size.")
    vpp: int = Field(
        1, ge=1, description="Virtual pipeline: pieces of the model that each pipeline rank holds."
    )
    ep: int = Field(1, ge=1, description="Expert-parallel size; divides tp * (data parallel size).")
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
    gpus_per_rank: float = Field(
        1.0, gt=0, le=1, description="Share of a GPU one rank holds (Ray)."
    )
    lr: float = Field(1e-4, gt=0, description="Peak learning rate of Adam.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up to lr.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of the adapters.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Adam beta1.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="Adam beta2.")
    adam_eps: float = Field(1e-8, gt=0, description="Adam epsilon.")
    clip_grad: float = Field(
        1.0, ge=0, description="Clip the global gradient norm to this; 0: never."
    )
    micro_batch_tokens: int = Field(
        4096, ge=1, description="Most tokens packed into one micro-batch of one rank."
    )
    recompute: Literal["none", "full"] = Field(
        "none",
        description="Activations of a layer: kept for backward (none), or computed again (full).",
    )
    max_skipped_steps: int = Field(
        3, ge=1, description="Stop after this many optimizer steps in a row with NaN or inf."
    )

    @model_validator(mode="after")
    def _layout(self):
        model_parallel = self.tp * self.pp
        if self.world_size % model_parallel:
            raise ValueError(
                f"trainer.world_size={self.world_size} does not match the layout: it must be a "
                f"multiple of tp * pp = {self.tp} * {self.pp} = {model_parallel}"
            )
        if (self.tp * self.dp) % (self.ep * self.etp):
            experts = f"trainer.ep={self.ep}"
            if self.etp > 1:
                experts += f" * trainer.etp={self.etp}"
            raise ValueError(
                f"{experts} does not divide the {self.tp * self.dp} ranks of a pipeline "
                f"stage (tp={self.tp} * dp={self.dp} with world_size={self.world_size}); raise "
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
        return self

    @property
    def dp(self) -> int:
        """Data-parallel size: ranks that see different samples."""
        return self.world_size // (self.tp * self.pp)


class RolloutConfig(Section):
    engines: int = Field(1, ge=1, description="vLLM engine replicas.")
    tp: int = Field(1, ge=1, description="Tensor-parallel size of each engine.")
    ep: bool = Field(
        False,
        description="Give each of an engine's tp ranks a share of the experts, not of each expert.",
    )
    fully_sharded: bool = Field(
        False,
        description="Cut adapters over an engine's tp ranks along the rank too (vLLM's "
        "fully_sharded_loras): less memory, more communication.",
    )
    max_response_tokens: int = Field(8, ge=1, description="Longest response, in tokens.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the loss uses it too.")
    stop_token_ids: tuple[int, ...] = Field(
        (), description="Token ids that end a response, besides the model's own end of sequence."
    )
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1, description="vLLM's share of a GPU.")
    gpus_per_engine: float | None = Field(
        None, gt=0, description="GPUs Ray reserves for an engine; null: rollout.tp on cuda, else 0."
    )
    cpu_kv_cache_gib: float = Field(0.25, gt=0, description="KV cache of a CPU engine, in GiB.")
    cpu_threads: int = Field(1, ge=1, description="Threads of each worker of a CPU engine.")
    max_num_seqs: int = Field(256, ge=1, description="Most sequences an engine decodes at once.")
    prefix_caching: bool = Field(True, description="Reuse the KV cache of equal prompt prefixes.")
    start_timeout_s: float = Field(600, gt=0, description="Longest wait for an engine to start.")
    max_restarts: int = Field(
        2, ge=0,
        description="How often a run starts engines anew whose processes have died; 0: never.",
    )  # fmt: skip

    @model_validator(mode="after")
    def _one_cut(self):
        if self.ep and self.fully_sharded:
            raise ValueError(
                "rollout.ep=true and rollout.fully_sharded=true are both set: vLLM cuts adapters "
                "of experts over the tp ranks either by expert or by rank; choose one"
            )
        return self


class RefitConfig(Section):
    mode: Literal["adapter", "merged"] = Field(
        "adapter",
        description="What engines serve: adapters in slots, or base weights with the adapter "
        "merged in, for what vLLM cannot serve as an adapter (kv_b_proj).",
    )
    transport: str = Field(
        "auto",
        description="How adapters travel: by shared memory (shm), by torch.distributed "
        "(distributed), or through refit.directory (directory); auto: shm when trainer and engines "
        "are on one machine, else distributed.",
    )
    directory: str | None = Field(
        None,
        description="Of transport directory: a path that is the same for trainer and engines.",
    )
    slots: int = Field(
        2, ge=1,
        description="Adapter slots of an engine: versions alive at once. With 1, a refit waits for "
        "the requests of the old version.",
    )  # fmt: skip
    proof_prompts: int = Field(2, ge=1, description="Probe prompts compared at each refit.")
    proof_tolerance: float | None = Field(
        None, gt=0,
        description="Largest |logprob difference| between trainer and engine on the probe; null: "
        "1e-4 in float32, 0.15 in bfloat16.",
    )  # fmt: skip
    timeout_s: float = Field(
        300, gt=0, description="Longest wait for a free slot, and for one refit."
    )

    @field_validator("transport")
    @classmethod
    def _known_transport(cls, value: str) -> str:
        if value not in (known := ("auto", *transport_names())):
            raise ValueError(f"refit.transport={value!r} is not one of {', '.join(known)}")
        return value

    @model_validator(mode="after")
    def _directory(self):
        if self.transport == "directory" and self.directory is None:
            raise ValueError(
                "refit.transport=directory needs refit.directory: a path that trainer and engines "
                "share"
            )
        if self.directory is not None and not Path(self.directory).is_absolute():
            raise ValueError(
                f"refit.directory={self.directory} is relative, and trainer and engines may run in "
                "different places; give it from the root"
            )
        return self


class ReplayConfig(Section):
    mode: Literal["off", "r2", "r3"] = Field(
        "r3",
        description="Router decisions in the trainer: its own (off), those of its old-logprob pass "
        "(r2), or those of the rollout (r3).",
    )
    missing: Literal["error", "mask", "route"] = Field(
        "error",
        description="What r3 does with a token without recorded routes: stop, mask it out of the "
        "loss, or let the trainer route it.",
    )
    audit: int = Field(
        10, ge=0,
        description="Steps from one comparison of the routes that were used, read back from the "
        "token dispatchers, with those recorded to the next; 0: none.",
    )  # fmt: skip
    audit_samples: int = Field(4, ge=1, description="Samples compared in an audited step.")
    compare_every: int = Field(
        0, ge=0,
        description="Steps from one forward without replay, for mismatch/without_replay/*, to the "
        "next; 0: none.",
    )  # fmt: skip


class AlgorithmConfig(Section):
    """What all algorithms have; each adds settings of its own (`algorithms/`)."""

    name: str = Field(
        "grpo", description="The algorithm: a file of algorithms/, or a class as file.py:Class."
    )
    prompts_per_step: int = Field(16, ge=1, description="Prompts of one step.")
    group_size: int = Field(8, ge=2, description="Samples of each prompt.")
    epochs: int = Field(1, ge=1, description="Passes over the samples of a step.")
    mini_batches: int = Field(1, ge=1, description="Optimizer steps of one pass.")
    mask_truncated: bool = Field(
        False, description="Leave samples that hit the length limit out of the loss."
    )

    @property
    def on_policy(self) -> bool:
        """True when each step makes one update: the ratio is 1 and needs no old-logprob pass."""
        return self.epochs == 1 and self.mini_batches == 1


class EnvironmentConfig(Section):
    """What all environments have; each adds settings of its own (`environments/`)."""

    name: str = Field(
        "single_turn",
        description="How a prompt becomes samples: a file of environments/, or file.py:Class.",
    )


class DataConfig(Section):
    path: str | None = Field(None, description="JSONL or parquet file, or a hub data set name.")
    subset: str | None = Field(
        None, description="Configuration of a hub data set that has several (GSM8K: main)."
    )
    split: str = Field("train", description="Split of a hub data set.")
    generator: str | None = Field(
        None,
        description="'module:function' or 'file.py:function' that yields rows (dicts with a "
        "prompt), for ever or not.",
    )
    prompt_key: str | None = Field(
        None, description="Column of the prompt; null: the only one of prompt, messages, question."
    )
    answer_key: str | None = Field(
        None, description="Column given to rewards as `answer`; null: the only one of answer, "
        "solution, label, ground_truth, if any.",
    )  # fmt: skip
    chat_template: bool = Field(
        False, description="Apply the tokenizer's chat template to string prompts too."
    )
    shuffle: bool = Field(True, description="Shuffle the rows anew in each epoch (by seed).")
    limit: int | None = Field(None, ge=1, description="Use only the first rows.")


class RewardConfig(Section):
    function: str | None = Field(
        None, description="'module:function' or 'file.py:function', called in TRL's style."
    )
    timeout_s: float = Field(60, gt=0, description="Longest time for the rewards of one prompt.")
    max_failed: float = Field(
        0.5, ge=0, le=1, description="Stop when more than this share of a step's rewards failed."
    )


class CheckpointConfig(Section):
    every: int = Field(10, ge=0, description="Steps between checkpoints; 0: only the last step's.")
    keep: int = Field(2, ge=2, description="Newest checkpoints kept.")


class TrackerConfig(Section):
    """What all trackers have; each adds settings of its own (`telemetry/trackers/`)."""

    name: str = Field(
        "none",
        description="Where metrics go beside metrics.jsonl: a file of telemetry/trackers/, or "
        "file.py:Class.",
    )


class LoggingConfig(Section):
    run_dir: str | None = Field(
        None, description="Where the run writes; null: runs/<recipe>-<model>."
    )
    samples_per_step: int = Field(4, ge=0, description="Samples written to samples.jsonl a step.")
    progress: bool = Field(True, description="Show progress bars on a terminal.")


def _settings_of(kind: Kind, common: type[Section], value: Any) -> Any:
    """`value` as settings of the plug-in that it names; `NAME` is short for `{name: NAME}`."""
    if isinstance(value, str):
        value = {"name": value}
    if type(value) is common:
        value = value.model_dump(exclude_unset=True)
    if not isinstance(value, dict):
        return value
    name = value.get("name", common.model_fields["name"].default)
    if not isinstance(name, str):
        raise ValueError(f"{kind.key}={name!r} is not a name")
    settings = kind.find(name).Settings
    for key in value.keys() - settings.model_fields.keys():
        others = [n for n in kind.names() if key in kind.find(n).Settings.model_fields]
        if others:
            section = kind.key.removesuffix(".name")
            raise ValueError(
                f"{section}.{key}={value[key]} is no setting of {kind.key}={name}: it is one of "
                f"{', '.join(others)}"
            )
    return settings.model_validate(value)


class RunConfig(Section):
    """One run. Recipes build it, the command line overrides it, the run directory keeps it."""

    name: str = Field("run", description="Name of the run.", pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(0, ge=0, description="Seed of adapters, data order and sampling.")
    model: ModelConfig = Field(ModelConfig(), description="The frozen base model.")
    adapter: AdapterConfig = Field(AdapterConfig(), description="What is trained.")
    trainer: TrainerConfig = Field(TrainerConfig(), description="Megatron-core.")
    rollout: RolloutConfig = Field(RolloutConfig(), description="vLLM.")
    refit: RefitConfig = Field(RefitConfig(), description="Moving adapters into vLLM.")
    replay: ReplayConfig = Field(ReplayConfig(), description="Router replay.")
    algorithm: SerializeAsAny[AlgorithmConfig] = Field(
        AlgorithmConfig(), description="The RL algorithm."
    )
    environment: SerializeAsAny[EnvironmentConfig] = Field(
        EnvironmentConfig(), description="How prompts become samples."
    )
    data: DataConfig = Field(DataConfig(), description="Prompts.")
    reward: RewardConfig = Field(RewardConfig(), description="Rewards.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Checkpoints.")
    logging: LoggingConfig = Field(LoggingConfig(), description="Run directory and console.")
    tracker: SerializeAsAny[TrackerConfig] = Field(TrackerConfig(), description="A tracker.")

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_name(cls, value: Any) -> Any:
        """`model=NAME` is short for `model.path=NAME`."""
        return {"path": value} if isinstance(value, str) else value

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm_settings(cls, value: Any) -> Any:
        return _settings_of(ALGORITHMS, AlgorithmConfig, value)

    @field_validator("environment", mode="before")
    @classmethod
    def _environment_settings(cls, value: Any) -> Any:
        return _settings_of(ENVIRONMENTS, EnvironmentConfig, value)

    @field_validator("tracker", mode="before")
    @classmethod
    def _tracker_settings(cls, value: Any) -> Any:
        return _settings_of(TRACKERS, TrackerConfig, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """By value: the settings of one's own algorithm are of a class that no other process can
        import by its module's name."""
        return RunConfig.model_validate, (self.model_dump(exclude_unset=True),)

    @model_validator(mode="after")
    def _together(self):
        if self.rollout.max_response_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_response_tokens={self.rollout.max_response_tokens} leaves no room "
                f"for a prompt within model.max_length={self.model.max_length}"
            )
        if self.algorithm.prompts_per_step % self.algorithm.mini_batches:
            raise ValueError(
                f"algorithm.mini_batches={self.algorithm.mini_batches} does not divide "
                f"algorithm.prompts_per_step={self.algorithm.prompts_per_step}"
            )
        return self

    @property
    def max_prompt_tokens(self) -> int:
        return self.model.max_length - self.rollout.max_response_tokens

    @property
    def run_dir(self) -> Path:
        model = Path(self.model.path).name
        return Path(self.logging.run_dir or f"runs/{self.name}-{model}")
