"""`lora-moe-rl init`: a first recipe for a model, data, a reward and GPUs.

What is not given by a flag is asked for, on a terminal. Rows and reward are looked at as a run
looks at them, the fastest layout that fits is planned, and the recipe is written, loaded and
planned once more. More settings of the run follow as key=value:

    lora-moe-rl init mine.py --model qwen3-30b-a3b --gpus 8 --data rows.jsonl --reward exact_match
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import positive
from lora_moe_rl.config.overrides import override, parse_arguments
from lora_moe_rl.errors import ConfigError, LoraMoeRlError
from lora_moe_rl.planner import command as plan_command
from lora_moe_rl.planner import facts, written
from lora_moe_rl.planner.hardware import DEFAULT_GPU, GPUS

# Rewards of lora_moe_rl.rewards that need nothing but an answer; the others go by their whole name.
SHORT = ("exact_match", "number_match", "math_verify")


@dataclass(frozen=True)
class Answers:
    """`gpus` of the kind `gpu` for trainer and engines together; `words`: more settings."""

    model: str
    data: str
    reward: str
    gpus: int
    gpu: str
    words: tuple[str, ...] = ()

    def settings(self) -> list[str]:
        """The settings of data and reward, as key=value. String prompts get the model's chat
        template unless the words say otherwise."""
        source = "generator" if _is_function(self.data) else "path"
        found = [f"data.{source}={self.data}", f"reward.function={self.reward}"]
        if "chat_template" not in _section(self.words, "data"):
            found.append("data.chat_template=true")
        return [*found, *self.words]


def main(argv: Sequence[str]) -> int:
    """Returns 1 when nothing fits, and then writes nothing. Raises a LoraMoeRlError for answers
    that cannot be."""
    options = _parser().parse_intermixed_args(argv)
    path, words = _recipe(options.words)
    written.check_path(path, "init")
    answers = _answers(options, words)
    _look(answers)
    plan = ["--model", answers.model, "--gpus", str(answers.gpus), "--gpu", answers.gpu]
    code = plan_command.main([*plan, *answers.settings(), "--write", str(path)])
    if not code:
        print(f"\nlook at it, then:  lora-moe-rl check {path}\nand:               python {path}")
    return code


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="lora-moe-rl init",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("words", nargs="*", metavar="RECIPE.py or key=value")
    made.add_argument("--model", help="a published model (qwen3-30b-a3b), or a directory")
    about = "JSONL, CSV or parquet file, a data set of the hub, or file.py:function that yields"
    made.add_argument("--data", help=f"{about} rows")
    about = f"{', '.join(SHORT)}, module:function or file.py:function"
    made.add_argument("--reward", help=about)
    made.add_argument("--gpus", type=positive, help="GPUs of trainer and engines together")
    made.add_argument("--gpu", choices=list(GPUS), help=f"their kind ({DEFAULT_GPU})")
    made.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return made


def _recipe(words: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """Where the recipe is to be, mine.py unless it is named, and the settings."""
    paths = [word for word in words if "=" not in word]
    if len(paths) > 1:
        raise ConfigError(f"init writes one recipe, and was given {', '.join(paths)}")
    return Path(paths[0] if paths else "mine.py"), tuple(word for word in words if "=" in word)


def _answers(options: argparse.Namespace, words: tuple[str, ...]) -> Answers:
    """The flags, and answers to questions in their place. Raises ConfigError for flags that are
    missing where nobody can be asked, and for settings that have a flag."""
    if any("name" in layer for layer in parse_arguments(list(words))):
        raise ConfigError("init names the run by the recipe's file: leave out name=...")
    for section, key, flag in (
        ("model", "path", "--model"),
        ("data", "path", "--data"),
        ("data", "generator", "--data"),
        ("reward", "function", "--reward"),
    ):
        if key in _section(words, section):
            raise ConfigError(f"init takes {flag}, and not {section}.{key}=...")
    needed = {name: getattr(options, name) for name in ("model", "data", "reward", "gpus")}
    missing = [f"--{name}" for name, value in needed.items() if value is None]
    if missing and not sys.stdin.isatty():
        raise ConfigError(f"init needs {', '.join(missing)}; on a terminal it asks for them")
    models = ", ".join(name for name in facts.known() if not name.startswith("tiny_"))
    model = _ask(f"model, a directory or one of {models}", options.model, _model)
    data = _ask("data, a file, a data set of the hub or file.py:function", options.data, _data)
    reward = _ask(f"reward, {', '.join(SHORT)} or file.py:function", options.reward, _reward)
    gpus = _ask("GPUs, of trainer and engines together", options.gpus, _gpus)
    kind = options.gpu
    if kind is None:
        kind = _ask(f"their kind, {', '.join(GPUS)}", None if missing else DEFAULT_GPU, _gpu)
    return Answers(model, data, reward, gpus, kind, words)


def _ask[Value](question: str, given: object, read: Callable[[str], Value]) -> Value:
    """What `read` makes of a flag, or of an answer: asked again as long as it raises."""
    if given is not None:
        return read(str(given))
    while True:
        try:
            return read(input(f"{question}: ").strip())
        except EOFError as error:
            raise ConfigError(f"no answer to: {question}; or give it as a flag") from error
        except LoraMoeRlError as error:
            print(error)


def _model(text: str) -> str:
    facts.find(text)
    return text


def _data(text: str) -> str:
    if not text:
        raise ConfigError("a run needs data: a file with rows of prompt and answer")
    return text


def _reward(text: str) -> str:
    if text in SHORT:
        return f"lora_moe_rl.rewards:{text}"
    if not _is_function(text):
        raise ConfigError(
            f"{text!r} is no reward: one of {', '.join(SHORT)}, or a function as "
            "module:function or file.py:function"
        )
    return text


def _gpus(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{text!r} is not a number of GPUs")
    return int(text)


def _gpu(text: str) -> str:
    """The usual kind for an empty answer."""
    if text and text not in GPUS:
        raise ConfigError(f"{text!r} is not a known GPU; there are {', '.join(GPUS)}")
    return text or DEFAULT_GPU


def _is_function(text: str) -> bool:
    """Whether it names a function, and not a file or a data set of the hub."""
    return ":" in text.strip(":") and not Path(text).exists()


def _section(words: Sequence[str], name: str) -> dict:
    """What the words set of a section."""
    found: dict = {}
    for layer in parse_arguments(list(words)):
        value = layer.get(name, {})
        found |= value if isinstance(value, dict) else {"path": value}  # model=NAME
    return found


def _look(answers: Answers) -> None:
    """Reads the rows and calls the reward, as far as they are on this machine, and prints what was
    found. Raises ConfigError for what a run would refuse."""
    from lora_moe_rl.run.preflight import Preflight

    config = override(
        RunConfig(), [f"model.path={facts.find(answers.model).path}", *answers.settings()]
    )
    with Preflight(config, fetch=False) as ready:
        for finding in ready.findings():
            if finding.step not in ("data", "reward"):
                continue
            if finding.state == "error":
                raise ConfigError(finding.text)
            print(f"{finding.state:<8}{finding.step:<8}{finding.text}")
            if finding.step == "reward":
                return
