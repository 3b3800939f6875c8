"""The sections `rollout`, `refit`, `replay` and `mismatch`: vLLM, what goes to it and what comes
from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from lora_moe_rl.config.section import LONGEST_WAIT_S, Section
from lora_moe_rl.refit.transports import transport_names
from lora_moe_rl.rollout.facts import LOWEST_TEMPERATURE


class RolloutConfig(Section):
    engines: int = Field(1, ge=1, description="vLLM engine replicas.")
    least_engines: int | None = Field(
        None, ge=1,
        description="Fewest engines with which a run starts and goes on: the others join when "
        "there is room, and leave when they die too often. null: rollout.engines.",
    )  # fmt: skip
    tp: int = Field(1, ge=1, description="Tensor-parallel size of each engine.")
    dp: int = Field(
        1, ge=1,
        description="Data-parallel size of each engine: ranks that have all but the experts, "
        "requests and a KV cache of their own, on as many nodes as it takes. With rollout.ep=true "
        "the experts are spread over them, which they must be.",
    )  # fmt: skip
    nodes: int = Field(
        1, ge=1,
        description="Nodes that each engine stands on: rollout.dp is cut over them evenly.",
    )  # fmt: skip
    ep: bool = Field(
        False,
        description="Give each of an engine's ranks a share of the experts, not of each expert.",
    )
    fully_sharded: bool = Field(
        False,
        description="Cut adapters over an engine's tp ranks along the rank too (vLLM's "
        "fully_sharded_loras): less memory, more communication.",
    )
    max_response_tokens: int = Field(8, ge=1, description="Longest response, in tokens.")
    temperature: float = Field(
        1.0, description="Sampling temperature, at least 0.01; the loss uses it too."
    )
    stop_token_ids: tuple[int, ...] = Field(
        (), description="Token ids that end a response, besides the model's own end of sequence."
    )
    stop: tuple[str, ...] = Field(
        (),
        description="Texts that end a response; the tokens that complete one stay whole, in the "
        "sample and in the loss.",
    )
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1, description="vLLM's share of a GPU.")
    gpus_per_engine: float | None = Field(
        None, gt=0, description="GPUs Ray reserves for an engine; null: one a rank on cuda, else 0."
    )
    cpu_kv_cache_gib: float = Field(0.25, gt=0, description="KV cache of a CPU engine, in GiB.")
    cpu_threads: int = Field(1, ge=1, description="Threads of each worker of a CPU engine.")
    max_num_seqs: int = Field(256, ge=1, description="Most sequences an engine decodes at once.")
    prefix_caching: bool = Field(True, description="Reuse the KV cache of equal prompt prefixes.")
    enforce_eager: bool = Field(
        False,
        description="Run vLLM's model without torch.compile and CUDA graphs: slower, and a way out "
        "where an engine does not start with them. vLLM's CPU build never has any.",
    )
    engine_args: dict[str, Any] = Field(
        {},
        description="Further arguments of vLLM's engine, handed on as they stand: "
        "rollout.engine_args.kv_cache_dtype=fp8. Those that a key here sets are refused.",
    )
    start_timeout_s: float = Field(
        600, gt=0, le=LONGEST_WAIT_S, description="Longest wait for an engine to start."
    )
    max_restarts: int = Field(
        2, ge=0,
        description="How often a run starts engines anew whose processes have died; 0: never.",
    )  # fmt: skip
    silent_s: float = Field(
        300, gt=0, le=LONGEST_WAIT_S,
        description="Longest time in which an engine that has requests may finish none and give "
        "none a token; one that is silent for longer is started anew.",
    )  # fmt: skip
    max_silences: int = Field(
        2, ge=0, description="How often a run starts engines anew that are silent; 0: never."
    )

    @field_validator("temperature")
    @classmethod
    def _as_sampled(cls, value: float) -> float:
        if value < LOWEST_TEMPERATURE:
            raise ValueError(
                f"rollout.temperature={value:g} is not what vLLM would sample with (it raises what "
                f"is between 0 and {LOWEST_TEMPERATURE} to {LOWEST_TEMPERATURE}, and at 0 takes "
                f"the likeliest token), so that the loss would be of another distribution; use "
                f"{LOWEST_TEMPERATURE} or more"
            )
        return value

    @field_validator("stop")
    @classmethod
    def _some_text(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError(
                f"rollout.stop={json.dumps(value)} has an empty text in it, with which every "
                "response ends; take it out"
            )
        return value

    @model_validator(mode="after")
    def _bounds(self):
        if self.least_engines is not None and self.least_engines > self.engines:
            raise ValueError(
                f"rollout.least_engines={self.least_engines} is above rollout.engines="
                f"{self.engines}, which is the most"
            )
        return self

    @property
    def ranks(self) -> int:
        """Ranks of an engine."""
        return self.tp * self.dp

    @property
    def firm_engines(self) -> int:
        """Engines without which a run does not go on."""
        return self.engines if self.least_engines is None else self.least_engines

    @model_validator(mode="after")
    def _one_cut(self):
        if self.ep and self.fully_sharded:
            raise ValueError(
                "rollout.ep=true and rollout.fully_sharded=true are both set: vLLM cuts adapters "
                "of experts over the tp ranks either by expert or by rank; choose one"
            )
        if self.dp % self.nodes:
            raise ValueError(
                f"rollout.nodes={self.nodes} does not divide rollout.dp={self.dp}, whose ranks are "
                "cut over an engine's nodes evenly; use a divisor of it"
            )
        if self.dp > 1 and not self.ep:
            raise ValueError(
                f"rollout.dp={self.dp} without rollout.ep=true would cut each expert over an "
                "engine's data-parallel ranks, which nothing here serves; set rollout.ep=true, or "
                f"take rollout.engines={self.engines * self.dp} of rollout.dp=1"
            )
        if self.dp > 1 and self.tp > 1:
            raise ValueError(
                f"rollout.dp={self.dp} and rollout.tp={self.tp} are both above 1: vLLM serves no "
                "adapters of experts there (`vllm/lora/layers/fused_moe.py`, _ep_check); use "
                f"rollout.dp={self.dp * self.tp} with rollout.tp=1"
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
        description="How adapters travel: by shared memory (shm), from GPU to GPU of one machine "
        "(cuda_ipc), from GPU to GPU by RDMA, NVLink or TCP (nixl), by torch.distributed "
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
        "the requests of the old version, and if it fails nothing is served.",
    )  # fmt: skip
    proof_prompts: int = Field(
        2, ge=1,
        description="Prompts that every refit is proven on, and pieces of the step's samples "
        "beside them, other ones each step.",
    )  # fmt: skip
    proof_tolerance: float | None = Field(
        None, gt=0,
        description="Largest |logprob difference| between trainer and engine on the probe, of a "
        "logprob below -1 times its size; null: 1e-4 in float32, 0.15 in bfloat16 and "
        "with trainer.fp8_forward=engine, where a token beyond has what engines hold compared.",
    )  # fmt: skip
    compare_every: int = Field(
        50, ge=0,
        description="Versions from one comparison of what engines hold with what they were sent to "
        "the next, beside those at the start, after a restart, and where the proof cannot tell "
        "two versions apart; 0: only those.",
    )  # fmt: skip
    timeout_s: float = Field(
        300, gt=0, le=LONGEST_WAIT_S, description="Longest wait for a free slot, and for one refit."
    )
    rounding: Literal["stochastic", "nearest"] = Field(
        "stochastic",
        description="How merged weights are rounded to bfloat16: stochastic keeps small changes in "
        "the mean (seeded by run, version and weight), nearest loses them.",
    )
    warn_lost: float = Field(
        0.1, gt=0,
        description="Warn when refit/lost, the share of a merged version's change that rounding "
        "takes away, is above this.",
    )  # fmt: skip
    stop_lost: float = Field(0.9, gt=0, description="Stop when refit/lost is above this.")

    @field_validator("transport")
    @classmethod
    def _known_transport(cls, value: str) -> str:
        if value not in (known := ("auto", *transport_names())):
            raise ValueError(f"refit.transport={value!r} is not one of {', '.join(known)}")
        return value

    @model_validator(mode="after")
    def _warned_first(self):
        if self.warn_lost > self.stop_lost:
            raise ValueError(
                f"refit.warn_lost={self.warn_lost:g} is above refit.stop_lost={self.stop_lost:g}: "
                "no version would be warned of"
            )
        return self

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


class MismatchConfig(Section):
    stop_above: float | None = Field(
        None, gt=0,
        description="Stop when a step's mismatch/kl is above this; null: 0.1 when the trainer is "
        "in bfloat16 or has fp8_forward=engine; in float32 1e-7 with every route replayed, else "
        "1e-4. With schedule.lag, that of tokens of the current version.",
    )  # fmt: skip
    stop_above_old: float = Field(
        0.5, gt=0,
        description="With schedule.lag, stop when the mismatch/kl of the tokens of any age but 0 "
        "is above this: there the training of the steps between is part of it.",
    )  # fmt: skip
