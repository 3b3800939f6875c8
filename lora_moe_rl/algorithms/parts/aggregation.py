"""How the losses of single tokens become the loss of an optimizer step. Pure, numpy, on the host.

loss = sum over tokens of scale[sample] * value / divisor, where all counts are of tokens that stay
in the loss, over the whole optimizer step: micro-batches and data-parallel ranks change nothing.

    token-mean               each token weighs the same (DAPO, verl's default)
    token-sum                the same, divided by nothing: more tokens make a larger step
    seq-mean-token-mean      each sample weighs the same (GRPO as published, GSPO)
    seq-mean-token-sum       a sample weighs as many times as it has tokens
    seq-mean-token-sum-norm  the same, divided by the longest response (Dr. GRPO)
    prompt-mean              each prompt weighs the same (ScaleRL)

A conversation that became several samples (forks) is one sample here, with all their tokens: an
agent that begins anew more often weighs no more by it. A sample, or a prompt, of which no token
stays counts nowhere; one that stands in the loss several times counts as so many samples. The names
are verl's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lora_moe_rl.config import Aggregation


@dataclass(frozen=True)
class Scales:
    """`of_sample` float32 [n], of all its copies; `divisor` 0 when no token stays."""

    of_sample: np.ndarray
    divisor: float


def aggregate(
    how: Aggregation,
    kept: np.ndarray,
    groups: np.ndarray,
    copies: np.ndarray,
    max_response_tokens: int,
    conversations: np.ndarray | None = None,
) -> Scales:
    """kept: int [n], tokens of each sample that stay in the loss; 0 for samples of other optimizer
    steps. groups: int [n], the number of each sample's group. copies: int [n], how many times each
    sample stands in the loss. conversations: int [n], the number of each sample's conversation,
    whose samples stand equally often; None where each is one of its own."""
    of = np.arange(len(kept)) if conversations is None else conversations
    times, tokens = copies.astype(np.float32), kept * copies
    of_conversation, stands = np.bincount(of, weights=kept), np.zeros(len(kept), np.int64)
    stands[of[kept > 0]] = copies[kept > 0]
    samples = float(stands.sum())
    if how == "token-mean":
        return Scales(times, float(tokens.sum()))
    if how == "token-sum":
        return Scales(times, float(tokens.any()))
    if how == "seq-mean-token-sum":
        return Scales(times, samples)
    if how == "seq-mean-token-sum-norm":
        return Scales(times, samples * max_response_tokens)
    if how == "seq-mean-token-mean":
        return Scales(times * _inverse(of_conversation)[of], samples)
    of_group = np.bincount(groups, weights=tokens)
    return Scales(times * _inverse(of_group)[groups], float(np.count_nonzero(of_group)))


def _inverse(counts: np.ndarray) -> np.ndarray:
    return (1.0 / np.maximum(counts, 1)).astype(np.float32)
