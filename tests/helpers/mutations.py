"""Seeded mutations of files and messages, and bounds inside which whatever reads them has to stay.

A mutation works on bytes, which finds what is wrong with lengths and ends, or on what the bytes
mean (a JSON value, the header of a safetensors file), which gets behind the first check.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MEMORY = 256 << 20  # bytes that reading one mutated input may take beyond what is there
INTEGERS = [0, 1, -1, 2, 127, 255, 256, 2**15, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
HOSTILE: list[Any] = [
    None, True, False, *INTEGERS, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "x", "\0", "\ud800", "../../etc/passwd", "/etc/passwd", "~nobody/x", "a" * 5000, "é" * 99,
    "__class__", "os.system('true')", "{{ cycler.__init__.__globals__ }}", "(?x)a#", "(" * 150,
    "a{99999999999}", "(a|a)*b", [], {}, [[]], [None], [1, 2, 3], {"a": {"b": 1}}, ["a", {}],
    "F32", "BF16", "U8", "lora",
]  # fmt: skip


def of_bytes(rng: random.Random, data: bytes) -> bytes:
    """`data` after one to four small changes."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = rng.choice(_BYTES)(rng, bytearray(data), rng.randrange(len(data) + 1))
    return bytes(data)


def _flip(rng: random.Random, data: bytearray, at: int) -> bytearray:
    if data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    return data


def _number(rng: random.Random, data: bytearray, at: int) -> bytearray:
    """A length, a count or an offset that is another."""
    width = rng.choice((1, 2, 4, 8))
    at -= at % width
    data[at : at + width] = (rng.choice(INTEGERS) % 2 ** (8 * width)).to_bytes(width, "little")
    return data


def _cut(rng: random.Random, data: bytearray, at: int) -> bytearray:
    return data[:at]


def _remove(rng: random.Random, data: bytearray, at: int) -> bytearray:
    del data[at : at + rng.randrange(1, 33)]
    return data


def _insert(rng: random.Random, data: bytearray, at: int) -> bytearray:
    data[at:at] = rng.randbytes(rng.randrange(1, 33))
    return data


def _repeat(rng: random.Random, data: bytearray, at: int) -> bytearray:
    part = data[at : at + rng.randrange(1, 65)]
    data[at:at] = part * rng.randrange(1, 20)
    return data


def _nest(rng: random.Random, data: bytearray, at: int) -> bytearray:
    data[at:at] = rng.choice((b"[", b'{"a":', b"(")) * rng.choice((10, 990, 100_000))
    return data


_BYTES = (_flip, _flip, _number, _number, _cut, _remove, _insert, _repeat, _nest)


