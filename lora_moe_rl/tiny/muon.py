"""Muon for matrices and for stacks of them: the experts of a layer are one 3-D parameter, which
`torch.optim.Muon` refuses. It needs about a third of Adam's steps here."""

from __future__ import annotations

import torch


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon),
    with the step size of Liu et al. 2025 (arXiv:2502.16982), so that Adam's rates carry over."""

    def __init__(self, params, lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalize(param.grad.lerp(state["momentum"], group["momentum"]))
                param.add_(update, alpha=-group["lr"] * 0.2 * max(param.shape[-2:]) ** 0.5)


def orthogonalize(stack: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrix to each of [..., m, n], roughly: singular values end
    between 0.7 and 1.2 (Newton-Schulz with Jordan's quintic)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = stack.size(-2) > stack.size(-1)
    x = stack.mT if tall else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x
