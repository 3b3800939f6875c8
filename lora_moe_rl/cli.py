"""The command line. Importing this file imports no torch, Ray, vLLM or transformers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lora_moe_rl import __version__
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError, LoraMoeRlError

TRACEBACK_VARIABLE = "LORA_MOE_RL_TRACEBACK"

# What a shell reports for a program ended by SIGINT.
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code_of(lambda: _dispatch(arguments), arguments)


def exit_code_of(command: Callable[[], int], arguments: Sequence[str]) -> int:
    """Run `command`; an error of ours becomes a message on stderr and its own exit code."""
    try:
        return command()
    except LoraMoeRlError as error:
        if "--traceback" in arguments or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        _complain(f"{error}")
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # `... --help | head`: nobody reads on. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _complain(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    console.print(Text("error: ", style="bold red"), Text(message), sep="")


def _dispatch(arguments: list[str]) -> int:
    rows = "\n".join(f"  {name:<10} {sentence}" for name, (_, sentence) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl",
        description="Reinforcement learning of Mixture-of-Experts models by training only LoRA "
        "adapters.",
        epilog=f"commands:\n{rows}\n\n`lora-moe-rl COMMAND --help` says more of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lora-moe-rl {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND")
    # Only up to the command: what follows is the command's own.
    end = next((i + 1 for i, word in enumerate(arguments) if word in COMMANDS), len(arguments))
    command, _ = COMMANDS[parser.parse_args(arguments[:end]).command]
    return command(arguments[end:])


TRAIN_USAGE = """\
usage: {prog} [key=value | --key value | @FILE ...] [--resume] [--dry-run]

{about}\
  key=value, --key value   set a key of the config; lists: a,b or [a, b]; nothing: null
  @FILE                    lay a YAML, JSON or TOML file of keys over the config
  --resume                 go on from the newest valid checkpoint of the run directory
  --dry-run                print the resolved config as YAML, and exit
  --traceback              show where an error was raised

"""
ABOUT_TRAIN = """\
Train. RECIPE is a Python file that defines `config`, or a YAML, JSON or TOML file (as config.yaml
of a run directory); without one, every key has its default.

"""


def train(arguments: Sequence[str], config: RunConfig | None = None, prog: str = "") -> int:
    """Train with `config`, or with that of the recipe among `arguments`."""
    from lora_moe_rl import recipe
    from lora_moe_rl.config_files import to_yaml
    from lora_moe_rl.overrides import override

    flags, settings = _split_flags(arguments)
    if flags & {"--help", "-h"}:
        from lora_moe_rl.config_help import config_help

        usage = f"python {prog}" if config else "lora-moe-rl train [RECIPE]"
        about = "" if config else ABOUT_TRAIN
        print(TRAIN_USAGE.format(prog=usage, about=about) + config_help(config or RunConfig()))
        return 0
    if config is None:
        target, settings = _split_target(settings)
        config = recipe.load_config(target)
    config = recipe.resolve(override(config, settings))
    if "--dry-run" in flags:
        print(to_yaml(config), end="")
        return 0
    from lora_moe_rl import controller

    controller.run(config, resume="--resume" in flags)
    return 0


TRAIN_FLAGS = {"--help", "-h", "--resume", "--dry-run", "--traceback"}


def _split_flags(arguments: Sequence[str]) -> tuple[set[str], list[str]]:
    flags = {word for word in arguments if word in TRAIN_FLAGS}
    return flags, [word for word in arguments if word not in TRAIN_FLAGS]


def _split_target(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe, and the settings: the one word that is neither a setting nor the value of one."""
    target, settings, value_next = None, [], False
    for word in words:
        if value_next or word.startswith(("--", "@")) or "=" in word:
            settings.append(word)
            value_next = not value_next and word.startswith("--") and "=" not in word
        elif target is None:
            target = word
        else:
            raise ConfigError(f"two recipes were given, {target} and {word}; a run has one")
    return target, settings


def _make_tiny(arguments: Sequence[str]) -> int:
    from lora_moe_rl.tiny.make import TINY_NAMES, make_tiny

    parser = argparse.ArgumentParser(
        prog="lora-moe-rl make-tiny",
        description="Make a tiny pre-trained model, as a Hugging Face directory: one or two "
        "minutes. It is cached: the second time it is only found.",
    )
    parser.add_argument("name", choices=TINY_NAMES)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to; by default the cache")
    parser.add_argument("--force", action="store_true", help="make it anew")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    print(make_tiny(options.name, out=options.out, force=options.force))
    return 0


def _doctor(arguments: Sequence[str]) -> int:
    from lora_moe_rl import doctor

    return doctor.main(arguments)


def _verify(arguments: Sequence[str]) -> int:
    from lora_moe_rl.verify import command

    return command.main(arguments)


def _bench(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl bench",
        description="Measure. step: one steady training step, by stage. memory: what training "
        "keeps in memory, adapters against all parameters. refit: an adapter into vLLM, against "
        "vLLM's own ways and a plain copy. kernels: expert adapters, merges and the route codec.",
    )
    parser.add_argument("what", choices=("step", "memory", "refit", "kernels"))
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="options of the benchmark")
    options = parser.parse_args(arguments)
    from importlib import import_module

    return import_module(f"lora_moe_rl.bench.{options.what}").main(options.rest)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train, "train adapters, from a recipe or a config file"),
    "make-tiny": (_make_tiny, "make a tiny MoE model to train"),
    "doctor": (_doctor, "print versions and devices, what is missing and how to mend it"),
    "verify": (_verify, "show that the function is the same under every layout of ranks"),
    "bench": (_bench, "measure one steady training step, its memory, or a refit"),
}
