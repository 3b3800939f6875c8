"""The receiving side of a refit: takes adapter versions inside vLLM's workers, in memory.

`Receiver` is a vLLM worker extension: its methods become methods of every worker and are called
through `collective_rpc`. A version comes in two steps, so that nothing half-written is ever served:

    refit_stage   read, check and keep it; touches no slot
    refit_commit  register it, let vLLM write it into a free slot, read the slot back

Everything of vLLM's internals that a refit touches stands in this file. vLLM itself can only load
an adapter from disk; a registered id, however, is never loaded, so that registering an adapter we
built ourselves is enough. Its ids start at 1: the id of version v is v + 1.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import torch
import vllm
from vllm.lora.layers import FusedMoEWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager

from lora_moe_rl.errors import LoraMoeRlError, RefitError
from lora_moe_rl.refit.buffers import read_shared
from lora_moe_rl.refit.pack import Manifest, unpack
from lora_moe_rl.upstream import require_attributes, require_parameters, require_version

KNOWN_VLLM = ("0.31.0",)
WHO = "lora_moe_rl/refit/receiver.py"

# A module's adapter: [A, B] of each part, None for a part that is not adapted.
Parts = list[list[torch.Tensor] | None]


def lora_id(version: int) -> int:
    """vLLM's id of an adapter version: vLLM wants ids above 0."""
    return version + 1


def check_vllm() -> None:
    """Raises ConfigError when the vLLM that is installed is not as this file expects."""
    require_version("vllm", vllm.__version__, KNOWN_VLLM, WHO)
    require_parameters(LoRAModel.__init__, ("self", "lora_model_id", "rank", "loras"), WHO)
    require_parameters(
        PackedLoRALayerWeights.__init__,
        ("self", "module_name", "rank", "lora_alphas", "lora_a", "lora_b", "scaling"),
        WHO,
    )
    for layer in (BaseLinearLayerWithLoRA, FusedMoEWithLoRA):
        require_parameters(layer.set_lora, ("self", "index", "lora_a", "lora_b"), WHO)
    names = ("activate_adapter", "remove_adapter", "deactivate_adapter", "lora_slots", "capacity")
    require_attributes(LoRAModelManager, names, WHO)
    require_attributes(
        FusedMoEWithLoRA, ("_slice_w13_a", "_slice_w13_b", "_slice_w2_a", "_slice_w2_b"), WHO
    )


def answer(method):
    """Reports our own errors as `{"error": text}`.

    An exception would lose its type on the way out of vLLM, and stop its workers where there are
    several.
    """

    @functools.wraps(method)
    def wrapped(self, *args: Any) -> dict[str, Any]:
        try:
            return method(self, *args)
        except (LoraMoeRlError, OSError) as error:
            return {"error": f"worker {self.rank}: {error}"}

    return wrapped


