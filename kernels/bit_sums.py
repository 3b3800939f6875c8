"""A sum of a tensor's bits, on its own device: what a checksum is where no byte may come to the
host."""

from __future__ import annotations

import torch

WORDS = 1 << 22  # summed up at once: 16 MiB of a tensor, for some 100 MiB of work
# splitmix64's (Sebastiano Vigna), odd, as int64 has them.
FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 `[]` of a contiguous tensor's bytes as words of 32 bits: each is mixed with its
    place, and what comes of it is summed up modulo 2^64. No two words at two places are mixed to
    the same, so that a change within one word is found for certain; changes of several words that
    would make up for each other in a plain sum do not in this one, but for one chance in 2^64.

    The device is not waited for. Reads the tensor once and writes some ten times its bytes, as
    numbers of 64 bits, a part at a time. CPU and GPU find the same."""
    words = tensor.detach().reshape(-1).view(torch.uint8)
    if rest := len(words) % 4:
        words = torch.nn.functional.pad(words, (0, 4 - rest))
    words = words.view(torch.int32)
    places = torch.arange(min(len(words), WORDS), dtype=torch.int32, device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), WORDS):
        part = words[first : first + WORDS]
        total.mul_(FACTORS[0]).add_(_mixed(part, places[: len(part)]).sum())
    return total


def _mixed(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """int64 `[n, 1]`, one to one with (word, place): three rounds of a product, which takes bits
    up, and of what it has above, which comes down."""
    pairs = torch.stack([words, places], dim=1)  # the lower half of each number, and the upper
    numbers = pairs.view(torch.int64)
    for factor in FACTORS:
        numbers.mul_(factor)
        pairs[:, 0].bitwise_xor_(pairs[:, 1])
    return numbers
