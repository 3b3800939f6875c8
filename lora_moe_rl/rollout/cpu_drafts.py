"""Mend for vLLM on the CPU: a request's own temperature for tokens that are proposed.

With speculative decoding vLLM verifies several proposed tokens of a request at once, and repeats
its temperature, top_k and top_p for each of them. What does so on the CPU (`_expand_kernel_impl` in
`vllm/utils/cpu_triton_utils.py`) writes whole numbers into a copy, so that the proposed tokens are
sampled, and their logprobs taken, at whatever was in memory.
"""

from __future__ import annotations

import torch
from vllm.utils import cpu_triton_utils

from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "lora_moe_rl/rollout/cpu_drafts.py"
ARGUMENTS = ("output", "input_val", "cu_num_tokens", "replace_from", "replace_to", "MAX_NUM_TOKENS")


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """output `[T]` = input_val `[R]`, each as often as its request has proposed tokens, whose
    running sum cu_num_tokens `[R]` is; `replace_to` stands in for `replace_from`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(values.repeat_interleave(counts))


def install() -> None:
    """vLLM's workers register the op by this name, after plug-ins."""
    require_version("vllm", WHO)
    require_parameters(cpu_triton_utils._expand_kernel_impl, ARGUMENTS, WHO)
    cpu_triton_utils._expand_kernel_impl = expand
