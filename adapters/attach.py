"""Puts adapters on a Megatron-core model, and reads and writes them in canonical form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core import parallel_state as ps

from lora_moe_rl.adapters.layers import LoRALinear, Slice, Switch, merge_qkv
from lora_moe_rl.adapters.sharding import RankLayout
from lora_moe_rl.adapters.shards import Shard
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.errors import AdapterError

# mcore linear, as a path below its layer -> the canonical modules fused in it, in output order.
_ATTENTION = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_q_proj": ("q_proj",),
    "self_attention.linear_q_down_proj": ("q_a_proj",),
    "self_attention.linear_q_up_proj": ("q_b_proj",),
    "self_attention.linear_kv_down_proj": ("kv_a_proj",),
    "self_attention.linear_proj": ("o_proj",),
}
_MLPS = {"mlp": "mlp", "mlp.shared_experts": "shared_expert", "mlp.experts": "experts"}
FUSED = _ATTENTION | {
    f"{path}.{linear}": modules
    for path, name in _MLPS.items()
    for linear, modules in (
        ("linear_fc1", (f"{name}.gate", f"{name}.up")),
        ("linear_fc2", (f"{name}.down",)),
    )
}


def current_layout() -> RankLayout:
    """This process's place in Megatron's groups."""
    return RankLayout(
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp_size=ps.get_tensor_model_parallel_world_size(),
        ep_rank=ps.get_expert_model_parallel_rank(),
        ep_size=ps.get_expert_model_parallel_world_size(),
        dp_rank=ps.get_data_parallel_rank(),
        expert_dp_rank=ps.get_expert_data_parallel_rank(),
    )


class Adapters:
    """All adapters of this rank's part of the model."""

    def __init__(self, model: torch.nn.Module, spec: AdapterSpec, seed: int):
        """Freezes the model and wraps the linears of the spec's sites. Raises AdapterError when a
        site of one of this rank's layers has no linear to sit on."""
        self.switch = Switch()
        self.layers: list[LoRALinear] = []
        layout = current_layout()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        decoder = model.decoder
        wanted = set()
        for layer in decoder.layers:
            number = layer.layer_number - 1
            wanted |= {site.name for site in spec if site.layer == number}
            for path, modules in FUSED.items():
                sites = [spec.by_name.get(f"layers.{number}.{m}") for m in modules]
                if any(site is not None for site in sites):
                    self._wrap(layer, path, sites, spec, layout, decoder.config, seed)
        placed = {site.name for lora in self.layers for site in lora.sites}
        if missing := sorted(wanted - placed):
            raise AdapterError(f"the model has no linear for {', '.join(missing)}")

    def _wrap(self, layer, path, sites, spec, layout, config, seed) -> None:
        parent_path, _, name = path.rpartition(".")
        try:
            parent = layer.get_submodule(parent_path)
            base = parent.get_submodule(name)
        except AttributeError:
            return
        number = layer.layer_number - 1
        dims = spec.shape.modules(number)
        tp = 1 if path.startswith("mlp.experts") else layout.tp_size
        whole = path.endswith(("linear_fc2", "linear_proj", "_down_proj"))
        widths = [dims[m][1] // (1 if whole else tp) for m in FUSED[path]]
        merge = None
        if path.endswith("linear_qkv"):
            merge = merge_qkv(spec.shape.dims["kv_heads"] // tp)
        lora = LoRALinear(
            base, sites, widths, layout, config.sequence_parallel, self.switch, seed, merge
        )
        setattr(parent, name, lora)
        self.layers.append(lora)

    def slices(self) -> Iterator[Slice]:
        for lora in self.layers:
            yield from lora.slices()

    @contextmanager
    def off(self):
        """Inside, the model is its frozen base: the reference policy."""
        self.switch.on = False
        try:
            yield
        finally:
            self.switch.on = True

    def export(self, of=lambda parameter: parameter) -> list[Shard]:
        """This rank's shards, float32 copies on the host. `of` maps a parameter to a tensor of its
        shape: itself, or an optimizer state."""
        return [
            Shard(s.name, s.start, of(s.parameter).detach()[s.index].to("cpu", copy=True).numpy())
            for s in self.slices()
            if s.exported
        ]

    @torch.no_grad()
    def load(self, tensors: Mapping[str, np.ndarray], into=lambda parameter: parameter) -> None:
        """Writes this rank's parts of whole canonical tensors. Raises AdapterError for a missing
        tensor or one of another shape."""
        for s in self.slices():
            target = into(s.parameter).detach()[s.index]
            if s.name not in tensors:
                raise AdapterError(f"tensor {s.name} is missing")
            window = tuple(slice(a, a + n) for a, n in zip(s.start, target.shape, strict=True))
            part = torch.from_numpy(np.ascontiguousarray(tensors[s.name][window]))
            if part.shape != target.shape:
                raise AdapterError(
                    f"tensor {s.name}: shape {tensors[s.name].shape} does not hold "
                    f"{tuple(target.shape)} at {s.start}"
                )
            target.copy_(part)
