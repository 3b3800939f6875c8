"""The command line. Importing this file imports no torch, Ray, vLLM or transformers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal

from lora_moe_rl import __version__
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError, FileError, LoraMoeRlError
from lora_moe_rl.run.signals import INTERRUPTED, Stopped, interrupts

TRACEBACK_VARIABLE = "LORA_MOE_RL_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code_of(lambda: _dispatch(arguments), arguments)


def exit_code_of(command: Callable[[], int], arguments: Sequence[str]) -> int:
    """Run `command`; an error of ours becomes a message on stderr and its own exit code."""
    try:
        return command()
    except LoraMoeRlError as error:
        if wants_traceback(arguments):
            raise
        _complain(f"{error}")
        return error.exit_code
    except Stopped:
        return INTERRUPTED
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # `... --help | head`: nobody reads on. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def wants_traceback(arguments: Sequence[str]) -> bool:
    return "--traceback" in arguments or os.environ.get(TRACEBACK_VARIABLE) == "1"


def _complain(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    from lora_moe_rl.telemetry.streams import ERR

    console = Console(file=ERR, stderr=True, soft_wrap=True)
    console.print(Text("error: ", style="bold red"), Text(message), sep="")


def _dispatch(arguments: list[str]) -> int:
    rows = "\n".join(f"  {name:<12} {sentence}" for name, (_, sentence) in COMMANDS.items())
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
usage: {prog} [key=value | --key value | @FILE ...] [--resume] [--dry-run] [--quiet | --json]

{about}\
  key=value, --key value   set a key of the config; lists: a,b or [a, b]; nothing: null
  @FILE                    lay a YAML, JSON or TOML file of keys over the config
  --resume                 go on from the newest valid checkpoint of the run directory
  --resume=auto            the same if there is a run, else begin one: for what starts by itself
  --resume-from DIR        go on from this checkpoint (RUN/checkpoints/step-000100), as a new run in
                           a logging.run_dir of its own
  --supervise              start the run again, from its newest checkpoint, when its process dies
  --quiet                  say nothing but warnings and errors, on stderr
  --json                   print the record of each step as a line of JSON, and nothing else
  --dry-run                print the resolved config as YAML, look at what the run needs, and exit
  --traceback              show where an error was raised

"""
ABOUT_TRAIN = """\
Train. RECIPE is a Python file that defines `config`, or a YAML, JSON or TOML file (as config.yaml
of a run directory); without one, every key has its default.

"""


def train(arguments: Sequence[str], config: RunConfig | None = None, prog: str = "") -> int:
    """Train with `config`, or with that of the recipe among `arguments`."""
    from lora_moe_rl.config.files import to_yaml

    flags, settings = _split_flags(arguments, TRAIN_FLAGS | SPEAKING.keys())
    fork, settings = _split_fork(settings)
    if fork is not None and "--resume" in flags:
        raise ConfigError("--resume and --resume-from are both given; use one of them")
    if {"--supervise", "--dry-run"} <= flags:
        raise ConfigError("--supervise and --dry-run are both given; a dry run has no process")
    if "--dry-run" in flags and (spoken := SPEAKING.keys() & flags):
        raise ConfigError(f"{' '.join(spoken)} has no effect on a dry run, which has no steps")
    if SPEAKING.keys() <= flags:
        raise ConfigError("--quiet and --json are both given; --json says nothing else by itself")
    if flags & {"--help", "-h"}:
        from lora_moe_rl.config.help import config_help

        usage = f"python {prog}" if config else "lora-moe-rl train [RECIPE]"
        about = "" if config else ABOUT_TRAIN
        print(TRAIN_USAGE.format(prog=usage, about=about) + config_help(config or RunConfig()))
        return 0
    config = _resolved(settings, config, bool(flags & {"--resume", AUTO}))
    if "--supervise" in flags:
        again = [*sorted({*flags, "--resume"} - {"--supervise", AUTO}), *settings]
        return _supervise(config, arguments, again, prog)
    resume = "--resume" in flags or (AUTO in flags and _has_begun(config))
    fork = None if resume else fork  # with --resume=auto it is what a run begins with
    if "--dry-run" in flags:
        print(to_yaml(config), end="", flush=True)
        from lora_moe_rl.run.check import require
        from lora_moe_rl.telemetry import console

        require(config, resume, fork, console.warn)
        return 0
    from lora_moe_rl.run.start import run
    from lora_moe_rl.telemetry import console

    for flag in SPEAKING.keys() & flags:
        console.speak(SPEAKING[flag])
    with interrupts():  # the run itself takes over once its actors have started
        run(config, resume, fork)
    return 0