def of_json(rng: random.Random, value: Any) -> Any:
    """`value`, which is changed, after one to three of its nodes became something else."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _one_node(rng, value)
    return value


def _one_node(rng: random.Random, value: Any) -> Any:
    parent, key = _anywhere(rng, value)
    if parent is None:
        return rng.choice(HOSTILE)
    kind = rng.randrange(6)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        name = rng.choice([one for one in HOSTILE if isinstance(one, str)])
        parent[name] = parent.pop(key)
    elif kind == 2:
        other, place = _anywhere(rng, value)
        with suppress(RecursionError):
            parent[key] = parent[key] if other is None else json.loads(json.dumps(other[place]))
    elif kind == 3 and isinstance(parent[key], int):
        parent[key] += rng.choice((-1, 1, 2**31, -parent[key] * 2, 2**40))
    elif kind == 4:
        for _ in range(rng.choice((3, 400, 900))):
            parent[key] = [parent[key]]
    else:
        parent[key] = rng.choice(HOSTILE)
    return value


def _anywhere(rng: random.Random, value: Any) -> tuple[Any, Any]:
    """(container, key) of a node that is not the top; (None, None) when there is none. What lies
    deep is as likely as what lies high."""
    parent = key = None
    while isinstance(value, dict | list) and value:
        if parent is not None and rng.random() < 0.25:
            break
        parent = value
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value = parent[key]
    return parent, key


def of_json_text(rng: random.Random, text: bytes) -> bytes:
    """JSON whose value is another, or that is damaged."""
    if rng.random() < 0.3:
        return of_bytes(rng, text)
    return _encoded(of_json(rng, json.loads(text)))


def of_safetensors(rng: random.Random, path: Path) -> None:
    """Mutates a safetensors file in place: its bytes, its header, or one of its tensors, which then
    claims terabytes that the file, with holes, does have."""
    data = path.read_bytes()
    kind = rng.random()
    if kind < 0.3:
        path.write_bytes(of_bytes(rng, data))
        return
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    size = len(data) - 8 - length
    if kind < 0.6:
        header = of_json(rng, header)
    elif kind < 0.8:
        name = rng.choice([name for name in header if name != "__metadata__"])
        _as_another(rng, header, name)
    else:
        size = _swell(rng, header, size)
    text = _encoded(header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with open(path, "r+b") as file:
        file.truncate(8 + len(text) + size)


def _as_another(rng: random.Random, header: dict[str, Any], name: str) -> None:
    """A dtype, a shape or a name that agrees with the file, and not with what is expected."""
    entry = header[name]
    kind = rng.randrange(3)
    if kind == 0:
        other = {"F32": ("I32", "U32"), "I64": ("F64", "U64")}.get(entry["dtype"], ("U8",))
        entry["dtype"] = rng.choice(other)
    elif kind == 1:
        entry["shape"] = rng.choice(
            (entry["shape"][::-1], [1, *entry["shape"]], [*entry["shape"], 1])
        )
        if rng.random() < 0.3:
            entry["dtype"], entry["shape"] = (
                "U8",
                [entry["data_offsets"][1] - entry["data_offsets"][0]],
            )
    else:
        header[rng.choice((name + "x", name[:-1], "base_model.model." + name))] = header.pop(name)


def _swell(rng: random.Random, header: dict[str, Any], size: int) -> int:
    """The last tensor of the file grows, and the file with it. Returns the size of the tensors."""
    last = max(
        (one for name, one in header.items() if name != "__metadata__"),
        key=lambda one: one["data_offsets"],
    )
    begin, end = last["data_offsets"]
    times = rng.choice((2**8, 2**24, 2**34))
    axis = rng.randrange(len(last["shape"]))
    last["shape"][axis] *= times
    grown = begin + (end - begin) * times
    if grown >= 2**42:  # what file systems take
        last["shape"][axis] //= times
        return size
    last["data_offsets"][1] = grown
    return grown


def _encoded(value: Any) -> bytes:
    """As JSON; what is too deep for Python to write is as deep, and nothing else."""
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 3000 + b"]" * 3000
    finally:
        sys.set_int_max_str_digits(4300)


@contextmanager
def bounded(folder: Path) -> Iterator[None]:
    """Inside, no more than MEMORY more can be had, nothing is executed or imported, and no file is
    opened that does not lie below `folder`, or for writing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    _WATCHED[:] = [str(folder)]
    try:
        yield
    finally:
        _WATCHED.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_WATCHED: list[str] = []
_EXECUTES = ("exec", "compile", "import", "os.", "subprocess.", "pickle.", "socket.", "ctypes.")
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.truncate")


class Executed(BaseException):
    """What was read made something happen. Not an Exception: nobody is to take it for a fault of
    the file."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _WATCHED:
        return
    if event == "open":
        path, mode, _ = arguments
        inside = isinstance(path, int) or str(path).startswith((_WATCHED[0], "/proc/meminfo"))
        if not inside or (mode is not None and set(mode) & set("wax+")):
            raise Executed(f"opened {path} ({mode})")
    elif event.startswith(_EXECUTES) and event not in _HARMLESS:
        raise Executed(f"{event} {arguments!r}"[:300])


sys.addaudithook(_hook)


def fuzz(
    count: int,
    seed: int,
    prepare: Callable[[random.Random], Any],
    read: Callable[[Any], Any],
    errors: tuple[type[Exception], ...],
    folder: Path,
) -> dict[str, int]:
    """Reads `count` inputs that `prepare` makes. What `read` raises is one of `errors`, with a
    message. Returns how many were `read` and how many `refused`. Raises AssertionError that lists
    what else was raised, once for each place; an input can be made again by its number."""
    counts, crashes = {"read": 0, "refused": 0}, {}
    for number in range(count):
        made = prepare(random.Random(f"{seed}-{number}"))
        try:
            with bounded(folder):
                read(made)
        except errors as error:
            counts["refused"] += 1
            assert str(error).strip(), f"input {number} of seed {seed}: {error!r} says nothing"
        except (Exception, Executed) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} in {last.filename}:{last.lineno}"
            crashes.setdefault(place, f"input {number} of seed {seed}: {error!r:.300}, {place}")
        else:
            counts["read"] += 1
    if crashes:
        raise AssertionError("\n".join(crashes.values()))
    return counts
