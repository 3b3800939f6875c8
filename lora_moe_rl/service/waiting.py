"""Which samplers' weights wait on the ranks' hosts, and which of them go for others."""

from __future__ import annotations

from pathlib import Path

KEPT = 32


class Waiting:
    """`directories`: of samplers that were saved, where; of others None. `order`: those that wait,
    the one last that was published last."""

    def __init__(self) -> None:
        self.directories: dict[str, Path | None] = {}
        self.order: list[str] = []

    def __contains__(self, sampler: str) -> bool:
        return sampler in self.order

    def add(self, sampler: str, directory: Path | None) -> None:
        self.directories[sampler] = directory
        self.order.append(sampler)

    def again(self, sampler: str) -> None:
        """One that waits is published once more."""
        self.order.remove(sampler)
        self.order.append(sampler)

    def goes(self, newest: str) -> str | None:
        """One that is too much, which does not wait any more: those on the disk can be read again.
        `newest`: what engines that come back are proven against, which stays."""
        others = [one for one in self.order[:-1] if one != newest]
        on_disk = [one for one in others if self.directories.get(one)]
        nowhere_else = [one for one in self.order if not self.directories.get(one)]
        if on_disk and len(self.order) > KEPT:
            found = on_disk[0]
        elif len(nowhere_else) > KEPT:
            found = next(one for one in others if one in nowhere_else)
        else:
            return None
        self.order.remove(found)
        return found
