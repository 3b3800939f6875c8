"""Calling a generator of rows with its arguments; and one that is there already."""

from __future__ import annotations

import copy
import difflib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any

from lora_moe_rl.calls.child import raised
from lora_moe_rl.config import SourceConfig
from lora_moe_rl.errors import ConfigError, DataError, LoraMoeRlError
from lora_moe_rl.files.importing import load_function


def open_generator(config: SourceConfig, seed: int) -> Iterator[Any]:
    """The rows of a generator, from the first. Raises ConfigError when it does not take the
    arguments of data.args, or needs others, and DataError, there or at a later row, for what it
    raises itself."""
    assert config.generator is not None
    generate = load_function(config.generator)
    return _told(config, partial(generate, **_arguments(generate, config, seed)))


def _told(config: SourceConfig, generate: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    number = 0
    try:
        for row in islice(generate(), config.limit):
            yield copy.deepcopy(row)  # some change one object from row to row
            number += 1
    except LoraMoeRlError:
        raise
    except Exception as error:  # the user's own code
        named = f"{config.key('generator')}={config.generator}"
        raise DataError(f"{named}, row {number}: {raised(error)}") from error


def _arguments(generate: Callable, config: SourceConfig, seed: int) -> dict[str, Any]:
    """What the generator is called with: data.args, and the run's seed if it takes one that
    data.args does not give."""
    parameters = inspect.signature(generate).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    key, generator = config.key, f"{config.key('generator')}={config.generator}"
    for name in config.args:
        if name not in named and not takes_any:
            close = difflib.get_close_matches(name, named, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            takes = f"it takes {', '.join(named)}" if named else "it takes none"
            raise ConfigError(
                f"{key('args')}.{name}: {generator} has no argument {name!r}; {hint}{takes}"
            )
    given = ({"seed": seed} if "seed" in named else {}) | config.args
    for name, parameter in named.items():
        if name not in given and parameter.default is parameter.empty:
            raise ConfigError(
                f"{generator} needs an argument {name!r}: set {key('args')}.{name}=VALUE"
            )
    return given


def from_environment() -> Iterator[dict[str, Any]]:
    """Rows for ever that ask nothing: the environment gives the whole prompt (environment=trl)."""
    while True:
        yield {"prompt": [{"role": "user", "content": ""}]}


def numbered(seed: int, tasks: int = 1000) -> Iterator[dict[str, Any]]:
    """Rows for ever that are numbers of tasks, below `tasks`, for an agent that knows what they are
    (environment=external)."""
    draw = random.Random(seed)
    while True:
        number = draw.randrange(tasks)
        yield {"prompt": [{"role": "user", "content": f"task {number}"}], "task": number}


def reasoning_gym(
    task: str | dict[str, Any], seed: int, **settings: Any
) -> Iterator[dict[str, Any]]:
    """Rows of a task of reasoning_gym (https://github.com/open-thought/reasoning-gym), with
    settings of its own, or of several in their weights, {"leg_counting": 2, "chain_sum": {"weight":
    1, "max_terms": 3}}; for ever: after its `size` rows come others, of a later seed. Each has a
    prompt, an answer and the metadata that the reward `lora_moe_rl.rewards:reasoning_gym` scores
    by. Raises ConfigError."""
    library = load_reasoning_gym()
    for name in [task] if isinstance(task, str) else task:
        _require_task(library, name)
    while True:
        try:
            rows = _rows_of_tasks(library, task, seed, settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"reasoning_gym's {task} refuses its settings: {error}") from error
        for row in rows:
            yield {"prompt": row["question"], "answer": row["answer"], "metadata": row["metadata"]}
        seed += len(rows)  # the library makes row i of `seed + i`


def _require_task(library: ModuleType, name: str) -> None:
    known = library.factory.DATASETS
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"reasoning_gym has no task {name!r}; {hint}It has {', '.join(sorted(known))}"
        )


def _rows_of_tasks(
    library: ModuleType, task: str | dict[str, Any], seed: int, settings: dict[str, Any]
) -> Any:
    if isinstance(task, str):
        return library.create_dataset(task, seed=seed, **settings)
    kind, several = library.composite.DatasetSpec, []
    for name, one in task.items():
        own = dict(one) if isinstance(one, dict) else {"weight": one}
        several.append(kind(name=name, weight=float(own.pop("weight", 1)), config=own))
    return library.create_dataset("composite", seed=seed, datasets=several, **settings)


def load_reasoning_gym() -> ModuleType:
    """The library, which is not among this project's own. Raises ConfigError without it."""
    try:
        return import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reasoning_gym cannot be imported ({error}): pip install reasoning-gym"
        ) from error
