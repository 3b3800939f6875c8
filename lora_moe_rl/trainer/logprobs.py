"""Log-probabilities of given tokens from vocabulary-parallel logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def token_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, vocab_size: int
) -> torch.Tensor:
    """logits `[1, T, V / tp]` (V may be padded), labels int64 `[1, T]` -> float32 `[T]`.

    The same function serves old, current and reference logprobs, at the rollout's temperature.
    """
    scaled = logits.float() / temperature
    _mask_padding(scaled, vocab_size)
    loss = vocab_parallel_cross_entropy(scaled.transpose(0, 1), labels.transpose(0, 1))
    return -loss.transpose(0, 1).squeeze(0)


def _mask_padding(logits: torch.Tensor, vocab_size: int) -> None:
    """A vocabulary padded for tensor parallelism has rows that no token owns; they get no mass."""
    first = ps.get_tensor_model_parallel_rank() * logits.shape[-1]
    if first + logits.shape[-1] > vocab_size:
        logits[..., max(0, vocab_size - first) :] = float("-inf")


@torch.no_grad()
def token_entropy(logits: torch.Tensor, temperature: float, vocab_size: int) -> torch.Tensor:
    """Entropy of each position's distribution, in nats: float32 `[T]`."""
    scaled = logits.squeeze(0).float() / temperature
    _mask_padding(scaled, vocab_size)
    group = ps.get_tensor_model_parallel_group()
    top = scaled.max(dim=-1).values
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    scaled -= top.unsqueeze(-1)
    weight = scaled.exp()
    sums = torch.stack([weight.sum(-1), (weight * scaled.clamp_min(-1e4)).sum(-1)])
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]
