"""The vLLM worker of `bench planned`, which looks at its own memory while it starts."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from lora_moe_rl.bench.planned_jobs import settled


class HeldWorker(CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        make_slots, before_slots = self.model_runner.load_lora_model, 0

        def load_lora_model(
            model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device
        ) -> torch.nn.Module:
            nonlocal before_slots
            before_slots = settled()
            return make_slots(model, vllm_config, device)

        self.model_runner.load_lora_model = load_lora_model
        bare = settled()
        super().load_model(*args, **kwargs)
        slots = settled() - before_slots
        self.held = {"weights": before_slots - bare, "adapter slots": slots}

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Pages of the cache take memory once they are written."""
        before = settled()
        super().initialize_from_config(kv_cache_config)
        for cache in self.model_runner.kv_caches:
            cache.zero_()
        self.held["KV cache"] = settled() - before

    def bytes_held(self) -> dict[str, int]:
        """The bytes held, by what they are for, and `tokens` that the cache has room for."""
        config = self.cache_config
        assert config.num_gpu_blocks is not None, "after initialize_from_config"
        return self.held | {"tokens": config.num_gpu_blocks * config.block_size}
