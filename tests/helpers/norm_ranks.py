"""A norm over all heads, of queries or keys that tensor-parallel ranks share; by itself, so that
ranks of their own find it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from lora_moe_rl.trainer.norm_over_heads import NormOverHeads

F, HEADS, D, EPS = 13, 6, 5, 1e-5


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x `[F, 1, HEADS, D]`, whose heads are of unlike sizes; a weight `[HEADS * D]`; the gradient
    of the result."""
    torch.manual_seed(0)
    sizes = torch.logspace(-2, 1, HEADS)[:, None]
    x, weight = torch.randn(F, 1, HEADS, D) * sizes, torch.rand(HEADS * D) + 0.5
    return x, weight, torch.randn(F, 1, HEADS, D)


def of_rank(rank: int, ranks: int, file: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the gradient of x, of a rank's heads."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=ranks)
    ps.initialize_model_parallel(tensor_model_parallel_size=ranks)
    config = SimpleNamespace(num_query_groups=HEADS, tensor_model_parallel_size=ranks)
    norm = NormOverHeads(hidden_size=D, config=config, eps=EPS, heads="num_query_groups")
    x, weight, gradient = tensors()
    norm.weight.data = weight.chunk(ranks)[rank]
    mine = x.chunk(ranks, dim=2)[rank].detach().requires_grad_()
    found = norm(mine)
    found.backward(gradient.chunk(ranks, dim=2)[rank])
    ps.destroy_model_parallel()
    dist.destroy_process_group()
    return found.detach(), mine.grad
