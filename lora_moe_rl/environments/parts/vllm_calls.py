"""Calls of tools as vLLM's server reads them, by its parser of a model's own form:
`environment.calls=vllm:kimi_k2` is what `vllm serve --tool-call-parser kimi_k2` reads.

What the parser takes for no call is an answer, as it is for the server's clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_moe_rl.environments.parts.tool_calls import VLLM, Call, ParseError
from lora_moe_rl.errors import ConfigError

TRIAL = "48151623"
Schemas = Sequence[Mapping[str, Any]]


def reader(name: str, tokenizer: Any) -> Callable[[str, Schemas], tuple[str, list[Call]]]:
    """Reads the text of a turn with its special tokens. Raises ConfigError where vLLM is not
    installed, and for a parser that it lacks, that wants another tokenizer or reads no text."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import (
            ChatCompletionRequest,
            ChatCompletionToolsParam,
        )
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(f"calls={VLLM}{name} wants vLLM here: {error}") from error
    known = sorted({*ToolParserManager.lazy_parsers, *ToolParserManager.tool_parsers})
    if name not in known:
        raise ConfigError(
            f"calls={VLLM}{name}: vLLM has no parser {name!r}; it has {', '.join(known)}"
        )
    parser_class = ToolParserManager.get_tool_parser(name)
    cached: Any = get_cached_tokenizer(tokenizer)
    special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)

    def read(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
        thoughts, mark, said = text.rpartition("</think>")
        tools: list[Any] = [ChatCompletionToolsParam.model_validate(schema) for schema in schemas]
        request = ChatCompletionRequest.model_validate({"messages": [], "tools": list(schemas)})
        try:
            found = parser_class(cached, tools).extract_tool_calls(said, request)
        except Exception as error:
            raise ParseError(f"a call could not be read: {error}") from error
        if not found.tools_called:
            return "", []
        beside = thoughts + mark + (found.content or "")
        for token in special:
            beside = beside.replace(token, "")
        return beside.strip(), [_call(one, said) for one in found.tool_calls]

    try:
        parser_class(cached, []).extract_tool_calls(
            TRIAL, ChatCompletionRequest.model_validate({"messages": []})
        )
    except Exception as error:
        raise ConfigError(
            f"calls={VLLM}{name}: vLLM's parser cannot be used with this model: "
            f"{str(error) or type(error).__name__}"
        ) from error
    return read


def _call(found: Any, text: str) -> Call:
    """Raises ParseError."""
    name, written = found.function.name, found.function.arguments
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError) as error:
        raise ParseError(f"the arguments of {name} are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ParseError(f"the arguments of {name} are not a JSON object")
    # Others are made up anew, and no model has seen them.
    return Call(name, named=arguments, id=found.id if found.id in text else None)
