"""Stop strings: vLLM's front looks for them in what it has decoded, with our tokenizer.

    tokens   t0 "the" │ t1 " ans" │ t2 "wer." │ t3        the stop string is answer
    sample   t0         t1          t2                    ends with the token that completes it

A token is never cut: what was sampled is what is trained on, with the string and with whatever
stands behind it in its last token. The front sees each token by itself then, also of an engine
that hands tokens on together otherwise (rollout/gathered_outputs.py): what comes after the match
would be in the sample, and how much that is would depend on the time.
"""

from __future__ import annotations

from typing import Any

from lora_moe_rl.errors import RolloutError
from lora_moe_rl.upstream.checks import require_attributes, require_version

WHO = "lora_moe_rl/rollout/stop_strings.py"
UNFINISHED = "\ufffd"  # of a token that ends within a character


def give_tokenizer(llm: Any, tokenizer: Any) -> None:
    """Lets the front of an engine that was started without a tokenizer decode what is sampled.
    Raises ConfigError when vLLM is not as this file expects: it would find no string."""
    require_version("vllm", WHO)
    require_attributes(llm, ("output_processor",), WHO)
    require_attributes(llm.output_processor, ("tokenizer",), WHO)
    llm.output_processor.tokenizer = tokenizer


def check_ended(output: Any, tokenizer: Any) -> None:
    """Raises RolloutError when a sample of vLLM's went on after the stop string that ended it."""
    stop = output.stop_reason
    if not isinstance(stop, str):
        return
    before = tokenizer.decode(list(output.token_ids)[:-1], skip_special_tokens=False)
    if stop in before and not before.endswith(UNFINISHED):
        raise RolloutError(
            f"vLLM ended a sample of {len(output.token_ids)} tokens by the stop string {stop!r}, "
            "which stands before its last token already: what came after would be trained on"
        )
