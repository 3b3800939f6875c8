"""A policy that says what a test has written, in the tokens of the tiny models."""

from __future__ import annotations

from written_policy import WrittenPolicy

from lora_moe_rl.tiny.tokenizer import token_id

EOS = token_id("<eos>")


class Speaker(WrittenPolicy):
    """Says texts, each as its bytes and the end token; a text that ends in ... is cut off."""

    def __init__(self, *texts: str):
        super().__init__([[*t.encode(), *([] if t.endswith("...") else [EOS])] for t in texts])

    async def sample(self, token_ids, n, turn=None):
        (sample,), routes = await super().sample(token_ids, n, turn)
        said = sample.response_ids.tolist()
        object.__setattr__(sample, "text", bytes(t for t in said if t < 252).decode())
        reason = "stop" if said[-1] == EOS else "length"
        object.__setattr__(sample, "finish_reason", reason)
        return [sample], routes
