"""The process that calls tools: `python -m ...tool_worker FD MAX_CHARS TOOL TOOL...`.

It has a process of its own so that a tool that hangs can be ended, and one that ends its process or
takes all memory ends nothing else; what a tool prints goes nowhere. Imports no torch.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from pydantic import ValidationError, validate_call

from lora_moe_rl.calls.child import end_me_first, read_ahead, send, short
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import load_function
from lora_moe_rl.files.texts import encodable


def main(argv: list[str]) -> None:
    connection, most = Connection(int(argv[0])), int(argv[1])
    end_me_first()
    try:
        checked = {name: _checked(name, tool) for name, tool in load_tools(argv[2:]).items()}
    except ConfigError as error:
        send(connection, {"error": str(error)})
        return
    send(connection, {"async": False})
    jobs = read_ahead(connection)
    loop = asyncio.new_event_loop()  # one for all that is async, as clients keep to one
    while True:
        number, arguments, _ = jobs.get()  # the parent ends a call that is late
        outcome = answer(checked, arguments, most, loop.run_until_complete)
        send(connection, {"number": number, "outcome": outcome})


def _checked(name: str, tool: Callable) -> Callable:
    """Raises ConfigError for arguments of a type that pydantic knows nothing of."""
    try:
        return validate_call(tool)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"environment.tools: arguments of {name} cannot be checked: {why}"
        ) from error


def load_tools(specs: list[str]) -> dict[str, Callable]:
    """Tools by the names that a model calls them by. Raises ConfigError for two of one name."""
    tools: dict[str, Callable] = {}
    for spec in specs:
        function = load_function(spec)
        name = getattr(function, "__name__", "")
        if not name.isidentifier() or name in tools:
            raise ConfigError(
                f"environment.tools: {spec} is called {name!r}, which "
                + ("is no name" if name not in tools else "another tool is called too")
            )
        tools[name] = function
    return tools


def answer(
    tools: Mapping[str, Callable],
    call: dict[str, Any],
    most: int,
    wait: Callable[[Any], Any],
    written: Callable[[Any], str] | None = None,
) -> tuple[bool, str]:
    """Whether the tool did its work, and the text that it gave, cut to `most` characters; or what
    went wrong. `wait` runs a coroutine, `written` makes a text of what a tool returned (`as_text`
    by default)."""
    name = call["name"]
    if name not in tools:
        return False, f"there is no tool {short(name)}; there are {', '.join(tools)}"
    try:
        value = tools[name](*call["positional"], **call["named"])
        if inspect.iscoroutine(value):
            value = wait(value)
        return True, cut((written or as_text)(value), most)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return False, cut(as_text(f"{name}: {told}"), most)
    except BaseException as error:  # sys.exit() among them
        return False, cut(as_text(f"{name} raised {short(error)}"), most)


def as_text(value: Any) -> str:
    """A text as it is, anything else that JSON knows as JSON. Raises TypeError for the rest, None
    among it: a tool that returns nothing has most likely forgotten to."""
    if value is None:
        raise TypeError("returned None, not a text")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return encodable(text)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} [cut off after {most} characters]"


if __name__ == "__main__":
    main(sys.argv[1:])
