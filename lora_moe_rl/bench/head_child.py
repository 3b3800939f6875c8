"""One head of `bench head` in a process of its own: `ours|plain FOLDER TOKENS HIDDEN VOCABULARY`.

`ours` leaves its logprobs and gradient in the folder, `plain` compares its own with them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lora_moe_rl.bench.process import status_bytes

TEMPERATURE, ROUNDS = 0.8, 2
# hidden [T, H], weight [V, H], labels int64 [T] -> logprobs [T]
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from lora_moe_rl.trainer.head import LogProbs, Trained, Vocabulary

    rows, vocabulary = torch.arange(len(hidden)), Vocabulary(weight, 0, len(weight), None)
    return LogProbs.apply(hidden, labels, rows, rows, vocabulary, TEMPERATURE, Trained.LOGPROBS)[0]


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = hidden @ weight.t()
    return -torch.nn.functional.cross_entropy(logits / TEMPERATURE, labels, reduction="none")


def run(way: Way, tokens: int, hidden_size: int, vocabulary: int):
    """(Its figures, logprobs, gradient)."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size) * hidden_size**-0.5
    labels, factors = torch.randint(vocabulary, (tokens,)), torch.randn(tokens)
    # Imports, and memory that is taken once, come before memory is looked at.
    few, words = min(64, tokens), min(1024, vocabulary)
    small = torch.randn(few, hidden_size, requires_grad=True)
    way(small, weight[:words], labels[:few] % words).sum().backward()
    before, seconds = status_bytes("VmRSS"), []
    for _ in range(ROUNDS):
        hidden.grad, started = None, time.perf_counter()
        logprobs = way(hidden, weight, labels)
        (logprobs * factors).sum().backward()
        seconds.append(time.perf_counter() - started)
    figures = {"seconds": min(seconds), "bytes": status_bytes("VmHWM") - before}
    return figures, logprobs.detach(), hidden.grad


def main(name: str, folder: Path, *sizes: int) -> None:
    figures, logprobs, gradient = run({"ours": ours, "plain": plain}[name], *sizes)
    kept = folder / f"{sizes[0]}.pt"
    if name == "ours":
        torch.save({"logprobs": logprobs, "gradient": gradient}, kept)
    else:
        other = torch.load(kept, weights_only=True)
        for key, value in (("logprobs", logprobs), ("gradient", gradient)):
            off = (value - other[key]).abs().max() / value.abs().max()
            figures[f"{key}_off"] = float(off)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
