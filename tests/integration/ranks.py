"""Trainer ranks for tests: `lora_moe_rl.verify.ranks`, with jobs that stand in test files."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_moe_rl.config import RunConfig
from lora_moe_rl.trainer.device import Device
from lora_moe_rl.verify import ranks
from lora_moe_rl.verify.inputs import random_adapter, random_batch
from lora_moe_rl.verify.ranks import spec_of

__all__ = ["random_adapter", "random_batch", "run_ranks", "spec_of"]


@dataclass(frozen=True)
class FileJob:
    """A function of a test file, which another process cannot import by pytest's name for it."""

    path: str
    name: str

    def __call__(self, *args: Any) -> Any:
        module_spec = importlib.util.spec_from_file_location("rank_job", self.path)
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        return getattr(module, self.name)(*args)


def run_ranks(config: RunConfig, model_dir: Path, job, *args: Any) -> list[Any]:
    """`job(worker, spec, *args)` on every rank of the layout; results in rank order."""
    named = FileJob(inspect.getsourcefile(job), job.__name__)
    cuda = torch.cuda.is_available() and Device.choose(config.trainer).kind == "cuda"
    return ranks.run_ranks(config, model_dir, named, *args, cuda=cuda)