def _supervise(config: RunConfig, arguments: Sequence[str], again: list[str], prog: str) -> int:
    """`again`: the arguments with which the run goes on."""
    from lora_moe_rl.run.supervisor import supervise

    way_in = [prog] if prog else ["-m", "lora_moe_rl", "train"]
    command = [sys.executable, *way_in]
    first = [word for word in arguments if word != "--supervise"]
    return supervise(config, command + first, command + again)


def _has_begun(config: RunConfig) -> bool:
    """Whether the run directory holds a run to go on with."""
    from lora_moe_rl.files.run_dir import RunDir
    from lora_moe_rl.files.trouble import waited_for

    with waited_for(config.run_dir, resume=True):
        return RunDir(config, resume=True).has_steps


def _resolved(
    settings: list[str], config: RunConfig | None = None, resume: bool = False
) -> RunConfig:
    """`config`, or that of the recipe among `settings`, with the settings laid over it; to `resume`
    in the run directory that the recipe lies in, if it does."""
    from lora_moe_rl.config import recipes
    from lora_moe_rl.config.overrides import override

    if config is None:
        target, settings = _split_target(settings)
        config = recipes.load_config(target)
        if resume:
            config = recipes.where_it_lies(config, target)
    return recipes.resolve(override(config, settings))


CHECK_USAGE = """\
usage: lora-moe-rl check [RECIPE] [key=value | --key value | @FILE ...]

Looks at all that a run needs, in seconds and without starting it: files of the model, whether
settings fit it, rows, the reward on made-up completions, memory, GPUs and disk of this machine,
prompts as the model will get them. Fetches nothing. Exit code 2 when a run would be refused,
but for a run directory that holds a run, which --resume goes on with: a warning.
"""


def _check(arguments: Sequence[str]) -> int:
    flags, settings = _split_flags(arguments, {"--help", "-h", "--traceback"})
    if flags & {"--help", "-h"}:
        print(CHECK_USAGE, end="")
        return 0
    from lora_moe_rl.run.check import check

    return check(_resolved(settings))


EVAL_USAGE = """\
usage: lora-moe-rl eval [RUN | CHECKPOINT | RECIPE] [key=value | --key value | @FILE ...]

Asks the held-out data of eval.sets once, and trains nothing: of a run directory the newest valid
checkpoint, of RUN/checkpoints/step-000100 that one, of a recipe what a run of it would begin with
(model=DIR: another model; adapter.init_from=DIR: a PEFT adapter). The same sets, seeds and engines
as inside a run give the same samples. Metrics and samples go to a new directory,
RUN-eval-step-000100 or logging.run_dir.
"""


def _eval(arguments: Sequence[str]) -> int:
    flags, settings = _split_flags(arguments, {"--help", "-h", "--traceback"})
    if flags & {"--help", "-h"}:
        print(EVAL_USAGE, end="")
        return 0
    from lora_moe_rl.run.eval_target import read_target

    config, checkpoint = read_target(*_split_target(settings))
    from lora_moe_rl.run.start import evaluate

    with interrupts():
        evaluate(config, checkpoint)
    return 0


AUTO = "--resume=auto"
TRAIN_FLAGS = {"--help", "-h", "--resume", AUTO, "--supervise", "--dry-run", "--traceback"}
SPEAKING: dict[str, Literal["quiet", "json"]] = {"--quiet": "quiet", "--json": "json"}


