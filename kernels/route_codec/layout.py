"""Where the packed ids of a token lie.

A token has one row of whole bytes with the ids of all its MoE layers, layer by layer, each id in
`bits` bits, the lowest bit first: id k of layer l takes the bits from `(l * top_k + k) * bits` on,
and bit b of a row is bit `b % 8` of its byte `b // 8`. What is left of the last byte is zero.

    Qwen3-30B-A3B    48 layers x 8 ids x 7 bits = 336 bytes a token
    Kimi-K2          60 layers x 8 ids x 9 bits = 540 bytes a token
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowLayout:
    """num_layers counts MoE layers. Raises ValueError for sizes that have no row."""

    num_layers: int
    top_k: int
    num_experts: int

    def __post_init__(self):
        if min(self.num_layers, self.top_k) < 1 or not 1 <= self.num_experts <= 2**15:
            raise ValueError(f"{self}: layers and top_k are at least 1, experts 1 to {2**15}")

    @property
    def bits(self) -> int:
        """ceil(log2(num_experts)), at least 1."""
        return max(1, (self.num_experts - 1).bit_length())

    @property
    def num_ids(self) -> int:
        return self.num_layers * self.top_k

    @property
    def row_bytes(self) -> int:
        return -(-self.num_ids * self.bits // 8)

    @property
    def wide(self) -> bool:
        """Whether an unpacked id takes two bytes and not one."""
        return self.num_experts > 256
