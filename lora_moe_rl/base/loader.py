"""The engine's side: a load format of vLLM whose base is made of views of the store.

What the store lacks is loaded as ever (`vllm/model_executor/model_loader/default_loader.py`):
norms, routers, biases, scales of FP8 experts. What it has is not read from the checkpoint.

After loading, vLLM copies each stack of experts onto itself, which a read-only mapping does not
survive: these methods alone are told that their weights are processed. Those for INT4 and MXFP4 do
not ask, and copy nothing. Of a linear vLLM makes a packed copy for kernels of its own, and drops
the rows (`dispatch_cpu_unquantized_gemm` of `vllm/model_executor/layers/utils.py`); those that are
held are multiplied by torch as they are, as vLLM does where it has no such kernel. On GPUs INT4
and MXFP4 experts are held as vLLM processes them (`base/laid_out.py`).
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as wna16,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.utils import weights_already_processed

from lora_moe_rl.adapters.sharding import Box
from lora_moe_rl.base.dense import Dense
from lora_moe_rl.base.held import Held
from lora_moe_rl.base.ipc import Cuda
from lora_moe_rl.base.ipc_store import Owned
from lora_moe_rl.base.laid_out import LaidOut, allocate, unallocated
from lora_moe_rl.base.parts import engine_part
from lora_moe_rl.base.store import Store
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.kernels.dequant.formats import MARLIN
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.rollout.cpu_experts import TorchLoRAExperts
from lora_moe_rl.rollout.cpu_fp8 import DequantisedExperts, Fp8LoRAExperts
from lora_moe_rl.rollout.cpu_int4 import Int4LoRAExperts
from lora_moe_rl.rollout.cpu_mxfp4 import Mxfp4LoRAExperts, PackedMxfp4Experts
from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/base/loader.py"
LOAD_FORMAT = "lora_moe_rl_held"
GROUPED = ("w13_weight_packed", "w2_weight_packed", "w13_weight_scale", "w2_weight_scale")
# {vLLM's method of routed experts: (our class of experts, which keeps weights; their names)}
# On the CPU.
KEPT = {
    UnquantizedFusedMoEMethod: (TorchLoRAExperts, ("w13_weight", "w2_weight")),
    DequantisedExperts: (Fp8LoRAExperts, ("w13_weight", "w2_weight")),
    wna16.CompressedTensorsWNA16MoEMethod: (Int4LoRAExperts, GROUPED),
    PackedMxfp4Experts: (Mxfp4LoRAExperts, GROUPED),
}
Kept = Mapping[type, tuple[type, tuple[str, ...]]]
PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def engine_args(folder: str) -> dict[str, Any]:
    """What vLLM's engine arguments have more where the base is held in `folder`."""
    return {"load_format": LOAD_FORMAT, "model_loader_extra_config": {"folder": folder}}


def install() -> None:
    """Makes vLLM know the format. Raises ConfigError when vLLM is not the version we know."""
    require_version("vllm", WHO)
    require_attributes(DefaultModelLoader, ("create_model", "load_weights", "get_all_weights"), WHO)
    require_parameters(
        UnquantizedFusedMoEMethod.process_weights_after_loading, ("self", "layer"), WHO
    )
    register_model_loader(LOAD_FORMAT)(HeldLoader)