def _split_flags(arguments: Sequence[str], known: set[str]) -> tuple[set[str], list[str]]:
    flags = {word for word in arguments if word in known}
    return flags, [word for word in arguments if word not in known]


def _split_fork(words: list[str]) -> tuple[Path | None, list[str]]:
    """The value of --resume-from, and the other words."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--resume-from":
            rest = words[i + 1 :]
            if not equals:
                value, rest = (rest or [""])[0], rest[1:]
            if not value:
                raise ConfigError("--resume-from needs a checkpoint: --resume-from DIR")
            return Path(value), [*words[:i], *rest]
    return None, words


def _split_target(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe, and the settings: the one word that is neither a setting nor the value of one."""
    from lora_moe_rl.config.keys import find_key

    target, settings, value_next = None, [], False
    for word in words:
        if value_next or word.startswith(("--", "@")) or "=" in word:
            settings.append(word)
            value_next = not value_next and word.startswith("--") and "=" not in word
        elif target is None:
            target = word
        elif find_key(word) is not None:
            raise ConfigError(f"{word} has no value: write {word}=VALUE")
        else:
            raise ConfigError(f"two recipes were given, {target} and {word}; a run has one")
    return target, settings


def _make_tiny(arguments: Sequence[str]) -> int:
    from lora_moe_rl.tiny.make import NAMES, make_tiny

    parser = argparse.ArgumentParser(
        prog="lora-moe-rl make-tiny",
        description="Make a tiny pre-trained model, as a Hugging Face directory: one or two "
        "minutes. It is cached: the second time it is only found.",
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to; by default the cache")
    parser.add_argument("--force", action="store_true", help="make it anew")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    print(make_tiny(options.name, out=options.out, force=options.force))
    return 0


VERIFY = {
    "layout": ("verify.command", "one function, gradient and checkpoint under every layout"),
    "algorithm": ("verify.algorithm", "an algorithm's loss and gradient, whatever the layout"),
    "refit": ("verify.refit", "vLLM serves what the trainer holds, by every way in"),
    "replay": ("verify.replay", "Megatron uses the routes that vLLM recorded"),
    "async": ("verify.in_flight", "every token is of its version, while versions are published"),
    "base": ("verify.base", "a quantised base: trainer, engine and plain numbers are one model"),
    "export": ("verify.export", "PEFT, vLLM and transformers compute what was trained"),
}
BENCH = {
    "step": ("bench.step", "one steady training step, by stage"),
    "start": ("bench.start", "from the command line to the first step"),
    "memory": ("bench.memory", "what training keeps in memory, adapters against all parameters"),
    "base": ("bench.base", "one base held once for trainer and engine: memory, start"),
    "planned": ("bench.planned", "the plan's memory against what ranks and engines hold"),
    "colocated": ("bench.colocated", "trainer and engine that take turns, against both at once"),
    "prompts": ("bench.prompts", "prompts computed once for all samples, against one each"),
    "lengths": ("bench.lengths", "samples of unlike lengths, attended to in one batch or several"),
    "head": ("bench.head", "logprobs of long sequences: memory and time, against all logits"),
    "dequant": ("bench.dequant", "a quantised base in the trainer, against one of numbers"),
    "refit": ("bench.refit", "an adapter into vLLM, against vLLM's own ways and a plain copy"),
    "transports": ("bench.transports", "a part of a version, by each transport, against a copy"),
    "replay": ("bench.replay", "router replay: bytes, codec, its share of a step, its effect"),
    "export": ("bench.export", "merging a checkpoint, against cp and PEFT"),
    "loading": ("bench.loading", "what each trainer rank reads of a checkpoint, and its memory"),
    "kernels": ("bench.kernels", "expert adapters, merges and the route codec"),
    "gpu": ("bench.gpu.command", "all of these that want a GPU, and more, in stages"),
    "scale": ("bench.scale", "what grows with samples, ranks, layers and experts, and how fast"),
    "algorithms": ("bench.algorithms", "every algorithm on the same recipe: reward and step time"),
    "overhead": ("bench.overhead", "what checks, copies and records take of a step"),
    "cost": ("bench.cost", "what a step takes with other algorithms, of the same work"),
    "agents": ("bench.agents", "agents of many turns by the endpoint, against vLLM's own server"),
    "tinker": ("bench.tinker", "a loop of Tinker's SDK by the service, against a run"),
    "async": ("bench.asynchronous", "the same work with rollouts ahead of training, and without"),
    "corrections": ("bench.corrections", "what corrections buy when samples are some steps old"),
}


def _one_of(command: str, table: dict[str, tuple[str, str]], arguments: Sequence[str]) -> int:
    """`lora-moe-rl COMMAND WHAT ...`: WHAT's module has a `main(argv)` of its own."""
    rows = "\n".join(f"  {name:<11} {sentence}" for name, (_, sentence) in table.items())
    parser = argparse.ArgumentParser(
        prog=f"lora-moe-rl {command}",
        epilog=f"`lora-moe-rl {command} WHAT --help` says more of each:\n{rows}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=list(table), metavar="WHAT")
    options = parser.parse_args(arguments[:1])
    module, _ = table[options.what]
    return _module(module)(arguments[1:])


def _module(name: str) -> Callable[[Sequence[str]], int]:
    def main(arguments: Sequence[str]) -> int:
        command = import_module(f"lora_moe_rl.{name}").main
        try:
            return command(arguments)
        except OSError as error:
            if error.filename is None:
                raise
            raise FileError(f"{error.filename}: {error.strerror}") from error

    return main


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "init": (_module("run.init_command"), "write a first recipe: model, data, reward, GPUs"),
    "train": (train, "train adapters, from a recipe or a config file"),
    "eval": (_eval, "evaluate a run, a checkpoint, an adapter or a model on held-out data"),
    "check": (_check, "look at all that a run needs, before it starts"),
    "make-tiny": (_make_tiny, "make a tiny MoE model to train"),
    "compare": (_module("telemetry.comparison"), "runs side by side: a table and a picture"),
    "view": (_module("page.command"), "look at runs and their samples, in a browser"),
    "timeline": (_module("telemetry.timeline_views"), "draw who waited for whom in a run"),
    "plan": (_module("planner.command"), "what fits where, from the model's config alone"),
    "launch": (_module("launch.command"), "write what starts a run on Slurm, KubeRay or by ssh"),
    "fetch": (_module("files.fetch"), "make a run directory from copies in storage, to go on in"),
    "export": (_module("export.command"), "write an adapter for PEFT and vLLM, or a merged model"),
    "dequantise": (_module("export.dequantise_command"), "write a quantised model as numbers"),
    "language-model": (
        _module("export.language_model_command"),
        "write the language model of one of text and images",
    ),
    "untie": (_module("export.untie_command"), "write a model with tied embeddings with a head"),
    "adapter": (_module("export.adapter_command"), "inspect, import, resize, combine adapters"),
    "serve": (_module("endpoint.command"), "serve a run's adapters, or a model, to OpenAI clients"),
    "tinker": (_module("service.command"), "train and sample for clients of Tinker's SDK"),
    "serve-check": (_module("verify.serve_check"), "serve an exported adapter and compare"),
    "chaos": (_module("chaos.command"), "train with planned faults, and see what becomes of each"),
    "doctor": (
        _module("upstream.doctor"),
        "print what is installed, what is missing and how to mend it",
    ),
    "verify": (
        lambda arguments: _one_of("verify", VERIFY, arguments),
        "show that all engines and layouts compute the same: " + ", ".join(VERIFY),
    ),
    "bench": (lambda arguments: _one_of("bench", BENCH, arguments), "measure: " + ", ".join(BENCH)),
}
