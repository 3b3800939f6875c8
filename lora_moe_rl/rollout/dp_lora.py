"""Mend for vLLM 0.31.0: adapters where experts are spread over data-parallel ranks.

A rank that has no request takes part in the steps of the others with a token of its own
(`vllm/v1/worker/gpu_worker.py`, execute_dummy_batch). vLLM makes up adapters for that step and then
removes every adapter of the rank, ours included. Here such a step has no adapter, and removes none.

What a Triton kernel knows of a step's adapters (`vllm/lora/ops/triton_ops/lora_kernel_metadata.py`)
is that of the rank's own tokens: an expert would leave out the adapters that only tokens of other
ranks have, and where a rank has base tokens alone, others would be told the slots of its step
before. Here it names all slots, and the slots of this step.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/rollout/dp_lora.py"

stock_dummy_batch = Worker.execute_dummy_batch


def _execute_dummy_batch(self: Worker) -> None:
    runner = self.model_runner

    @contextmanager
    def without_adapters(
        lora_config, num_scheduled_tokens, num_sampled_tokens, *args: Any, **kwargs: Any
    ):
        with runner.maybe_select_dummy_loras(
            lora_config, num_scheduled_tokens, num_sampled_tokens=num_sampled_tokens
        ):
            yield

    runner.maybe_dummy_run_with_lora = without_adapters
    try:
        stock_dummy_batch(self)
    finally:
        del runner.maybe_dummy_run_with_lora


def _prepare_tensors(self: LoRAKernelMeta, token_lora_mapping: torch.Tensor) -> None:
    """As the stock method, of all slots: -1 (no adapter), 0, 1, ... in this order, also those that
    no token `[T]` of this rank has."""
    self._reset()
    tokens, groups = len(token_lora_mapping), len(self.active_lora_ids)
    self.token_lora_mapping[:tokens].copy_(token_lora_mapping)
    self.token_indices_sorted_by_lora_ids[:tokens].copy_(
        torch.sort(token_lora_mapping, stable=True).indices
    )
    self.active_lora_ids.copy_(torch.arange(-1, groups - 1))
    counts = torch.bincount(token_lora_mapping.long() + 1, minlength=groups)
    self.num_tokens_per_lora.copy_(counts)
    self.lora_token_start_loc[1:].copy_(counts.cumsum(0))
    self.num_active_loras_cpu[0] = groups


def install() -> None:
    """For the engines of this process."""
    require_version("vllm", WHO)
    require_parameters(
        LoRAModelRunnerMixin.maybe_dummy_run_with_lora,
        ("self", "lora_config", "num_scheduled_tokens", "num_sampled_tokens", "remove_lora"),
        WHO,
    )
    require_parameters(
        LoRAModelRunnerMixin.maybe_select_dummy_loras,
        ("self", "lora_config", "num_scheduled_tokens", "mapping_type", "num_sampled_tokens")
        + ("num_active_loras",),
        WHO,
    )
    require_attributes(Worker, ("execute_dummy_batch",), WHO)
    require_parameters(LoRAKernelMeta.prepare_tensors, ("self", "token_lora_mapping"), WHO)
    Worker.execute_dummy_batch = _execute_dummy_batch
    LoRAKernelMeta.prepare_tensors = _prepare_tensors
