"""The PEFT directory that a command writes: whole, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.errors import ConfigError, ExportError


def check_form(form: str | None, spec: AdapterSpec) -> None:
    """Raises ConfigError for a --form of experts where the adapter has none."""
    if form is not None and not spec.has_experts:
        raise ConfigError(
            f"--form {form} has no effect: there are no routed experts in this adapter; leave it "
            "out"
        )


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """What the disk refuses of `adapters.peft.write`, which then leaves nothing, becomes an
    ExportError."""
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"cannot write {out}: {error.strerror or error}; nothing was left there. Free some "
            "space, or name a directory on another disk"
        ) from error
