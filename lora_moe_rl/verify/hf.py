"""What Hugging Face says: forward passes with adapters merged into the weights by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from psutil import virtual_memory
from torch.overrides import TorchFunctionMode

from lora_moe_rl.adapters.families import hf_embedding, hf_path, hf_prefix, transformers_path
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.verify.hf_load import load, load_whole

__all__ = ["exact_logprobs", "in_float64", "load", "load_exact", "load_whole", "logprobs", "merge"]

# Of stacks with gate and up in turn: the parameter, and a module's columns of it.
_IN_TURN = {
    "experts.gate": ("gate_up", slice(0, None, 2)),
    "experts.up": ("gate_up", slice(1, None, 2)),
    "experts.down": ("down", slice(None)),
}
BYTES_A_WEIGHT = 12  # as float32, and as float64 beside it


@torch.no_grad()
def merge(model: torch.nn.Module, spec: AdapterSpec, tensors: Mapping[str, np.ndarray]) -> None:
    """W += scale * B A, in place; of a language model inside a larger one, by itself or not.

    transformers 5 stacks the routed experts of every family that it has: `mlp.experts.gate_up_proj`
    `[E, 2I, H]` and `down_proj` `[E, H, I]`. A tensor that all experts share has no E: the product
    broadcasts. Interleaved ones are `[E, H, 2I]`, with gate in every even column, and `[E, I, H]`.
    """
    state = model.state_dict()
    inside = hf_embedding(spec.shape) in state
    prefix = hf_prefix(spec.shape) if inside else "model."
    for site in spec:
        A, B = (torch.from_numpy(tensors[f"{site.name}.{m}"]) for m in "AB")
        delta = site.scale * (B @ A)
        layer = f"{prefix}layers.{site.layer}"
        if site.num_experts is None:
            state[f"{layer}.{transformers_path(spec.shape, site.module)}.weight"] += delta
        elif f"{layer}.mlp.experts.0.up_proj.weight" in state:  # one by one
            for expert, one in enumerate(delta.expand(site.num_experts, *delta.shape[-2:])):
                path = hf_path(spec.shape, site.module).format(expert)
                state[f"{layer}.{path}.weight"] += one
        elif spec.shape.family.experts == "interleaved":
            part, columns = _IN_TURN[site.module]
            state[f"{layer}.mlp.experts.{part}_proj"][..., columns] += delta.mT
        elif site.module == "experts.down":
            state[f"{layer}.mlp.experts.down_proj"] += delta
        else:
            weight = state[f"{layer}.mlp.experts.gate_up_proj"]
            width = weight.shape[1] // 2
            first = 0 if site.module == "experts.gate" else width
            weight[:, first : first + width] += delta


class _Doubles(TorchFunctionMode):
    """Wherever a forward asks for float32 (norms, routers, rotations), it gets float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wider = {key: _wider(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **wider)


def _wider(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def load_exact(
    model_dir: Path,
    spec: AdapterSpec | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> torch.nn.Module | None:
    """The model of a directory in float64, with an adapter merged by hand or none (`spec` says of
    what it is); None where memory is too small for it."""
    model = load(model_dir)
    weights = sum(parameter.numel() for parameter in model.parameters())
    if virtual_memory().available < BYTES_A_WEIGHT * weights:
        return None
    model = model.double()
    if spec is not None and tensors is not None:
        merge(model, spec, {name: one.astype(np.float64) for name, one in tensors.items()})
    return model


@contextmanager
def in_float64(model: Any) -> Iterator[None]:
    """A context in which forwards of a model whose weights are float64 are so throughout. Raises
    RuntimeError where one of its modules returns less."""

    def check(module, args, output):
        for one in output if isinstance(output, tuple) else (output,):
            if torch.is_tensor(one) and one.is_floating_point() and one.dtype != torch.float64:
                raise RuntimeError(f"{type(module).__name__} returns {one.dtype} for float64")

    model.set_experts_implementation("eager")  # grouped products know no float64
    handles = [module.register_forward_hook(check) for module in model.modules()]
    try:
        with _Doubles():
            yield
    finally:
        for handle in handles:
            handle.remove()


def exact_logprobs(model: Any, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """As `logprobs` of each sequence, float64, of a model whose weights are float64. Raises as
    `in_float64`."""
    with in_float64(model):
        return [logprobs(model, sequence) for sequence in sequences]


@torch.no_grad()
def logprobs(model: torch.nn.Module, sequence: Sequence[int]) -> np.ndarray:
    """Log-probability of each token after the first, float32 `[L - 1]`; in `in_float64` float64."""
    ids = torch.as_tensor(np.asarray(sequence), dtype=torch.long)[None]
    scores = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0].numpy()