class Receiver:
    """Methods of every vLLM worker. `_refit_staged` holds a version between stage and commit."""

    _refit_staged: tuple[int, LoRAModel, dict[str, Parts]] | None = None

    @answer
    def refit_check(self) -> dict[str, Any]:
        """Checks vLLM's internals; tells which modules of this worker take adapters."""
        check_vllm()
        manager = _manager(self)
        names = ("_registered_adapters", "_active_adapters", "lora_index_to_id", "modules")
        require_attributes(manager, names, WHO)
        return {"modules": list(manager.modules), "slots": manager.lora_slots}

    @answer
    def refit_stage(self, path: str, manifest_json: str) -> dict[str, Any]:
        """Reads and checks a version. Returns the modules of this worker that it adapts."""
        started = time.perf_counter()
        manifest = Manifest.from_json(manifest_json)
        manager = _manager(self)
        dtype = getattr(torch, manifest.dtype)
        if manager.lora_config.lora_dtype != dtype:
            raise RefitError(
                f"adapter version {manifest.version} is {dtype}, the slots are "
                f"{manager.lora_config.lora_dtype}"
            )
        arrays = unpack(manifest, read_shared(path, manifest.nbytes))
        parts = {
            name: _to_torch(pairs, dtype)
            for name, pairs in arrays.items()
            if name in manager.modules  # with pipeline parallelism a worker has some layers only
        }
        loras = {name: _weights(name, manager.modules[name], p) for name, p in parts.items()}
        rank = max((lora.rank for lora in loras.values()), default=1)
        model = LoRAModel(lora_id(manifest.version), rank, loras)
        self._refit_staged = (manifest.version, model, parts)
        return {"modules": list(parts), "seconds": time.perf_counter() - started}

    @answer
    def refit_commit(self, version: int) -> dict[str, Any]:
        """Puts the staged version into a free slot and compares the slot with what was sent."""
        started = time.perf_counter()
        if self._refit_staged is None or self._refit_staged[0] != version:
            raise RefitError(f"adapter version {version} is not staged")
        _, model, parts = self._refit_staged
        self._refit_staged = None
        manager = _manager(self)
        _require_free_slot(manager, version)
        # vLLM's own add_adapter would group and rescale the tensors: they come ready.
        manager._registered_adapters[model.id] = model
        try:
            manager.activate_adapter(model.id)
            slot = manager.lora_index_to_id.index(model.id)
            for name in parts:
                _compare_slot(name, manager.modules[name], slot, model.loras[name])
        except Exception:
            manager.remove_adapter(model.id)
            raise
        return {"slot": slot, "seconds": time.perf_counter() - started}

    @answer
    def refit_drop(self, version: int) -> dict[str, Any]:
        """Forgets a version, staged or served."""
        if self._refit_staged is not None and self._refit_staged[0] == version:
            self._refit_staged = None
        return {"dropped": _manager(self).remove_adapter(lora_id(version))}

    @answer
    def refit_state(self) -> dict[str, Any]:
        """The versions in slots."""
        ids = _manager(self).lora_index_to_id
        return {"versions": [i - 1 for i in ids if i is not None]}


def _manager(worker: Any) -> LRUCacheLoRAModelManager:
    return worker.model_runner.lora_manager._adapter_manager


def _require_free_slot(manager: LRUCacheLoRAModelManager, version: int) -> None:
    """vLLM would evict the version used longest ago, silently: never let it come to that."""
    if None not in manager.lora_index_to_id or len(manager) >= manager.capacity:
        raise RefitError(
            f"no free slot for adapter version {version}: slots hold the versions "
            f"{[i - 1 for i in manager.lora_index_to_id if i is not None]}"
        )


def _to_torch(pairs: list[list[np.ndarray] | None], dtype: torch.dtype) -> Parts:
    def tensor(array: np.ndarray) -> torch.Tensor:
        values = torch.from_numpy(array).view(dtype)
        if not torch.isfinite(values).all():
            raise RefitError(f"an adapter tensor holds NaN or infinite values in {dtype}")
        return values

    return [None if pair is None else [tensor(array) for array in pair] for pair in pairs]


def _weights(name: str, module: Any, parts: Parts) -> LoRALayerWeights:
    """What vLLM's set_lora of `module` takes. Scales are 1: they are folded into B."""
    if isinstance(module, FusedMoEWithLoRA):
        whole = _fill_experts(module, parts)
        parts = [_local_experts(module, [_each(module, t) for t in pair]) for pair in whole]
    elif not isinstance(module, BaseLinearLayerWithLoRA):
        raise RefitError(f"{name}: vLLM serves it as {type(module).__name__}, unknown to {WHO}")
    if len(parts) == 1:
        matrix_a, matrix_b = parts[0]
        return LoRALayerWeights(name, matrix_a.shape[-2], 1, matrix_a, matrix_b, scaling=1.0)
    rank = max(pair[0].shape[-2] for pair in parts if pair is not None)
    return PackedLoRALayerWeights(
        name,
        rank,
        [None if pair is None else 1 for pair in parts],
        [None if pair is None else pair[0] for pair in parts],
        [None if pair is None else pair[1] for pair in parts],
        scaling=[1.0] * len(parts),
    )


