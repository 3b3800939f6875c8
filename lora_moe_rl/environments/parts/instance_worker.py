"""The processes that hold environments of TRL's kind: `python -m ...instance_worker FD MAX_CHARS
SPEC...`.

    run ──a connection──> this process, which has imported the files of SPEC...
                                └─ fork ─> a process for one environment, which answers on it

An environment has a process of its own, so that one that hangs can be ended and no other with it;
it is forked, since importing a user's file a thousand times takes long. Imports no torch.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pydantic import validate_call

from lora_moe_rl.calls.child import end_me_first, raised, read_ahead, send, short
from lora_moe_rl.calls.ending import MARK
from lora_moe_rl.environments.parts.tool_worker import answer
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import load_function
from lora_moe_rl.upstream.checks import require_attributes
from lora_moe_rl.upstream.transformers_import import import_transformers

RESERVED = ("reset", "get_reward", "get_turn_reward", "get_turn_state")  # methods that are no tools
MOST_OF_STATE = 1_000_000  # characters of an attribute that is sent, as JSON


def main(argv: list[str]) -> None:
    ours, most = socket.socket(fileno=int(argv[0])), int(argv[1])
    end_me_first()
    try:
        factories = {spec: load_function(spec) for spec in argv[2:]}
    except ConfigError as error:
        ours.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    ours.sendall(b"{}\n")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries its children
    while True:
        message, descriptors, *_ = socket.recv_fds(ours, 1, 1)
        if not message:
            return  # the run is gone; who holds an environment sees that too
        if os.fork() == 0:
            ours.close()
            os.set_inheritable(descriptors[0], False)
            _be_one(Connection(descriptors[0]), factories, most)
        os.close(descriptors[0])


def _be_one(connection: Connection, factories: dict[str, Callable], most: int) -> None:
    """Answers what is asked of one environment until the run closes the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ[MARK] = uuid.uuid4().hex  # what it starts can be found by it
    send(connection, {"pid": os.getpid(), "mark": os.environ[MARK]})
    jobs, held = read_ahead(connection), Held(factories, most)
    while True:
        asked = jobs.get()
        try:
            told = getattr(held, asked.pop("do"))(**asked)
        except BaseException as error:  # sys.exit() among them
            told = {"error": raised(error)}
        send(connection, told)


class Held:
    """One environment. What the methods return is sent as JSON."""

    def __init__(self, factories: dict[str, Callable], most: int):
        self._factories, self._most = factories, most
        self._loop = asyncio.new_event_loop()  # one for all that is async, as clients keep to one
        self._instance: Any = None
        self._tools: dict[str, Callable] = {}

    def make(self, factory: str) -> dict[str, Any]:
        self._instance = self._factories[factory]()
        self._tools = {tool.__name__: validate_call(tool) for tool in tools_of(self._instance)}
        return {}

    def describe(self) -> dict[str, Any]:
        """Its class, whether it gives rewards and tells of states, and its tools as chat templates
        want them, made by transformers."""
        get_json_schema = _schemas()
        if not inspect.ismethod(getattr(self._instance, "reset", None)):
            return {"error": f"{type(self._instance).__name__} has no method reset"}
        schemas = []
        for tool in tools_of(self._instance):
            try:
                schemas.append(get_json_schema(tool))
            except Exception as error:  # transformers has a class for each fault
                name = getattr(tool, "__qualname__", tool)
                return {
                    "error": f"no JSON schema can be made of {name}: {error}; a public method "
                    "needs a type for each argument, and a docstring with an Args section in "
                    "Google's style; a name with _ in front is no tool"
                }
        return {
            "kind": type(self._instance).__name__,
            "rewards": inspect.ismethod(getattr(self._instance, "get_reward", None)),
            "rewards_turns": inspect.ismethod(getattr(self._instance, "get_turn_reward", None)),
            "tells_states": inspect.ismethod(getattr(self._instance, "get_turn_state", None)),
            "schemas": schemas,
        }

    def reset(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        """What a user's random numbers come from is the same for the same `seed`."""
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        parameters = inspect.signature(self._instance.reset).parameters.values()
        if any(one.name == "seed" for one in parameters):
            row = {"seed": seed} | row
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            row = {one.name: row[one.name] for one in parameters if one.name in row}
        return _text("observation", self._waited(self._instance.reset(**row)))

    def call(self, name: str, positional: list[Any], named: dict[str, Any]) -> dict[str, Any]:
        """What a method returns is told as `str` has it, as TRL does."""
        asked = {"name": name, "positional": positional, "named": named}
        done, text = answer(self._tools, asked, self._most, self._waited, _as_trl)
        return {"done": done, "text": text}

    def end(self, rewarded: bool, shown: bool) -> dict[str, Any]:
        """Its reward if it gives one, and its attributes where reward functions are shown them."""
        reward = self._waited(self._instance.get_reward()) if rewarded else None
        state = state_of(self._instance) if shown else {}
        return {"reward": _number(reward), "state": state}

    def turn_reward(self) -> dict[str, Any]:
        """What the turn has earned whose calls were answered last; None: nothing is said of it."""
        return {"reward": _number(self._waited(self._instance.get_turn_reward()))}

    def get_turn_state(self) -> dict[str, Any]:
        """The state that the next turn begins in; None: nothing is said of it."""
        return _text("state", self._waited(self._instance.get_turn_state()))

    def _waited(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.iscoroutine(value) else value


def _schemas() -> Callable[[Callable], dict[str, Any]]:
    """transformers' `get_json_schema`. To see whether an argument is a tensor it would import
    torch, for seconds, and pydantic validates none."""
    import_transformers()
    from transformers.utils import chat_template_utils

    require_attributes(chat_template_utils, ("is_torch_available",), __name__)
    chat_template_utils.is_torch_available = (  # pyright: ignore[reportPrivateImportUsage]
        lambda: False
    )
    return chat_template_utils.get_json_schema


def tools_of(instance: Any) -> Sequence[Callable]:
    """Its public methods but for those that are reserved, by name, as TRL finds them."""
    found = inspect.getmembers(instance, predicate=inspect.ismethod)
    return [one for name, one in found if name not in RESERVED and not name.startswith("_")]


def state_of(instance: Any) -> dict[str, Any]:
    """Its attributes that JSON knows, and that are not too long."""
    found = {}
    for name, value in getattr(instance, "__dict__", {}).items():
        try:
            text = json.dumps(value, allow_nan=False)
        except Exception:  # a client, a lock, what holds itself
            continue
        if len(text) <= MOST_OF_STATE:
            found[name] = json.loads(text)
    return found


def _text(name: str, text: Any) -> dict[str, Any]:
    if not isinstance(text, str | None):
        return {"error": f"returned {short(text)}, not a text or None"}
    return {name: text and text.encode("utf-8", "replace").decode()}


def _number(reward: Any) -> float | None:
    return None if reward is None else float(reward)


def _as_trl(value: Any) -> str:
    return str(value).encode("utf-8", "replace").decode()


if __name__ == "__main__":
    main(sys.argv[1:])
