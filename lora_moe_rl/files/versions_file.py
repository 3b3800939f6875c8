"""versions.json of a run directory: the packages that a run has trained with, since which step.
They are those of the machine that drives the run."""

from __future__ import annotations

from lora_moe_rl import __version__
from lora_moe_rl.files.since import Since
from lora_moe_rl.upstream.versions import TESTED, VLLM_BUILDS, installed

VERSIONS = Since("versions.json", "versions")  # {package: version}


def here() -> dict[str, str]:
    """The versions on this machine of what this project is tested with, as far as it is
    installed."""
    packages = [name for name in TESTED if name not in VLLM_BUILDS]
    found = {name: installed(name) for name in (*packages, *VLLM_BUILDS)}
    return {"lora_moe_rl": __version__} | {name: one for name, one in found.items() if one}
