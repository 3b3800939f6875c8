"""What the families' bridges (`adapters/families/*.py`) share, on Megatron-Bridge.

A family's class stands before an upstream bridge, its own or a near one's, and `Complete` before
that: it mends what upstream lacks or gets wrong for some members:

- layers that are dense by name or by step, more than one shared expert, partial rotary embeddings
  that config.json gives in `rope_parameters`;
- parameters without a weight and weights without a parameter are logged upstream, and the model is
  then silently another one; here they are errors;
- quantised weights of dense linears are dequantised while they are loaded, upstream FP8 alone and
  rounded to bfloat16. Those of routed experts are not loaded here (`packed_experts.py`), nor is
  what engines hold too (`shared_experts.py`, `shared_dense.py`).

Import only after `bridge.load()` has prepared Megatron-Bridge.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    ReplicatedMapping,
)

from lora_moe_rl.adapters.families import ModelShape, hf_prefix
from lora_moe_rl.errors import ModelError
from lora_moe_rl.models import quantised_names, quantised_weights
from lora_moe_rl.trainer import grouped_topk
from lora_moe_rl.trainer.mla_query import without_query_norm
from lora_moe_rl.trainer.row_numbers import NUMBERED

MEGATRON, HF = "decoder.layers.*.", "model.layers.*."
# An attribute of Hugging Face's config: whether routed experts are those of `shared_experts.py`.
EXPERTS_HELD = "lora_moe_rl_experts_held"


def _auto(megatron: str, hf: str) -> AutoMapping:
    return AutoMapping(megatron_param=MEGATRON + megatron, hf_param=HF + hf)


def _gated(megatron: str, hf: str, gate: str = "gate_proj", up: str = "up_proj") -> GatedMLPMapping:
    return GatedMLPMapping(
        megatron_param=MEGATRON + megatron,
        gate=f"{HF}{hf}.{gate}.weight",
        up=f"{HF}{hf}.{up}.weight",
    )


def experts(
    block: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: str | None = None,
) -> list:
    """Routers and routed experts, for an upstream bridge of a dense model, which has the norm
    before an MLP. `names`: of gate, up and down; `bias`: of the router's correction, if it has
    one."""
    gate, up, down = names
    correction = [_auto("mlp.router.expert_bias", f"{block}.{bias}")] if bias else []
    return correction + [
        _auto("mlp.router.weight", f"{block}.gate.weight"),
        _gated("mlp.experts.linear_fc1.weight*", f"{block}.experts.*", gate, up),
        _auto("mlp.experts.linear_fc2.weight*", f"{block}.experts.*.{down}.weight"),
    ]


def dense_mlp() -> list:
    """The MLPs of dense layers, for an upstream bridge that has experts alone."""
    return [
        _gated("mlp.linear_fc1.weight", "mlp"),
        _auto("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
        _auto("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    ]


def gated_shared_expert() -> list:
    """One shared expert whose output is weighed by a sigmoid of its own."""
    return [
        _gated("mlp.shared_experts.linear_fc1.weight", "mlp.shared_expert"),
        _auto("mlp.shared_experts.linear_fc2.weight", "mlp.shared_expert.down_proj.weight"),
        ReplicatedMapping(
            megatron_param=f"{MEGATRON}mlp.shared_experts.gate_weight",
            hf_param=f"{HF}mlp.shared_expert_gate.weight",
        ),
    ]


class Complete(MegatronModelBridge):
    """Stands before an upstream bridge: adds to its mappings, sets what it leaves out, checks."""

    group_members = 2  # experts whose scores make the score of their group, if there are groups

    def added(self) -> list:
        """Mappings that the upstream bridge lacks."""
        return []

    def mapping_registry(self) -> MegatronMappingRegistry:
        upstream = super().mapping_registry().mappings
        known = {mapping.megatron_param for mapping in upstream}
        added = self.added()
        for mapping in added:
            if mapping.megatron_param in known:
                raise ModelError(
                    f"Megatron-Bridge's {type(self).__mro__[2].__name__} maps "
                    f"{mapping.megatron_param} by itself: take it out of {type(self).__name__}"
                )
        return MegatronMappingRegistry(*upstream, *added)

    def maybe_modify_loaded_hf_weight(self, hf_param, hf_state_dict) -> Any:
        numbered = getattr(self.hf_config, NUMBERED, None)
        if numbered is not None and (numbers := numbered.weight(hf_param)) is not None:
            return numbers
        # Upstream's annotation knows only the one tensor of a name, and not those of a dict.
        if not getattr(self.hf_config, "quantization_config", None):
            return super().maybe_modify_loaded_hf_weight(hf_param, hf_state_dict)
        if isinstance(hf_param, str):
            return quantised_weights.read(hf_state_dict.__getitem__, self.names, hf_param)
        return {
            key: quantised_weights.read(hf_state_dict.__getitem__, self.names, name)
            for key, name in hf_param.items()
        }

    def provider_bridge(self, hf_pretrained):
        config, shape = hf_pretrained.config, _shape(hf_pretrained)
        provider = super().provider_bridge(hf_pretrained)
        rope = config.rope_parameters or {}
        provider.rotary_percent = rope.get("partial_rotary_factor", 1.0)
        if provider.multi_latent_attention:
            provider.transformer_layer_spec = _without_query_norm(provider.transformer_layer_spec)
        if shape.linear_layers:
            kinds = [int(i in shape.linear_layers) for i in range(shape.num_layers)]
            provider.linear_attention_freq = kinds
        if shape.num_experts:
            self._set_experts(provider, shape)
            self.route(provider, config)
            grouped_topk.install(self.group_members)
        return provider

    def _set_experts(self, provider, shape: ModelShape) -> None:
        provider.moe_layer_freq = [int(i in shape.moe_layers) for i in range(shape.num_layers)]
        provider.moe_shared_expert_intermediate_size = shape.dims["shared_intermediate"] or None
        provider.moe_ffn_hidden_size = shape.dims["moe_intermediate"]
        provider.moe_token_dispatcher_type = "alltoall"

    def route(self, provider, config) -> None:
        """Sets the router's options that the upstream bridge leaves out."""

    def build_conversion_tasks(self, hf_pretrained, megatron_model, *args, **kwargs):
        tasks = super().build_conversion_tasks(hf_pretrained, megatron_model, *args, **kwargs)
        self._check_parameters(megatron_model, tasks)
        if hasattr(hf_pretrained, "state"):
            self.names = frozenset(hf_pretrained.state.source.get_all_keys())
            self._check_weights(tasks, _shape(hf_pretrained))
        numbered = getattr(self.hf_config, NUMBERED, None)
        return tasks if numbered is None else numbered.instead(tasks)

    def _check_parameters(self, megatron_model, tasks) -> None:
        filled = {
            (task.vp_stage or 0, task.param_name)
            for task in tasks
            if task is not None and task.megatron_module is not None
        }
        for stage, model in enumerate(megatron_model):
            corrections = [n for n, _ in model.named_buffers() if n.endswith(".expert_bias")]
            names = {self._unwrap_name(n) for n in (*dict(model.named_parameters()), *corrections)}
            if lacking := sorted(n for n in names if (stage, n) not in filled):
                raise ModelError(
                    f"no weight of the checkpoint belongs to {len(lacking)} parameters of the "
                    f"Megatron model ({', '.join(lacking[:3])}): the checkpoint lacks it, or the "
                    f"model is of a variant that {type(self).__name__} does not know"
                )

    def _check_weights(self, tasks, shape: ModelShape) -> None:
        used: set[str] = set()
        for task in tasks:
            if task is not None:
                names = task.mapping.hf_param
                used.update([names] if isinstance(names, str) else names.values())
        used = {_any_expert(name) for name in used}  # other experts' are on other ranks
        left = sorted(
            name
            for name in self.names
            if _trained(name, shape)
            and not self._loaded_elsewhere(name)
            and _any_expert(quantised_names.weight_of(name)) not in used
        )
        if left:
            raise ModelError(
                f"{len(left)} weights of the checkpoint have no place in the Megatron model "
                f"({', '.join(left[:3])}): the model is of a variant that {type(self).__name__} "
                "does not know"
            )

    def _loaded_elsewhere(self, name: str) -> bool:
        """Routed experts that are packed, or that are held once."""
        if getattr(self.hf_config, EXPERTS_HELD, False):
            return ".experts." in _any_expert(name)
        return quantised_names.of_expert(name, self.names)


def _shape(hf_pretrained) -> ModelShape:
    folder = Path(hf_pretrained.model_name_or_path)
    return ModelShape.from_hf_config(json.loads((folder / "config.json").read_text()))


def prefix_of(hf_pretrained) -> str:
    """What the names of the language model's weights begin with; where there are no files, that of
    a model by itself."""
    if not hasattr(hf_pretrained, "state"):
        return "model."
    return hf_prefix(_shape(hf_pretrained))


def _without_query_norm(block_spec):
    def spec(config, vp_stage=None):
        return without_query_norm(block_spec(config, vp_stage=vp_stage), config)

    return spec


def _any_expert(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def _trained(name: str, shape: ModelShape) -> bool:
    """Whether a weight belongs to the model: not to multi-token prediction, whose layers come after
    the last or have it in their names (ERNIE 4.5: `model.mtp_block.0`), nor to an old checkpoint's
    rotary frequencies, nor to another part of a larger one."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    beyond = layer is not None and int(layer[1]) >= shape.num_layers
    if (inside := shape.family.inside) is not None and name.startswith(inside.left_out):
        return False
    predicts = name.startswith(("mtp.", "model.mtp_"))
    return not (beyond or predicts or name.endswith("rotary_emb.inv_freq"))