class HeldLoader(DefaultModelLoader):
    def __init__(self, load_config: LoadConfig):
        self.folder: str = load_config.model_loader_extra_config["folder"]
        plain = {"load_format": "auto", "model_loader_extra_config": {}}
        super().__init__(dataclasses.replace(load_config, **plain))

    def create_model(self, vllm_config: VllmConfig, *args, **kwargs) -> torch.nn.Module:
        if not held_by(self.folder, vllm_config).gpu:
            return super().create_model(vllm_config, *args, **kwargs)
        with unallocated(kept_on_gpus()):
            return super().create_model(vllm_config, *args, **kwargs)

    def load_weights(self, model: torch.nn.Module, model_config) -> None:
        held = held_by(self.folder, get_current_vllm_config())
        base = Base(held.model_dir)
        try:
            self._take(model, held, base)
        finally:
            base.weights.close()
        super().load_weights(model, model_config)

    def _take(self, model: torch.nn.Module, held: Held, base: Base) -> None:
        """Points the model at the store, which on a GPU is filled for it."""
        self.model_dir, self.not_read = held.model_dir, set(held.not_read(base))
        experts = routed_experts(model, held, kept_on_gpus() if held.gpu else KEPT)
        if held.layout in MARLIN.values():
            laid_out = LaidOut(model, held, base, experts, mine_of(held, experts))
            self.store = outside_pools(held, laid_out)
            laid_out.check()
        else:
            self.store = outside_pools(held) if held.gpu else held.open()
            take_experts(experts, self.store)
        for layer in experts.values():
            allocate(layer)  # what is not held
        take_dense(model, self.store, held.dense(base), held.tp)

    def get_all_weights(self, model_config, model) -> Generator[tuple[str, torch.Tensor]]:
        """What the store lacks. Upstream's iterators read a tensor before they can be told that
        nobody wants it, those of routed experts apart."""
        with SafeWeights.open(self.model_dir) as weights:
            for name in weights.file_of:
                if name not in self.not_read and not should_skip_weight(name, set()):
                    yield name, weights.read(name)


def held_by(folder: str, config: VllmConfig) -> Held:
    """What an engine of this config expects. Raises HeldBaseError where it cannot be."""
    parallel, model = config.parallel_config, config.model_config
    sizes = parallel.data_parallel_size, parallel.pipeline_parallel_size
    if sizes != (1, 1) or parallel.enable_eplb or parallel.expert_placement_strategy != "linear":
        raise HeldBaseError(
            "a base is held once for engines without data and pipeline parallelism, whose experts "
            "stay where they are, in their order; set model.held_once=off"
        )
    return Held(
        folder,
        model.model,
        str(model.dtype).removeprefix("torch."),  # pyright: ignore[reportArgumentType]
        parallel.tensor_parallel_size,
        parallel.enable_expert_parallel,
        config.lora_config is not None,
        config.device_config.device_type == "cuda",
    )


def outside_pools(held: Held, laid_out: LaidOut | None = None) -> Owned:
    """Shares this worker's part of the base in memory that is in none of the pools that vLLM puts
    to sleep: they are in use by the thread that loads, and by no other."""
    index, rank = torch.cuda.current_device(), get_tensor_model_parallel_rank()

    def share() -> Owned:
        torch.cuda.set_device(index)
        return held.share(Cuda(), rank, laid_out)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, share).result()


def kept_on_gpus() -> Kept:
    """Triton's experts multiply what the checkpoint has, numbers and FP8; Marlin's what vLLM lays
    out of INT4 and MXFP4. Other experts multiply something else, which the trainer cannot read."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_mxfp4 as mxfp4,
    )
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

    weights, scales = ("w13_weight", "w2_weight"), ("w13_weight_scale", "w2_weight_scale")
    return {
        UnquantizedFusedMoEMethod: (TritonExperts, weights),
        Fp8MoEMethod: (TritonExperts, weights),
        wna16.CompressedTensorsWNA16MoEMethod: (MarlinExperts, GROUPED),
        mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod: (MarlinExperts, (*weights, *scales)),
    }


def routed_experts(model: torch.nn.Module, held: Held, kept: Kept) -> dict[str, RoutedExperts]:
    """vLLM's layers of routed experts, by the name of each tensor of them that is held. Raises
    HeldBaseError for one that vLLM would lay out as none that is held."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, RoutedExperts)}
    wanted = {f"{name}.{stack}": m for name, m in found.items() for stack in _stacks(name, m, kept)}
    if differing := set(wanted) ^ {one.name for one in held.stacks()}:
        raise HeldBaseError(
            f"vLLM's model and the base that is held differ in {len(differing)} tensors, among "
            f"them {min(differing)}"
        )
    return wanted


