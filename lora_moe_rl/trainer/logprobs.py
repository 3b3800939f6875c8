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


ROWS_AT_ONCE = 1024  # of logits in float32, of which there are several copies


@torch.no_grad()
def token_entropy(logits: torch.Tensor, temperature: float, vocab_size: int) -> torch.Tensor:
    """Entropy of each position's distribution, in nats: float32 `[T]`."""

    def scaled_rows():
        for rows in logits.squeeze(0).split(ROWS_AT_ONCE):
            scaled = rows.float() / temperature
            _mask_padding(scaled, vocab_size)
            yield scaled

    group = ps.get_tensor_model_parallel_group()
    top = torch.cat([scaled.max(dim=-1).values for scaled in scaled_rows()])
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    sums = []
    for scaled, highest in zip(scaled_rows(), top.split(ROWS_AT_ONCE), strict=True):
        scaled -= highest.unsqueeze(-1)
        weight = scaled.exp()
        sums.append(torch.stack([weight.sum(-1), (weight * scaled.clamp_min(-1e4)).sum(-1)]))
    total = torch.cat(sums, dim=-1)
    dist.all_reduce(total, group=group)
    return total[0].log() - total[1] / total[0]
