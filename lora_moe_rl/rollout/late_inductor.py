"""Mend for vLLM 0.31.0 on the CPU: it is imported without the kernels of torch's compiler.

`vllm/env_override.py` imports `torch._inductor.lowering`, and with it all of that compiler's
kernels, to add vLLM's own operators to a list; where it finds no compiler it goes on. The CPU build
compiles nothing here (`device.environment`).
"""

from __future__ import annotations

import sys

from lora_moe_rl.upstream.checks import require_attributes, require_version
from lora_moe_rl.upstream.versions import vllm_on_cpu

WHO = "lora_moe_rl/rollout/late_inductor.py"
COMPILER, TAKES_IT = "torch._inductor", "_patch_inductor_fallback_allow_list"


def import_vllm() -> None:
    """Of the CPU build what is imported first finds no compiler, what comes after it does. Another
    build is imported as ever, and so is this one where the compiler is there already. Raises
    ConfigError when vLLM is not the version we know."""
    if not vllm_on_cpu():
        return
    require_version("vllm", WHO)
    if COMPILER in sys.modules:
        return
    sys.modules[COMPILER] = None  # type: ignore[assignment]  # an ImportError for who imports it
    try:
        from vllm import env_override
    finally:
        del sys.modules[COMPILER]
    require_attributes(env_override, (TAKES_IT,), WHO)
