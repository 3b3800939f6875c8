"""The section `adapter`: what is trained."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lora_moe_rl.config.section import Section
from lora_moe_rl.rollout.facts import SLOT_RANKS


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
    init: Literal["kaiming", "olora", "olora_tail", "pissa", "milora"] = Field(
        "kaiming",
        description="Start: A random and B zero, or both from each base weight: its QR (OLoRA), "
        "its smallest singular vectors (OLoRA-tail), its largest or smallest singular values and "
        "vectors (PiSSA, MiLoRA). Those are served and exported with twice the rank, and the base "
        "weights stay as they are.",
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

    @property
    def starts_from_base(self) -> bool:
        """Whether A and B begin at a part of each base weight, which is taken off again by as many
        frozen ranks."""
        return self.init != "kaiming"

    @model_validator(mode="after")
    def _servable(self):
        ranks = {"rank": self.rank, "expert_rank": self.expert_rank or self.rank}
        ranks |= {f"rank_pattern[{key!r}]": rank for key, rank in self.rank_pattern.items()}
        largest, times = SLOT_RANKS[-1], 2 if self.starts_from_base else 1
        for key, rank in ranks.items():
            if rank * times > largest:
                served = f" with adapter.init={self.init}, which serves {2 * rank},"
                twice = served if times == 2 else ""
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
        if self.init_from is not None and self.starts_from_base:
            raise ValueError(
                f"adapter.init_from={self.init_from} and adapter.init={self.init} both say where "
                f"the adapter starts; set one of them"
            )
        if self.expert_layout == "shared_outer" and self.starts_from_base:
            raise ValueError(
                f"adapter.init={self.init} starts each expert from its own weight, which "
                "adapter.expert_layout=shared_outer cannot hold; use per_expert or kaiming"
            )
        return self

    def absolute(self) -> dict[str, str]:
        """The settings that depend on the current directory, so that they no longer do."""
        if self.init_from is None:
            return {}
        return {"init_from": os.path.abspath(os.path.expanduser(self.init_from))}
