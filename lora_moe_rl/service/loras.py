"""What a client's LoRA is in the places of the service's adapter: ranks by site, and a scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.config import AdapterConfig, RunConfig
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service.backend import Lora
from lora_moe_rl.trainer.service_scale import factor_of

# Modules outside the attention, by how their canonical names begin.
MLP = ("mlp.", "experts.", "shared_expert")


@dataclass(frozen=True)
class Places:
    """The adapter of the service, whose ranks are the largest that a model can have."""

    config: RunConfig
    spec: AdapterSpec

    def check(self, lora: Lora) -> None:
        """Raises ServiceError for what no model here can be."""
        whole = self.config.adapter.rank
        if not 1 <= lora.rank <= whole:
            raise ServiceError(
                f"lora_config.rank={lora.rank}: this service has models of rank 1 to {whole} "
                "(adapter.rank, set where it is started)"
            )
        for site in self.spec:
            if site.rank * lora.rank % whole:
                ranks = [n for n in range(1, whole + 1) if site.rank * n % whole == 0]
                raise ServiceError(
                    f"lora_config.rank={lora.rank}: {site.module} has rank {site.rank} beside "
                    f"adapter.rank={whole} here, and {lora.rank / whole:g} of it is no rank; "
                    f"use one of {', '.join(map(str, ranks))}"
                )
        if not any(self.ranks(lora).values()):
            raise ServiceError(
                "lora_config trains nothing here: there are adapters on "
                f"{', '.join(sorted({site.module for site in self.spec}))}; set train_attn or "
                "train_mlp"
            )

    def ranks(self, lora: Lora) -> dict[str, int]:
        """The rank of each site, 0 where it is not trained."""
        whole = self.config.adapter.rank
        return {
            site.name: site.rank * lora.rank // whole if _trains(site, lora) else 0
            for site in self.spec
        }

    def factor(self, lora: Lora) -> float:
        """The factor on top of each site's scale."""
        return factor_of(lora.rank, self.config.adapter.rank, self.config.adapter.rslora)

    def saved(self, lora: Lora) -> dict[str, Any]:
        """The settings of the adapter that a checkpoint of such a model holds: of the ranks of the
        service, with alphas that scale it as it is scaled."""
        adapter, factor = self.config.adapter, self.factor(lora)
        scaled = {"alpha": adapter.alpha * factor}
        if adapter.expert_alpha is not None:
            scaled["expert_alpha"] = adapter.expert_alpha * factor
        pattern = {key: alpha * factor for key, alpha in adapter.alpha_pattern.items()}
        changed = adapter.model_copy(update=scaled | {"alpha_pattern": pattern})
        return AdapterConfig.model_validate(changed.model_dump()).model_dump(mode="json")

    def exported(self, lora: Lora) -> AdapterSpec:
        """The adapter itself: what is trained, at its own ranks."""
        ranks, factor = self.ranks(lora), self.factor(lora)
        sites = (
            replace(site, rank=ranks[site.name], scale=site.scale * factor)
            for site in self.spec
            if ranks[site.name]
        )
        return AdapterSpec(self.spec.shape, tuple(sites))


class Cut(Mapping[str, np.ndarray]):
    """The parts of whole tensors that an adapter of lower ranks has."""

    def __init__(self, tensors: Mapping[str, np.ndarray], spec: AdapterSpec):
        self.tensors, self.shapes = tensors, spec.tensor_shapes

    def __getitem__(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(self.tensors[name][tuple(map(slice, self.shapes[name]))])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _trains(site: Site, lora: Lora) -> bool:
    return lora.mlp if site.module.startswith(MLP) else lora.attention
