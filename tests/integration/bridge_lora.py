"""Megatron-Bridge 0.6.2's own LoRA on the model that the trainer builds, in canonical terms.

Bridge's `LoRA` has one A for all linears that Megatron fuses (q, k, v; gate, up), and one B of
their outputs in Megatron's order. Its `CanonicalLoRA` has an A for each, but for routed experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch

from lora_moe_rl.adapters.attach import FUSED
from lora_moe_rl.adapters.families import ModelShape

# Bridge's wrapper of a linear -> its adapters, by canonical module where it has several.
SPLIT = {
    "linear_qkv": {"q_proj": "adapter_q", "k_proj": "adapter_k", "v_proj": "adapter_v"},
    "linear_fc1": {"gate": "adapter_gate", "up": "adapter_up"},
}


def build(worker, peft) -> torch.nn.Module:
    """A second model of this rank's layout, with Bridge's adapters on it."""
    from lora_moe_rl.trainer.model import build_model

    (model,) = build_model(
        worker.model_dir, worker.config.trainer, worker.spec.shape.num_layers, worker.engine.device
    )
    with _our_experts_for_transformer_engines(model):
        peft(model, training=True)
    return model


@contextmanager
def _our_experts_for_transformer_engines(model):
    """Bridge knows grouped expert linears by Transformer Engine's classes alone."""
    from megatron.bridge.peft import utils

    from lora_moe_rl.trainer.local_modules import ColumnGroupedLinear, RowGroupedLinear

    for module in model.modules():
        if isinstance(module, ColumnGroupedLinear | RowGroupedLinear):
            module.config = model.config
    nobody = type("Nobody", (), {})
    with mock.patch.multiple(
        utils,
        HAVE_TE=True,
        TECL=(ColumnGroupedLinear,),
        TERL=(RowGroupedLinear,),
        TELayerNormColumnParallelLinear=nobody,
        TELinear=nobody,
    ):
        yield


def in_bridges_form(
    model, shape: ModelShape, tensors: dict[str, np.ndarray], gradients: bool = False
) -> dict[str, np.ndarray]:
    """`{parameter: array}` for all of Bridge's adapter parameters, whole.

    Sites that share an A in Bridge must have equal ones here. The gradient of the shared A is the
    sum of theirs.
    """
    out: dict[str, np.ndarray] = {}
    for layer, path, name, adapter in _adapters(model):
        modules = [m for m in FUSED[path] if m in shape.modules(layer)]
        parts = _split(path)
        if parts and hasattr(adapter, "keys"):
            for module in modules:
                part = f"{name}.{parts[module.rpartition('.')[2]]}"
                site = f"layers.{layer}.{module}"
                out[f"{part}.linear_in.weight"] = tensors[f"{site}.A"]
                out[f"{part}.linear_out.weight"] = tensors[f"{site}.B"]
            continue
        As = [tensors[f"layers.{layer}.{module}.A"] for module in modules]
        if not gradients:
            assert all((As[0] == A).all() for A in As), f"{path}: Bridge has one A"
        out[f"{name}.linear_in.weight"] = sum(As) if gradients else As[0]
        Bs = [tensors[f"layers.{layer}.{module}.B"] for module in modules]
        out[f"{name}.linear_out.weight"] = _fuse(path, Bs, shape)
    return out


def _split(path: str) -> dict[str, str] | None:
    return next((parts for end, parts in SPLIT.items() if path.endswith(end)), None)


def _adapters(model) -> Iterator[tuple[int, str, str, torch.nn.Module]]:
    """(global layer, path below it, name of the adapter, adapter)."""
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper

    for name, module in model.named_modules():
        if isinstance(module, AdapterWrapper):
            _, _, layer, path = name.split(".", 3)
            yield int(layer), path, f"{name}.adapter", module.adapter


def _fuse(path: str, Bs: list[np.ndarray], shape: ModelShape) -> np.ndarray:
    """Rows of several B as Megatron fuses outputs: for each key/value head its queries, its key and
    its value; gate before up."""
    if not path.endswith("linear_qkv"):
        return np.concatenate(Bs, axis=-2)
    groups = shape.dims["kv_heads"]
    by_group = [B.reshape(groups, -1, B.shape[-1]) for B in Bs]
    return np.concatenate(by_group, axis=1).reshape(-1, Bs[0].shape[-1])


@torch.no_grad()
def load(model, whole: dict[str, np.ndarray], cut=lambda name, array: array) -> None:
    """Writes parameters; every one that trains must be named."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == whole.keys()
    for name, parameter in trained.items():
        part = torch.from_numpy(np.ascontiguousarray(cut(name, whole[name])))
        assert part.shape == parameter.shape, name
        parameter.copy_(part)


def cut_experts(rank: int, size: int):
    """Bridge's own marks for expert-tensor parallelism: dimension 1 of fc1's linear_in (its rank)
    and of both linear_out, dimension 2 of fc2's linear_in. fc1's rows are gate, then up, on each.
    """

    def cut(name: str, array: np.ndarray) -> np.ndarray:
        if name.endswith("linear_fc1.adapter.linear_out.weight"):
            gate, up = (np.split(half, size, 1)[rank] for half in np.split(array, 2, 1))
            return np.concatenate([gate, up], 1)
        axis = 2 if name.endswith("linear_fc2.adapter.linear_in.weight") else 1
        return np.split(array, size, axis)[rank]

    return cut
