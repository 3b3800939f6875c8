"""What a store of tensors holds, and how one description differs from another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from lora_moe_rl.rollout.facts import Dtype

ALIGNMENT = 4096
FORMAT = 3
Shape = tuple[int, ...]
Element = Dtype | Literal["int32", "float8_e4m3fn", "uint8"]


class Kept(NamedTuple):
    """A tensor of a store."""

    dtype: Element
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Contents:
    """What a store holds: `key` says of what, and under which conditions it is read."""

    key: Mapping[str, str]
    tensors: Mapping[str, Kept]

    @property
    def places(self) -> dict[str, int]:
        """The first byte of each tensor."""
        found, offset = {}, 0
        for name, tensor in self.tensors.items():
            found[name] = offset
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return found

    @property
    def nbytes(self) -> int:
        """The size of the whole file."""
        *_, last = self.places
        end = self.places[last] + self.tensors[last].nbytes
        return -(-end // ALIGNMENT) * ALIGNMENT

    def described(self) -> dict[str, Any]:
        places = self.places
        return {
            "format": FORMAT,
            "key": dict(self.key),
            "bytes": self.nbytes,
            "tensors": {
                name: {"offset": places[name], "dtype": tensor.dtype, "shape": list(tensor.shape)}
                for name, tensor in self.tensors.items()
            },
        }


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    """What of one description is not as wanted, in words."""
    for name in sorted(found["key"].keys() | wanted["key"]):
        there, here = found["key"].get(name, "missing"), wanted["key"].get(name, "missing")
        if there != here:
            yield f"{name} is {there} there and {here} here"
    for name in ("format", "bytes"):
        if found.get(name) != wanted[name]:
            yield f"{name} is {found.get(name)} there and {wanted[name]} here"
    there, here = found.get("tensors", {}), wanted["tensors"]
    for name in sorted(there.keys() | here):
        if there.get(name) != here.get(name):
            yield f"{name} is {there.get(name)} there and {here.get(name)} here"
