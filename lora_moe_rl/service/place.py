"""Names of checkpoints: tinker://MODEL/KIND/NAME.

KIND is weights (adapters and Adam's moments), sampler_weights (adapters) or external_weights (files
of PEFT).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lora_moe_rl.errors import ServiceError

WEIGHTS, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
KINDS = (WEIGHTS, SAMPLER, EXTERNAL)
SCHEME = "tinker://"
# Clients put names into URLs as they are.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:=+@-]{0,127}")


def safe_name(name: str, what: str) -> str:
    """`name`, which is one part of a path. Raises ServiceError for any other."""
    if NAME.fullmatch(name) is None:
        raise ServiceError(
            f"{what} {name!r} is no name here: 1 to 128 letters, digits and . _ - : = + @, the "
            "first a letter, a digit or _"
        )
    return name


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is. Raises ServiceError for parts that are no names."""

    model: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        safe_name(self.model, "the model")
        safe_name(self.name, "the checkpoint")
        if self.kind not in KINDS:
            raise ServiceError(f"{self.kind!r} is no kind of checkpoint; {', '.join(KINDS)} are")

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        """Among those of its model."""
        return f"{self.kind}/{self.name}"


def place_of(path: str) -> Place:
    """Raises ServiceError for what is no tinker://MODEL/KIND/NAME."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3:
        raise ServiceError(f"{path!r} is not of the form {SCHEME}MODEL/KIND/NAME")
    return Place(*parts)
