"""The way in of a recipe: a Python file that defines `config`, and if it likes the reward and the
rows, and ends

    if __name__ == "__main__":
        recipe.main(config, __file__)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from lora_moe_rl import cli
from lora_moe_rl.config import RunConfig


def main(config: RunConfig, file: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Run `config` of the recipe `file` with the command line's settings, and exit."""
    arguments = sys.argv[1:] if argv is None else argv
    sys.exit(cli.exit_code_of(lambda: cli.train(arguments, config=config, prog=file), arguments))
