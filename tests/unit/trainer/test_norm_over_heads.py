"""Norms over all heads of queries or keys, which tensor-parallel ranks share, against torch's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from norm_ranks import EPS, HEADS, D, of_rank, tensors

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.trainer.norm_over_heads import NormOverHeads
from lora_moe_rl.verify.processes import run_processes


def by_torch() -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: torch's RMSNorm of the heads as one row, and the gradient of x."""
    x, weight, gradient = (one.double() for one in tensors())
    x.requires_grad_()
    found = torch.nn.functional.rms_norm(x.flatten(2), (HEADS * D,), weight, EPS).view_as(x)
    found.backward(gradient)
    return found, x.grad


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_norm_as_one_and_give_its_gradient(ranks, tmp_path):
    """A rank's own sum of squares, or gradient of it, would be off by tenths."""
    found = run_processes(ranks, of_rank, ranks, str(tmp_path / "meeting"), timeout_s=240)
    for parts, expected in zip(zip(*found, strict=True), by_torch(), strict=True):
        whole = torch.cat(parts, dim=2)
        torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-6)


def test_heads_that_ranks_cannot_share_are_named():
    config = SimpleNamespace(num_query_groups=6, tensor_model_parallel_size=4)
    with pytest.raises(ConfigError, match="trainer.tp=4 does not divide .* num_query_groups=6"):
        NormOverHeads(hidden_size=D, config=config, eps=EPS, heads="num_query_groups")
