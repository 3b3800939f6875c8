"""What the words of `lora-moe-rl plan` ask for: a model, a config and hardware."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import above_zero, positive, result_parser
from lora_moe_rl.config.overrides import override, parse_arguments
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.config.trainer import MOST_RANKS
from lora_moe_rl.errors import ConfigError, LoraMoeRlError
from lora_moe_rl.files.importing import load_file
from lora_moe_rl.planner import plan as plans
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.planner.facts import PACKED, Facts, Format, find
from lora_moe_rl.planner.hardware import DEFAULT_GPU, GPUS, Hardware
from lora_moe_rl.planner.plan import Assumed
from lora_moe_rl.planner.search import LAYOUT_KEYS, Search

ABOUT = """\
What a run needs, from the model's config alone: memory of every trainer rank and engine rank,
bytes of refits and router decisions, operations a token, and seconds of a step by a roofline.
Needs no torch, GPU, weights or network. Exit code 1 when the run does not fit, 2 when the layout
does not divide the model.

    lora-moe-rl plan recipes/kimi_k2_1t.py adapter.rank=16
    lora-moe-rl plan --model kimi-k2 --gpus 64 --gpu-memory 80 --rank 32
    lora-moe-rl plan --model qwen3-30b-a3b --gpus 8 --search

With --model and no trainer.* or rollout.* layout, the fastest that is found is planned.
"""
# Of --model without a recipe: a reasoning run of moderate length, or of all that the model has.
LONGEST = 8192
WHAT_IF = (
    "rollout.gpu_memory_utilization=0.9",
    "trainer.micro_batch_tokens=8192",
    "trainer.recompute=full",
    "algorithm.prompts_per_step=64",
)


@dataclass(frozen=True)
class Request:
    """`has_layout`: whether words or recipe say how ranks are laid out; where they do not, the
    layout is to be searched for."""

    options: argparse.Namespace
    facts: Facts
    config: RunConfig
    assumed: Assumed
    has_layout: bool


def read(argv: Sequence[str]) -> Request:
    """Raises ConfigError for words that cannot be, and for a layout that does not divide the model,
    with the nearest layouts that divide and fit."""
    options = parser().parse_intermixed_args(argv)
    config, hardware = _base(options)
    facts = find(_model(options, config))
    hardware = _hardware(options, hardware)
    config, asked = _configured(facts, config, _settings(options), options, hardware)
    if config.offline and (options.search or options.write or not asked):
        raise ConfigError(
            f"plan looks for layouts that trainer and engines share, and algorithm="
            f"{config.algorithm.name} has no engines: name a recipe with a trainer.* layout, "
            "without --search and --write"
        )
    assumed = _assumed(facts, config, hardware or Hardware(_gpus(config)), options)
    return Request(options, facts, config, assumed, asked)


def parser() -> argparse.ArgumentParser:
    made = result_parser("plan", ABOUT)
    made.add_argument("words", nargs="*", metavar="RECIPE or key=value")
    made.add_argument("--model", help="a published model (kimi-k2), or a directory")
    made.add_argument("--gpus", type=positive, help="GPUs of the cluster")
    made.add_argument("--gpu", choices=list(GPUS), help=f"their kind ({DEFAULT_GPU})")
    about = "where it is not the kind's"
    made.add_argument("--gpu-memory", type=above_zero, metavar="GIB", help=about)
    about = "of a GPU to other nodes"
    made.add_argument("--bandwidth", type=above_zero, metavar="GB/S", help=about)
    about = "which a tensor-parallel group cannot exceed (8)"
    made.add_argument("--gpus-per-node", type=positive, help=about)
    about = "of a node's host (128 for each of its GPUs)"
    made.add_argument("--host-memory", type=above_zero, metavar="GIB", help=about)
    made.add_argument("--rank", type=positive, help="short for adapter.rank")
    formats = ("bf16", *PACKED)
    about = "the trainer's frozen base, as if held in this format (as it is trained)"
    made.add_argument("--base", choices=formats, help=about)
    about = "the engines' weights (as the checkpoint has them)"
    made.add_argument("--served", choices=formats, help=about)
    made.add_argument("--prompt-tokens", type=positive, help="mean (half of the most)")
    made.add_argument("--response-tokens", type=positive, help="mean (half of the most)")
    made.add_argument("--search", action="store_true", help="propose layouts, fastest first")
    made.add_argument("--top", type=positive, default=8, help="of --search: how many (8)")
    about = "build ranks of every stage without values and compare (needs torch and Megatron)"
    made.add_argument("--build", action="store_true", help=about)
    made.add_argument("--published", action="store_true", help="compare with published figures")
    about = "by what this run measured: the lag and the split of GPUs that keep both sides busy"
    made.add_argument("--run", type=Path, metavar="RUN", help=about)
    about = "write the planned run as a recipe"
    made.add_argument("--write", type=Path, metavar="RECIPE.py", help=about)
    made.add_argument("--png", type=Path, metavar="FILE", help="draw memory by class of rank")
    return made


def _base(options: argparse.Namespace) -> tuple[RunConfig, Hardware | None]:
    """The config before settings, and the hardware that a recipe names."""
    recipes = [word for word in options.words if "=" not in word and not word.startswith("@")]
    given = [*recipes, *([f"--model {options.model}"] if options.model else [])]
    if len(given) != 1:
        raise ConfigError(
            f"plan takes one recipe or --model, and was given {', '.join(given) or 'neither'}"
        )
    if options.model:
        facts = find(options.model)
        model = [f"model.path={facts.path}", "trainer.device=cuda"]
        if facts.remote_tokenizer:
            model.append("model.trust_remote_code=true")
        if not facts.shape.num_experts:
            model.append("replay.mode=off")
        longest = min(LONGEST, facts.config.get("max_position_embeddings", LONGEST))
        lengths = [
            f"model.max_length={longest}",
            f"rollout.max_response_tokens={longest * 3 // 4}",
        ]
        return override(RunConfig(), [*model, *lengths, *WHAT_IF]), None
    config = load_config(recipes[0])
    if not recipes[0].endswith(".py"):
        return config, None
    hardware = vars(load_file(Path(recipes[0]))).get("hardware")
    if hardware is not None and not isinstance(hardware, Hardware):
        raise ConfigError(
            f"{recipes[0]}: `hardware` is a {type(hardware).__name__}; it is a "
            "lora_moe_rl.planner.hardware.Hardware"
        )
    return config, hardware


def _settings(options: argparse.Namespace) -> list[str]:
    settings = [word for word in options.words if "=" in word or word.startswith("@")]
    return settings + ([f"adapter.rank={options.rank}"] if options.rank is not None else [])


def _model(options: argparse.Namespace, config: RunConfig) -> str:
    """The model that is planned. Raises ConfigError for two."""
    path = options.model or config.model.path
    for layer in parse_arguments(_settings(options)):
        found = layer.get("model", {})
        given = found.get("path", path) if isinstance(found, dict) else found
        if options.model and given != path:
            raise ConfigError(f"--model {path} and model.path={given} are two models: name one")
        path = given
    return path


def _hardware(options: argparse.Namespace, named: Hardware | None) -> Hardware | None:
    """The recipe's, with what the command line says instead."""
    given = {
        "gpus": options.gpus,
        "gpu": options.gpu,
        "gpu_memory": options.gpu_memory,
        "bandwidth": options.bandwidth,
        "gpus_per_node": options.gpus_per_node,
        "host_memory": options.host_memory,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if given.get("gpus", 0) > MOST_RANKS:
        raise ConfigError(f"--gpus {given['gpus']}: layouts of up to {MOST_RANKS} are looked for")
    if named is not None:
        return replace(named, **given)
    if "gpus" in given:
        return Hardware(**given)
    return None if not given else Hardware(0, **given)


def _configured(
    facts: Facts,
    config: RunConfig,
    settings: list[str],
    options: argparse.Namespace,
    hardware: Hardware | None,
) -> tuple[RunConfig, bool]:
    """The config with the settings, and whether it has a layout of its own. Raises ConfigError,
    with the nearest layouts that divide and fit, for one that cannot be."""
    given: dict = {}
    for layer in parse_arguments(settings):
        for section, keys in layer.items():
            given.setdefault(section, {}).update(keys if isinstance(keys, dict) else {})
    trainer = given.get("trainer", {})
    asked = not options.model or any(key in trainer for key in LAYOUT_KEYS)
    if not asked and hardware is None:
        raise ConfigError(
            "plan --model needs --gpus, the number of GPUs, or a layout: trainer.world_size=..."
        )
    if not asked and "cp" in trainer:  # as few ranks as there can be: the search takes others
        settings = [f"trainer.world_size={trainer['cp']}", *settings]
    try:
        made = override(config, settings)
        plans.check_layout(facts.shape, made)
        return made, asked
    except LoraMoeRlError as error:
        wanted = {key: getattr(config.trainer, key) for key in LAYOUT_KEYS}
        wanted |= {key: trainer[key] for key in LAYOUT_KEYS if key in trainer}
        if not all(isinstance(one, int) and 0 < one <= MOST_RANKS for one in wanted.values()):
            raise
        near = _nearest(facts, config, settings, wanted, hardware, options)
        if not near:
            raise
        raise ConfigError(f"{error}; {near}") from error


def _nearest(
    facts: Facts,
    config: RunConfig,
    settings: list[str],
    wanted: dict[str, int],
    hardware: Hardware | None,
    options: argparse.Namespace,
) -> str:
    """The nearest layouts as a sentence, or '' when something else than the layout is wrong."""
    layout = tuple(f"trainer.{key}=" for key in LAYOUT_KEYS)
    others = [
        s
        for s in settings
        if not s.removeprefix("--").startswith(
            (*layout, "rollout.tp=", "rollout.dp=", "rollout.nodes=")
        )
    ]
    plain = config.trainer.model_copy(update=dict.fromkeys(LAYOUT_KEYS, 1))
    try:
        other = override(config.model_copy(update={"trainer": plain}), others)
        plans.check_layout(facts.shape, other)
        hardware = hardware or Hardware(wanted["world_size"])
        assumed = _assumed(facts, other, hardware, options)
        found = Search(facts, other, assumed).nearest(wanted)
    except LoraMoeRlError:
        return ""
    if not found:
        return f"no layout of {wanted['world_size']} trainer ranks divides the model and fits"
    names = ", ".join(f"tp={t.tp} pp={t.pp} ep={t.ep}" for t in found)
    return f"the nearest layouts of {wanted['world_size']} trainer ranks that do and fit: {names}"


def _assumed(
    facts: Facts, config: RunConfig, hardware: Hardware, options: argparse.Namespace
) -> Assumed:
    hardware = hardware if hardware.gpus else replace(hardware, gpus=_gpus(config))
    weights: Format = "float32" if config.trainer.dtype == "float32" else "bf16"
    quantised = facts.checkpoint in PACKED
    served = options.served or (facts.checkpoint if quantised else weights)
    lengths = Lengths(
        _mean("prompt", options.prompt_tokens, config.max_prompt_tokens),
        _mean("response", options.response_tokens, config.max_response_tokens),
    )
    weights = cast(Format, options.base or facts.in_trainer(weights))
    return Assumed(hardware, weights, cast(Format, served), lengths)


def _mean(of: str, given: int | None, most: int) -> int:
    if given is not None and given > most:
        raise ConfigError(
            f"--{of}-tokens {given} is the mean, and a {of} of this run has {most} at most, by "
            "model.max_length and rollout.max_response_tokens"
        )
    return given or max(1, most // 2)


def _gpus(config: RunConfig) -> int:
    mine, theirs, shared = plans.gpus_of(config)
    return mine if shared else mine + theirs
