"""vLLM's own linears without an engine or a group of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace

import torch


@contextmanager
def worker(monkeypatch, rank: int = 0, ranks: int = 1) -> Iterator[ModuleType]:
    """A context in which linears are those of worker `rank` of `ranks`. Yields vLLM's module."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        yield linear


class Attentions(torch.nn.Module):
    """The linears of the attention of each layer, under vLLM's names. Weights are given to vLLM's
    loaders, as those of its models are. `fused`: which part of qkv_proj each becomes."""

    fused = MappingProxyType({"q_proj": "q", "k_proj": "k", "v_proj": "v"})

    def __init__(self, linear: ModuleType, layers: int, hidden: int, head: int, heads: int, kv):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(layers))
        for layer in self.model.layers:
            layer.self_attn = torch.nn.Module()
            layer.self_attn.qkv_proj = linear.QKVParallelLinear(hidden, head, heads, kv, bias=False)
            layer.self_attn.o_proj = linear.RowParallelLinear(heads * head, hidden, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            path, _, kind = name.rpartition(".")
            parent, _, last = path.rpartition(".")
            shard = self.fused.get(last)
            layer = self.get_submodule(f"{parent}.{'qkv_proj' if shard else last}")
            parameter = getattr(layer, kind)
            parameter.weight_loader(parameter, value, *([shard] if shard else []))

    def start(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads and processes all weights, as vLLM does before it serves."""
        from vllm.model_executor.model_loader.reload import layerwise

        layerwise.record_metadata_for_reloading(self)
        self.load_weights(weights)
        for layer in self.modules():
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)


def runner(model: torch.nn.Module, folder: Path) -> SimpleNamespace:
    """What of vLLM's model runner a merged refit asks."""
    from vllm.config import get_current_vllm_config

    return SimpleNamespace(
        get_model=lambda: model,
        model_config=SimpleNamespace(model=str(folder), dtype=torch.float32),
        vllm_config=get_current_vllm_config(),
        lora_config=None,
        device=torch.device("cpu"),
    )
