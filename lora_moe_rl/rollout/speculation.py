"""Speculative decoding: rollout.engine_args.speculative_config, in vLLM's own words.

Cheap guesses at the next tokens are verified in one forward of the policy, which keeps what it
would have sampled itself: samples, logprobs and routes are the policy's, whatever is guessed.

    fed        t0  g1  g2  g3        g: guesses, "draft tokens"
    sampled    t1  t2  t3'           g1 and g2 are taken, g3 is not: t3' stands in its place
    routes of  t0  t1  t2            of those that were fed and taken

What a guess is worth is in rollout/draft_acceptance and rollout/tokens_per_forward. Imports no
vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.keys import value_text
from lora_moe_rl.errors import ConfigError

NAME = "speculative_config"
SETTING = f"rollout.engine_args.{NAME}"

# Guessed from the tokens so far, without weights of a model.
FROM_TOKENS = ("ngram", "ngram_gpu", "suffix")
# Methods that vLLM's V2 model runner, which records routes on GPUs, does not have
# (`vllm/config/vllm.py`, _get_v2_model_runner_unsupported_features).
WITHOUT_ROUTES = (*FROM_TOKENS, "medusa", "mlp_speculator", "custom_class")


def engine_args(config: RunConfig) -> dict[str, Any]:
    """Keywords of vLLM's AsyncEngineArgs beside it: each answer tells what was guessed for it."""
    return {"per_request_spec_decode_metrics": "summary"} if given(config) is not None else {}


def given(config: RunConfig) -> Any:
    """What is set; None when nothing is."""
    return config.rollout.engine_args.get(NAME)


def method(config: RunConfig) -> str | None:
    """By what tokens are guessed; None when none are, or nothing is named (`check_speculation`)."""
    found = given(config)
    named = found.get("method") if isinstance(found, Mapping) else None
    return named if isinstance(named, str) else None


def guesser(config: RunConfig) -> Literal["tokens", "layers", "model"] | None:
    """What guesses: the tokens so far, the model's own prediction layers, or a model beside it;
    None where nothing does, or nothing is named."""
    named = method(config)
    if named is None:
        return None
    if named in FROM_TOKENS:
        return "tokens"
    return "layers" if named.endswith("mtp") else "model"


def check_speculation(config: RunConfig, shape: ModelShape, cpu: bool) -> None:
    """Raises ConfigError for guesses that vLLM would not take as the policy's samples, or that
    nobody has tried. `cpu`: it is vLLM's CPU build."""
    found = given(config)
    if found is None:
        return
    said = f"{SETTING}={value_text(found)}"
    if (named := method(config)) is None:
        raise ConfigError(
            f"{said} is no dictionary of vLLM's that names a method; as "
            '{"method": "mtp", "num_speculative_tokens": 1}'
        )
    if found.get("rejection_sample_method") == "synthetic":
        raise ConfigError(
            f"{said} takes guesses by a rate, and samples are no longer the policy's; leave "
            "rejection_sample_method out"
        )
    if cpu and shape.linear_layers:
        raise ConfigError(
            f"{said}: on the CPU the states of linear attention cannot go back to before a guess "
            "that is not taken; leave it out"
        )
    if not cpu and shape.moe_layers and named in WITHOUT_ROUTES:
        raise ConfigError(
            f"{said}: vLLM's model runner that records the routes of a MoE model on GPUs does not "
            f"have the method {named}; use mtp, eagle3 or a draft_model"
        )
    if guesser(config) == "tokens":
        return
    for key, value, off in (
        ("model.held_once", config.model.held_once, "off"),
        ("placement.gives_back", config.placement.gives_back, "cache"),
    ):
        if value != off:
            raise ConfigError(
                f"{said} loads a model that guesses beside the base, which {key}={value} does not "
                f"know; use {key}={off}"
            )