def take_experts(experts: Mapping[str, RoutedExperts], store: Store | Owned) -> None:
    """Points routed experts at the store."""
    for name, layer in experts.items():
        mine = _mine(layer, store.contents.tensors[name].shape)
        _point(name, getattr(layer, name.rpartition(".")[2]), store.part(name, mine)[0])
    for layer in {id(layer): layer for layer in experts.values()}.values():
        method = layer.quant_method
        method.process_weights_after_loading = _as_they_are(method.process_weights_after_loading)


def mine_of(held: Held, experts: Mapping[str, RoutedExperts]) -> Box:
    """Which pieces and experts of each stack are this worker's. Raises HeldBaseError when vLLM
    cuts otherwise than is planned."""
    rank = get_tensor_model_parallel_rank()
    found = set()
    for stack in held.stacks():
        part = engine_part(stack, held.tp, held.ep, rank)
        if (mine := _mine(experts[stack.name], stack.shape)) != part:
            raise HeldBaseError(f"{stack.name}: vLLM gives this worker {mine}, planned was {part}")
        found.add(Box(part.start[:2], part.shape[:2]))
    (same,) = found
    return same


def take_dense(
    model: torch.nn.Module, store: Store | Owned, others: dict[str, Dense], tp: int
) -> None:
    """Points linears, embedding and head of `model` at the store. Raises HeldBaseError for one that
    vLLM has in another form."""
    rank = get_tensor_model_parallel_rank()
    for name, one in others.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        method = getattr(layer, "quant_method", None)
        if type(method) not in PLAIN:
            raise HeldBaseError(
                f"{name}: vLLM has it otherwise ({type(method).__name__}); set model.held_once=off"
            )
        # Of all but experts it makes no difference whether ranks share these out.
        part = store.part(name, engine_part(one, tp, False, rank))
        _point(name, layer.weight, part)
        method.process_weights_after_loading = multiply_as_it_is


def multiply_as_it_is(layer: torch.nn.Module) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _stacks(name: str, layer: RoutedExperts, kept: Kept) -> tuple[str, ...]:
    """Parameters of a layer that keep the checkpoint's layout. Raises HeldBaseError."""
    method = layer.quant_method
    experts, stacks = kept.get(type(method), (None, ()))
    chosen = getattr(method, "experts_cls", None)
    if experts is None or chosen is None or not issubclass(chosen, experts):
        raise HeldBaseError(
            f"{name}: vLLM would lay its experts out anew ({type(method).__name__}, {chosen}); set "
            "model.held_once=off"
        )
    if getattr(method, "is_marlin", False) and method.input_dtype is not None:
        raise HeldBaseError(
            f"{name}: vLLM lays its experts out for activations in {method.input_dtype} "
            "(VLLM_MARLIN_INPUT_DTYPE), which trainers cannot read; unset it"
        )
    return stacks


def _mine(layer: RoutedExperts, shape: tuple[int, ...]) -> Box:
    """Which part `[1, experts, rows, columns]` of a stack of `shape` vLLM gives this worker."""
    parallel = layer.moe_config.moe_parallel_config
    local = layer._map_global_expert_id_to_local_expert_id
    mine = [expert for expert in range(shape[1]) if local(expert) != -1]
    if [local(expert) for expert in mine] != list(range(len(mine))) or (
        mine != list(range(mine[0], mine[0] + len(mine)))
    ):
        raise HeldBaseError(f"vLLM holds the experts {mine[:8]}…, which are no range in order")
    piece = 0 if parallel.use_ep else parallel.tp_rank
    return Box((piece, mine[0], 0, 0), (1, len(mine), *shape[2:]))


def _point(name: str, parameter: torch.nn.Parameter, shared: torch.Tensor) -> None:
    if parameter.shape != shared.shape or parameter.dtype != shared.dtype:
        raise HeldBaseError(
            f"{name}: vLLM wants {tuple(parameter.shape)} {parameter.dtype}, and held is "
            f"{tuple(shared.shape)} {shared.dtype}; set model.held_once=off"
        )
    parameter.data = shared


def _as_they_are(process: Callable[[RoutedExperts], None]) -> Callable[[RoutedExperts], None]:
    def without_touching(layer: RoutedExperts) -> None:
        with weights_already_processed():
            process(layer)

    return without_touching
