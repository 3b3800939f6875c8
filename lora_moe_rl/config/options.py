"""Command-line options that commands share."""

from __future__ import annotations

import argparse


def result_parser(command: str, about: str | None) -> argparse.ArgumentParser:
    """Of a command that prints tables, or one object with --json. `about` is printed as it is."""
    parser = argparse.ArgumentParser(
        prog=f"lora-moe-rl {command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser


def verify_parser(what: str, about: str) -> argparse.ArgumentParser:
    """Of `lora-moe-rl verify WHAT`: a model, and settings of its config."""
    parser = result_parser(f"verify {what}", about)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as adapter.rank=8")
    parser.add_argument(
        "--model", required=True, help="Hugging Face directory or hub name, or a tiny model's name"
    )
    return parser


def positive(text: str) -> int:
    """A type for add_argument."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value
