"""What an engine answers when it has taken an adapter version."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Receipt:
    """`version` is served. `seconds` by stage: assemble, pack, stage, commit, total."""

    version: int
    bytes: int
    tensors: int
    checksum: str
    seconds: dict[str, float] = field(default_factory=dict)
