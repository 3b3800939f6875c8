"""Writes what TRL's AsyncDistillationTrainer makes of made-up logits to a file: the divergence
from a teacher's likeliest tokens at each place, and the gradient of their sum by the logits.

    make oracles         # tests/unit/trainer/distillation_oracle.json

Run in an environment of its own, as record.py. All in float64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from trl.experimental.async_distillation.async_distillation_trainer import (
    _add_tail_bucket,
    _jsd_divergence,
)

PLACES, SIZE = 7, 13
CASES = ((1, 0.0), (1, 1.0), (3, 0.0), (3, 0.3), (3, 1.0), (12, 0.5), (12, 1.0))  # top_k, beta


def case(logits: torch.Tensor, teacher: torch.Tensor, top_k: int, beta: float) -> dict[str, Any]:
    leaf = logits.clone().requires_grad_()
    likeliest = teacher.log_softmax(-1).topk(top_k)
    own = leaf.log_softmax(-1).gather(1, likeliest.indices)
    told = torch.ones_like(own, dtype=torch.bool)
    policy, support = _add_tail_bucket(own, told)
    wanted, _ = _add_tail_bucket(likeliest.values, told)
    each = _jsd_divergence(policy, wanted, beta, support).sum(-1)
    each.sum().backward()
    return {
        "beta": beta,
        "ids": likeliest.indices.tolist(),
        "logprobs": likeliest.values.tolist(),
        "divergence": each.tolist(),
        "gradient": leaf.grad.tolist(),
    }


def main() -> None:
    torch.manual_seed(0)
    logits, teacher = (2 * torch.randn(PLACES, SIZE, dtype=torch.float64) for _ in range(2))
    cases = [case(logits, teacher, *one) for one in CASES]
    found = {"trl": trl.__version__, "logits": logits.tolist(), "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
