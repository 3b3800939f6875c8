"""Everything in the trainer that differs between the CPU and a GPU, except leaf modules.

`prepare(device)` must run before Megatron is imported.
"""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass

import torch

from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.config.trainer import check_context, has_transformer_engine
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rollout.facts import Dtype


@dataclass(frozen=True)
class Device:
    """`kind`: cpu or cuda. `dtype`: of the frozen base and the activations."""

    kind: str
    dtype: torch.dtype

    @classmethod
    def choose(cls, config: TrainerConfig) -> Device:
        """Raises ConfigError for device=cuda without one, and for layers that cannot have cp."""
        kind = config.device
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError("trainer.device=cuda, but torch sees no GPU; use auto or cpu")
        names = {"auto": torch.bfloat16 if kind == "cuda" else torch.float32}
        names |= {"float32": torch.float32, "bfloat16": torch.bfloat16}
        found = cls(kind, names[config.dtype])
        check_context(config, found.transformer_engine)
        return found

    @property
    def dtype_name(self) -> Dtype:
        """The name of the dtype, as a config has it."""
        return "bfloat16" if self.dtype is torch.bfloat16 else "float32"

    @property
    def backend(self) -> str:
        """torch.distributed backend."""
        return "nccl" if self.kind == "cuda" else "gloo"

    @property
    def torch_device(self) -> torch.device:
        if self.kind == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def transformer_engine(self) -> bool:
        """Whether mcore builds Transformer Engine layers: on a GPU that has it installed."""
        return self.kind == "cuda" and has_transformer_engine()

    def give_back(self) -> None:
        """Memory that is free in this process, and kept for what it may do next, is free for
        others."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
        else:
            ctypes.CDLL(None).malloc_trim(0)

    def prepare(self, threads: int) -> None:
        """Sets up this process. Idempotent."""
        if self.kind == "cpu":
            from lora_moe_rl.trainer import megatron_on_cpu

            torch.set_num_threads(threads)
            megatron_on_cpu.install()
        else:
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            torch.cuda.set_device(0)  # Ray shows each actor its own GPUs
            if not self.transformer_engine:
                # Of what local modules use, mcore compiles one sum of the router's, at its first
                # call and anew for other numbers of tokens: seconds, with nothing to gain.
                os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