def _fill_experts(module: FusedMoEWithLoRA, parts: Parts) -> list[list[torch.Tensor]]:
    """vLLM wants all of gate, down and up: zeros of rank 1 stand for one that is not adapted."""
    given = next(pair for pair in parts if pair is not None)
    hidden, width = module.hidden_size, module.intermediate_size_per_partition * module.tp_size
    sizes = [(hidden, width), (width, hidden), (hidden, width)]  # (in, out) of gate, down, up
    experts = module.global_num_experts
    return [
        [given[0].new_zeros(experts, 1, n_in), given[1].new_zeros(experts, n_out, 1)]
        if pair is None
        else pair
        for pair, (n_in, n_out) in zip(parts, sizes, strict=True)
    ]


def _each(module: FusedMoEWithLoRA, tensor: torch.Tensor) -> torch.Tensor:
    """One view for each expert of a tensor that all share (`[r, in]` or `[out, r]`)."""
    if tensor.dim() == 3:
        return tensor
    return tensor.expand(module.global_num_experts, *tensor.shape)


def _local_experts(module: FusedMoEWithLoRA, pair: list[torch.Tensor]) -> list[torch.Tensor]:
    """The experts that this worker holds under expert parallelism."""
    if not module.use_ep:
        return pair
    first = module.ep_rank * module.local_num_experts
    return [tensor[first : first + module.local_num_experts] for tensor in pair]


def _compare_slot(name: str, module: Any, slot: int, lora: LoRALayerWeights) -> None:
    """Raises RefitError unless the slot holds the adapter: a slot of zeros would serve the base."""
    if isinstance(module, FusedMoEWithLoRA):
        pairs = _expert_buffers(module, slot, lora)
        if module.adapter_enabled[slot] != 1:
            raise RefitError(f"{name}: vLLM did not enable the adapter in slot {slot}")
    else:
        pairs = _linear_buffers(module, slot, lora)
    for buffer, sent in pairs:
        held = buffer[tuple(slice(0, size) for size in sent.shape)]
        if not torch.equal(held.cpu(), sent.cpu()):
            raise RefitError(f"{name}: slot {slot} does not hold what was sent")


def _expert_buffers(module: FusedMoEWithLoRA, slot: int, lora: LoRALayerWeights):
    (gate_a, down_a, up_a), (gate_b, down_b, up_b) = lora.lora_a, lora.lora_b
    return [
        (module.w13_lora_a_stacked[0][slot], module._slice_w13_a(gate_a)),
        (module.w13_lora_a_stacked[1][slot], module._slice_w13_a(up_a)),
        (module.w13_lora_b_stacked[0][slot], module._slice_w13_b(gate_b)),
        (module.w13_lora_b_stacked[1][slot], module._slice_w13_b(up_b)),
        (module.w2_lora_a_stacked[0][slot], module._slice_w2_a(down_a)),
        (module.w2_lora_b_stacked[0][slot], module._slice_w2_b(down_b)),
    ]


def _linear_buffers(module: Any, slot: int, lora: LoRALayerWeights):
    lora_a, lora_b = lora.lora_a, lora.lora_b
    if module.tp_size > 1:
        lora_a, lora_b = module.slice_lora_a(lora_a), module.slice_lora_b(lora_b)
    if not isinstance(lora_a, list):
        lora_a, lora_b = [lora_a], [lora_b]
    for i, (matrix_a, matrix_b) in enumerate(zip(lora_a, lora_b, strict=True)):
        if matrix_a is not None:
            yield module.lora_a_stacked[i][slot, 0], matrix_a
            yield module.lora_b_stacked[i][slot, 0], matrix_b
