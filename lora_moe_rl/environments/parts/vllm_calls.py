"""Calls of tools as vLLM's server reads them, by its parser of a model's own form:
`environment.calls=vllm:kimi_k2` is what `vllm serve --tool-call-parser kimi_k2` reads.

What the parser takes for no call is an answer, as it is for the server's clients; but one in which
a call was begun, by a mark that the parser itself looks for, is a call that cannot be read.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_moe_rl.environments.parts.tool_calls import VLLM, Call, ParseError
from lora_moe_rl.errors import ConfigError

TRIAL = "48151623"
# How vLLM's parsers name what begins a call: tool_call_start_token, TOOL_CALLS_BEGIN, tc_start, …
_BEGINS = re.compile(
    r"_?(tools?|tc)(_\w+)?_(start|begin|open|prefix)(_token)?|bot_(token|string)", re.I
)
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
        told = {"tools": list(schemas)} if schemas else {}  # vLLM takes no empty list
        request = ChatCompletionRequest.model_validate({"messages": [], **told})
        try:
            found = parser_class(cached, tools).extract_tool_calls(said, request)
        except Exception as error:
            raise ParseError(f"a call could not be read: {error}") from error
        if not found.tool_calls:
            _check_none_begun(marks, said)
            return "", []
        beside = thoughts + mark + (found.content or "")
        for token in special:
            beside = beside.replace(token, "")
        return beside.strip(), [_call(one, said) for one in found.tool_calls]

    try:
        parser = parser_class(cached, [])
        parser.extract_tool_calls(TRIAL, ChatCompletionRequest.model_validate({"messages": []}))
    except Exception as error:
        raise ConfigError(
            f"calls={VLLM}{name}: vLLM's parser cannot be used with this model: "
            f"{str(error) or type(error).__name__}"
        ) from error
    marks = begin_marks(parser)
    return read


def begin_marks(parser: Any) -> list[str]:
    """What begins a call in the form of a parser of vLLM's, longest first; none where it looks for
    no mark (pythonic), or for a word that an answer may have (functools)."""
    engine = getattr(parser, "_parser_engine", None)
    if engine is not None:
        config = engine.parser_engine_config
        names = {
            name
            for (state, name), step in config.transitions.items()
            if state.name == "CONTENT" and step.next_state.name.startswith("TOOL")
        }
        written = [config.terminals.get(name, ()) for name in names]
        found = {one for each in written for one in ([each] if isinstance(each, str) else each)}
    else:
        # Of itself, of what reads for it (hy_v4, step3p5), or of its file (lfm2, apertus).
        inner = (getattr(parser, name, None) for name in ("_extractor", "parser"))
        places = [parser, *inner, sys.modules[type(parser).__module__]]
        named = {(i, name) for i, one in enumerate(places) for name in dir(one)}
        texts = [getattr(places[i], name, None) for i, name in named if _BEGINS.fullmatch(name)]
        found = {one for one in texts if isinstance(one, str)}
    marks = {one for one in found if one and not one.isalnum()}
    return sorted(marks, key=lambda one: (-len(one), one))


def _check_none_begun(marks: Sequence[str], said: str) -> None:
    """Raises ParseError for an answer with the beginning of a call in it."""
    if any(mark in said for mark in marks):
        raise ParseError("a call was begun and could not be read")


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
