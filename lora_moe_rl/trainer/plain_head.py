"""Log-probabilities of given tokens from all logits, by autograd: for a head that is trained, and
what `head.py` is compared with."""

from __future__ import annotations

import torch
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def token_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, vocab_size: int
) -> torch.Tensor:
    """logits `[1, T, V / tp]` (V may be padded), labels int64 `[1, T]` -> float32 `[T]`."""
    scaled = logits.float() / temperature
    _mask_padding(scaled, vocab_size)
    loss = vocab_parallel_cross_entropy(scaled.transpose(0, 1), labels.transpose(0, 1))
    return -loss.transpose(0, 1).squeeze(0)


def _mask_padding(logits: torch.Tensor, vocab_size: int) -> None:
    """A vocabulary padded for tensor parallelism has rows that no token owns; they get no mass."""
    first = ps.get_tensor_model_parallel_rank() * logits.shape[-1]
    if first + logits.shape[-1] > vocab_size:
        logits[..., max(0, vocab_size - first) :] = float("-inf")
