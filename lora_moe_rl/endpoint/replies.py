"""Answers as OpenAI's API writes them, whole or as a stream of events.

The engines answer in whole turns: a stream is the finished turn in a few events. A sampled token
that is named stands as `token_id:17`, as vLLM has it, since a text need not tell which it was.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from lora_moe_rl.endpoint.sessions import Answer

DONE = "data: [DONE]\n\n"


def chat(answer: Answer, logprobs: bool) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": answer.message,
        "finish_reason": _why(answer),
        "logprobs": {"content": _logprobs(answer)} if logprobs else None,
    }
    return {**_head("chat.completion", answer), "choices": [choice], "usage": _usage(answer)}


def text(answer: Answer, logprobs: bool) -> dict[str, Any]:
    found = None
    if logprobs:
        tokens = _logprobs(answer)
        found = {
            "tokens": [one["token"] for one in tokens],
            "token_logprobs": [one["logprob"] for one in tokens],
            "top_logprobs": None,
            "text_offset": [],
        }
    choice = {
        "index": 0,
        "text": answer.sample.text,
        "finish_reason": answer.sample.finish_reason,
        "logprobs": found,
    }
    return {**_head("text_completion", answer), "choices": [choice], "usage": _usage(answer)}


def tokens(answer: Answer) -> dict[str, Any]:
    choice = {
        "index": 0,
        "token_ids": answer.sample.response_ids.tolist(),
        "finish_reason": answer.sample.finish_reason,
        "logprobs": {"content": _logprobs(answer)},
    }
    head = {"request_id": uuid.uuid4().hex, "model": _model(answer)}
    return {**head, "choices": [choice], "usage": _usage(answer)}


def chat_events(answer: Answer, logprobs: bool, include_usage: bool) -> Iterator[str]:
    whole = chat(answer, logprobs)
    (choice,) = whole["choices"]
    message = dict(choice["message"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    deltas = [{"role": message.pop("role")}, {k: v for k, v in message.items() if v is not None}]
    for delta in deltas:
        told = choice["logprobs"] if delta is deltas[-1] else None
        one = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": told}
        yield _event(whole, "chat.completion.chunk", [one])
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
    yield _event(whole, "chat.completion.chunk", [last])
    yield from _end(whole, "chat.completion.chunk", include_usage)


def text_events(answer: Answer, logprobs: bool, include_usage: bool) -> Iterator[str]:
    whole = text(answer, logprobs)
    yield _event(whole, "text_completion", whole["choices"])
    yield from _end(whole, "text_completion", include_usage)


def _end(whole: dict[str, Any], kind: str, include_usage: bool) -> Iterator[str]:
    if include_usage:
        yield _event(whole, kind, [], usage=whole["usage"])
    yield DONE


def _event(whole: dict[str, Any], kind: str, choices: list[Any], **more: Any) -> str:
    head = {name: whole[name] for name in ("id", "created", "model")}
    return f"data: {json.dumps({**head, 'object': kind, 'choices': choices, **more})}\n\n"


def _head(kind: str, answer: Answer) -> dict[str, Any]:
    name = f"{kind}-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": _model(answer)}


def _model(answer: Answer) -> str:
    """The model's name with the adapter version that sampled the last token."""
    version = int(answer.sample.versions[-1])
    name = answer.model.partition("@")[0]
    return f"{name}@{version}" if version >= 0 else name


def _why(answer: Answer) -> str:
    if answer.message.get("tool_calls") and answer.sample.finish_reason == "stop":
        return "tool_calls"
    return answer.sample.finish_reason


def _usage(answer: Answer) -> dict[str, int]:
    asked, said = answer.num_prompt, len(answer.sample.response_ids)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _logprobs(answer: Answer) -> list[dict[str, Any]]:
    sample = answer.sample
    pairs = zip(sample.response_ids.tolist(), sample.logprobs.tolist(), strict=True)
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in pairs
    ]
