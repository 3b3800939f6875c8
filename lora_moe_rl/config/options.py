"""Command-line options that commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from lora_moe_rl.errors import ConfigError


def result_parser(command: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a command that prints tables, or one object with --json. `about` is printed as
    it is."""
    parser = argparse.ArgumentParser(
        prog=f"lora-moe-rl {command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser


def verify_parser(what: str, about: str) -> argparse.ArgumentParser:
    """The parser of `lora-moe-rl verify WHAT`, which takes a model and settings of its config."""
    parser = result_parser(f"verify {what}", about)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as adapter.rank=8")
    parser.add_argument(
        "--model", required=True, help="Hugging Face directory or hub name, or a tiny model's name"
    )
    return parser


def at_least(least: int, times: int = 1, most: int | None = None) -> Callable[[str], int]:
    """A type for add_argument: a whole number of at least so much, at most `most`, and a multiple
    of `times`."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"{value} is more than {most}")
        if value % times:
            raise argparse.ArgumentTypeError(f"{value} is no multiple of {times}")
        return value

    return number


positive, natural = at_least(1), at_least(0)


def positives(text: str) -> list[int]:
    """A type for add_argument: whole numbers of at least 1, with commas."""
    return [positive(word) for word in text.split(",")]


def above_zero(text: str) -> float:
    """A type for add_argument: a finite number above 0."""
    if not 0 < (value := float(text)) < math.inf:  # NaN is not above 0
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value


def not_negative(text: str) -> float:
    """A type for add_argument: a finite number of at least 0."""
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")
    return value


def names(text: str, option: str, what: str, known: Sequence[str] = ()) -> list[str]:
    """The names of a list with commas, each once. `what` is one of them, with its article. Raises
    ConfigError for an empty list and, where `known` are all there are, for another name."""
    found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise ConfigError(f"{option} names no {what.partition(' ')[2]}")
    for name in found:
        if known and name not in known:
            raise ConfigError(f"{option}: {name!r} is not {what}; there are {', '.join(known)}")
    return found
