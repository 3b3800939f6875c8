"""Mend for vLLM: a model that guesses tokens may stand beside one whose routes are recorded.

Of a draft model (speculative decoding) vLLM makes a config of its own, a copy of the engine's with
another model in it, and checks it as if that model's routes were recorded, too: it refuses each
(`_verify_aux_output_compatibility` in `vllm/config/vllm.py`). What records is bound to the engine's
own model alone (`vllm/distributed/aux_output_connector/worker.py`).
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "lora_moe_rl/rollout/draft_config.py"

stock_verify = VllmConfig._verify_aux_output_compatibility


def verify(self: Any) -> None:
    """The stock check, but of a draft model."""
    if self.model_config.runner_type != "draft":
        stock_verify(self)


def install() -> None:
    require_version("vllm", WHO)
    require_parameters(stock_verify, ("self",), WHO)
    VllmConfig._verify_aux_output_compatibility = verify
