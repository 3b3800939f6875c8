"""A small frozen head and a loss on it, whole and cut over two ranks; by itself, so that ranks of
their own find it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lora_moe_rl.algorithms.parts.divergence import Divergence
from lora_moe_rl.trainer.head import LogProbs, Trained, Vocabulary
from lora_moe_rl.trainer.taught_head import TeacherTokens
from lora_moe_rl.trainer.wide_head import WideLogProbs

T, H, SIZE, PADDED = 41, 16, 97, 100
TEMPERATURE = 0.7


def tensors():
    """hidden, weight with rows that no token owns, labels, and the rows that count."""
    torch.manual_seed(0)
    hidden = torch.randn(T, H, requires_grad=True)
    weight = torch.randn(PADDED, H) * 0.5
    return hidden, weight, torch.randint(SIZE, (T,)), torch.randperm(T)[:29].sort().values


def clipped(logprobs: torch.Tensor) -> torch.Tensor:
    """A loss of clipped ratios with a KL, whose gradient is of all sizes and of both signs."""
    torch.manual_seed(1)
    old = logprobs.detach() + 0.3 * torch.randn(len(logprobs))
    advantages = torch.randn(len(logprobs))
    ratio = (logprobs - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (0.1 * (old - logprobs).exp() - surrogate + 0.1 * logprobs).sum()


def bonus(entropy: torch.Tensor) -> torch.Tensor:
    """Of all sizes and of both signs too."""
    torch.manual_seed(2)
    return (torch.randn(len(entropy), dtype=torch.float64).to(entropy) * entropy).sum()


def ours(hidden, labels, rows, vocabulary, trained=Trained.LOGPROBS):
    asked = hidden, labels, rows, rows, vocabulary, TEMPERATURE, trained
    logprobs, entropy, _ = LogProbs.apply(*asked)
    loss = clipped(logprobs[rows])
    if trained == Trained.ENTROPY_TOO:
        loss = loss + bonus(entropy[rows])
    loss.backward()
    outside = torch.ones(len(labels), dtype=torch.bool)
    outside[rows] = False
    assert not logprobs[outside].any() and not entropy[outside].any()
    return logprobs[rows], entropy[rows], hidden.grad


def of_rank(rank: int, file: str, trained: Trained) -> tuple[torch.Tensor, ...]:
    """Logprobs, entropy and the gradient of hidden, of the whole head."""
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
    hidden, weight, labels, rows = tensors()
    half = PADDED // 2
    mine = weight[rank * half : (rank + 1) * half]
    vocabulary = Vocabulary(mine, rank * half, SIZE, dist.group.WORLD)
    logprobs, entropy, gradient = ours(hidden, labels, rows, vocabulary, trained)
    dist.all_reduce(gradient)
    dist.destroy_process_group()
    return logprobs.detach(), entropy.detach(), gradient


def wide_tensors():
    """Of several targets at a place: labels, of which some are there twice, and weights."""
    torch.manual_seed(3)
    labels = torch.randint(SIZE, (T, 5))
    labels[::3, 1] = labels[::3, 0]
    return labels, torch.randn(T, 5) * (torch.rand(T, 5) > 0.3)


def wide_ours(vocabulary, fed_at=None):
    """Weighted sums, logprobs and the gradient of hidden."""
    hidden, _, _, rows = tensors()
    labels, weights = wide_tensors()
    at = rows if fed_at is None else fed_at
    asked = hidden, labels, rows, at, vocabulary, weights, TEMPERATURE, True
    sums, logprobs = WideLogProbs.apply(*asked)
    (0.1 * sums).sin().sum().backward()
    outside = torch.ones(len(labels), dtype=torch.bool)
    outside[rows] = False
    assert not sums[outside].any() and not logprobs[outside].any()
    return sums[rows], logprobs[rows], hidden.grad


def wide_of_rank(rank: int, file: str) -> tuple[torch.Tensor, ...]:
    """So of the whole head."""
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
    _, weight, *_ = tensors()
    half = PADDED // 2
    mine = weight[rank * half : (rank + 1) * half]
    sums, logprobs, gradient = wide_ours(Vocabulary(mine, rank * half, SIZE, dist.group.WORLD))
    dist.all_reduce(gradient)
    dist.destroy_process_group()
    return sums.detach(), logprobs.detach(), gradient


def taught_tensors():
    """A teacher's four likeliest tokens at each place, and its logprobs of them."""
    torch.manual_seed(4)
    every = torch.log_softmax(2 * torch.randn(T, SIZE), -1)
    likeliest = every.topk(4)
    return likeliest.indices, likeliest.values


def taught_ours(vocabulary, beta: float, fed_at=None):
    """The divergence and the gradient of hidden."""
    hidden, _, labels, rows = tensors()
    taught = TeacherTokens(Divergence(4, beta), *taught_tensors())
    at = rows if fed_at is None else fed_at
    asked = hidden, labels, rows, at, vocabulary, TEMPERATURE, Trained.LOGPROBS, True, taught
    _, _, divergence = LogProbs.apply(*asked)
    (0.3 * divergence).sin().sum().backward()
    outside = torch.ones(len(labels), dtype=torch.bool)
    outside[rows] = False
    assert not divergence[outside].any()
    return divergence[rows], hidden.grad


def taught_of_rank(rank: int, file: str, beta: float) -> tuple[torch.Tensor, ...]:
    """So of the whole head."""
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
    _, weight, *_ = tensors()
    half = PADDED // 2
    mine = weight[rank * half : (rank + 1) * half]
    vocabulary = Vocabulary(mine, rank * half, SIZE, dist.group.WORLD)
    divergence, gradient = taught_ours(vocabulary, beta)
    dist.all_reduce(gradient)
    dist.destroy_process_group()
    return divergence.detach(), gradient
