"""Hugging Face's forward in float64: what forwards in float32 are rounded from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Whatever asks for float32, as norms, routers and rotary embeddings do, gets float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(_wider, args), **{k: _wider(v) for k, v in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def logprobs(rank: int, folder: Path, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Of each token after the first, `[L - 1]` float64, by the model of a directory. A job of
    `run_processes`."""
    from lora_moe_rl.verify import hf_load

    model = hf_load.load(folder).double()
    model.set_experts_implementation("eager")  # the only one that multiplies float64
    found = []
    with torch.inference_mode(), InFloat64():
        for sequence in sequences:
            ids = torch.tensor([sequence])
            logits = model(ids).logits[0, :-1]
            if logits.dtype is not torch.float64:
                raise TypeError(f"a forward in float64 gave logits in {logits.dtype}")
            every = logits.log_softmax(-1)
            found.append(every.gather(-1, ids[0, 1:, None])[:, 0].numpy())
    return found
