"""Sums of a tensor's bits, on its own device: what a checksum is where no byte may come to the
host."""

from __future__ import annotations

import torch

WORDS = 1 << 22  # summed up at once: 16 MiB of a tensor, for some 100 MiB of work


def bit_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Two sums, int64 `[2]` modulo 2^64, of a contiguous tensor's bytes as words of 32 bits: plain,
    and with each word times its place, counted from 1 and by 2 so that no bit of a change is lost.
    The device is not waited for. Reads the tensor once and writes some ten times its bytes, as
    numbers of 64 bits, a part at a time."""
    words = tensor.detach().reshape(-1).view(torch.uint8)
    if rest := len(words) % 4:
        words = torch.nn.functional.pad(words, (0, 4 - rest))
    words = words.view(torch.int32)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), WORDS):
        part = words[first : first + WORDS].long()
        stop = 2 * (first + len(part))
        places = torch.arange(2 * first + 1, stop, 2, device=part.device)
        sums += torch.stack([part.sum(), places.mul_(part).sum()])
    return sums
