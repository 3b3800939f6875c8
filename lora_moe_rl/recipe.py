"""The way in of a recipe: a Python file that defines `config`, and if it likes the reward and the
rows, and ends

    if __name__ == "__main__":
        recipe.main(config, __file__)

A config that is wrong where the file makes it is told as the command line tells it: importing this
file is what sees to that, for the program that runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from lora_moe_rl import cli
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import is_of_config
from lora_moe_rl.config.recipes import wrong_in
from lora_moe_rl.errors import LoraMoeRlError


def main(config: RunConfig, file: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Run `config` of the recipe `file` with the command line's settings, and exit."""
    arguments = sys.argv[1:] if argv is None else argv
    sys.exit(cli.exit_code_of(lambda: cli.train(arguments, config=config, prog=file), arguments))


def _tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Python's `sys.excepthook`, which shows a traceback of whatever else is raised."""
    recipe = getattr(sys.modules["__main__"], "__file__", None)
    found = error
    if recipe is not None and is_of_config(error):
        found = wrong_in(recipe, error)
    if not isinstance(found, LoraMoeRlError) or cli.wants_traceback(sys.argv):
        _usual(kind, error, traceback)
        return

    def fail() -> NoReturn:
        raise found

    sys.exit(cli.exit_code_of(fail, ()))


_usual, sys.excepthook = sys.excepthook, _tell
