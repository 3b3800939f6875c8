"""What the words of `lora-moe-rl plan` ask for: a model, a config and hardware."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override, parse_arguments
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.config.trainer import MOST_RANKS
from lora_moe_rl.errors import ConfigError, LoraMoeRlError
from lora_moe_rl.files.importing import load_file
from lora_moe_rl.planner import plan as plans
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.planner.facts import PACKED, Facts, Format, find
from lora_moe_rl.planner.hardware import Hardware
from lora_moe_rl.planner.layouts import Kept
from lora_moe_rl.planner.options import parser
from lora_moe_rl.planner.plan import Assumed
from lora_moe_rl.planner.proposal import LAYOUT_KEYS, NOT_KEPT, SEARCHED
from lora_moe_rl.planner.search import Search

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
    layout is to be searched for, with what is `kept` of it."""

    options: argparse.Namespace
    facts: Facts
    config: RunConfig
    assumed: Assumed
    has_layout: bool
    kept: Kept


def read(argv: Sequence[str]) -> Request:
    """Raises ConfigError for words that cannot be, and for a layout that does not divide the model,
    with the nearest layouts that divide and fit."""
    options = parser().parse_intermixed_args(argv)
    config, hardware = _base(options)
    facts = find(_model(options, config))
    hardware = _hardware(options, hardware)
    given = _given(_settings(options))
    asked = not options.model or "world_size" in given.get("trainer", {})
    if not asked:
        _require_search(given, hardware)
    config = _configured(facts, config, options, hardware, None if asked else given)
    if not asked and config.model.held_once == "on":
        raise ConfigError(
            "model.held_once=on: no layouts of a base that is held once are looked for; give the "
            "layout, with trainer.world_size, as recipes/kimi_k2_thinking.py does"
        )
    if config.offline and (options.search or options.write or not asked):
        raise ConfigError(
            f"plan looks for layouts that trainer and engines share, and algorithm="
            f"{config.algorithm.name} has no engines: name a recipe with a trainer.* layout, "
            "without --search and --write"
        )
    assumed = _assumed(facts, config, hardware or Hardware(_gpus(config)), options)
    kept = {} if asked else _kept(config, given)
    return Request(options, facts, config, assumed, asked, kept)


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


def _given(settings: list[str]) -> dict[str, dict[str, Any]]:
    """The settings by section."""
    given: dict[str, dict[str, Any]] = {}
    for layer in parse_arguments(settings):
        for section, keys in layer.items():
            given.setdefault(section, {}).update(keys if isinstance(keys, dict) else {})
    return given


def _require_search(given: Mapping[str, Mapping[str, Any]], hardware: Hardware | None) -> None:
    """Raises ConfigError where no layout can be searched for."""
    if hardware is None or not hardware.gpus:
        raise ConfigError(
            "plan --model needs --gpus, the number of GPUs, or a layout: trainer.world_size=..."
        )
    for section, keys in NOT_KEPT.items():
        for key in keys:
            if key in given.get(section, {}):
                raise ConfigError(
                    f"{section}.{key}={given[section][key]} is of a whole layout, and a search "
                    f"chooses it: leave it out, or give the layout, with trainer.world_size"
                )


def _kept(config: RunConfig, given: Mapping[str, Mapping[str, Any]]) -> Kept:
    """What was given of the layout that is searched for, as the config has read it."""
    return {
        section: {
            key: getattr(getattr(config, section), key) for key in keys if key in given[section]
        }
        for section, keys in SEARCHED.items()
        if section in given
    }


def _smallest(given: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Settings with which a config can be that has what is given of a layout: as few ranks as it
    takes. A search chooses others."""
    trainer, rollout = given.get("trainer", {}), given.get("rollout", {})
    tp, cp, pp, ep = (trainer.get(key, 1) for key in ("tp", "cp", "pp", "ep"))
    settings = []
    if all(isinstance(one, int) and 0 < one <= MOST_RANKS for one in (tp, cp, pp, ep)):
        settings.append(f"trainer.world_size={math.lcm(tp * cp, ep) * pp}")
    if (rollout.get("ep") or rollout.get("fully_sharded")) and "tp" not in rollout:
        settings.append("rollout.tp=2")
    return settings


def _configured(
    facts: Facts,
    config: RunConfig,
    options: argparse.Namespace,
    hardware: Hardware | None,
    to_keep: Mapping[str, Mapping[str, Any]] | None,
) -> RunConfig:
    """The config with the settings. `to_keep`: what they say of a layout to search for; None where
    they are one. Raises ConfigError for one that cannot be, with the nearest layouts that divide
    and fit."""
    settings = _settings(options)
    more = [] if to_keep is None else _smallest(to_keep)
    try:
        made = override(config, [*more, *settings])
        plans.check_layout(facts.shape, made)
        return made
    except LoraMoeRlError as error:
        trainer = _given(settings).get("trainer", {})
        wanted = {key: getattr(config.trainer, key) for key in LAYOUT_KEYS}
        wanted |= {key: trainer[key] for key in LAYOUT_KEYS if key in trainer}
        valid = all(isinstance(one, int) and 0 < one <= MOST_RANKS for one in wanted.values())
        if to_keep is not None or not valid or _is_of_engines(facts, config, settings):
            raise
        near = _nearest(facts, config, settings, wanted, hardware, options)
        if not near:
            raise
        raise ConfigError(f"{error}; {near}") from error


def _is_of_engines(facts: Facts, config: RunConfig, settings: list[str]) -> bool:
    """Whether the layout is one without what the settings say of engines."""
    try:
        made = override(config, _without(settings, "rollout.", SEARCHED["rollout"]))
        plans.check_layout(facts.shape, made)
    except LoraMoeRlError:
        return False
    return True


def _without(settings: list[str], section: str, keys: Sequence[str]) -> list[str]:
    starts = tuple(f"{section}{key}=" for key in keys)
    return [one for one in settings if not one.removeprefix("--").startswith(starts)]


def _nearest(
    facts: Facts,
    config: RunConfig,
    settings: list[str],
    wanted: dict[str, int],
    hardware: Hardware | None,
    options: argparse.Namespace,
) -> str:
    """The nearest layouts as a sentence, or '' when something else than the layout is wrong."""
    others = _without(settings, "trainer.", LAYOUT_KEYS)
    others = _without(others, "rollout.", ("tp", "dp", "nodes"))
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
