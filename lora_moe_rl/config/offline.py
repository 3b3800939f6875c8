"""What of a config is of no use to an algorithm that learns from the rows' own answers.

Nothing is sampled then: there are no engines, no versions that go to them, no routes to replay, no
rewards. Keys of these are refused where they were set, and are not in the config that a run saves.
"""

from __future__ import annotations

from lora_moe_rl.config.keys import value_text
from lora_moe_rl.config.plugins import ALGORITHMS
from lora_moe_rl.config.schema import RunConfig
from lora_moe_rl.config.section import is_set
from lora_moe_rl.errors import ConfigError

# Sections that exist only with an algorithm that learns from rollouts.
SAMPLING = ("rollout", "placement", "refit", "replay", "mismatch", "schedule", "environment")
SAMPLING += ("reward",)
# Keys of the section algorithm that do.
KEYS = ("mask_truncated", "draw_again", "equal_within", "reweight", "reweight_power")

# Keys of an eval set about samples.
SAMPLED = ("samples", "temperature", "top_p", "top_k", "max_response_tokens", "reward", "right_at")
SAMPLED += ("pass_at", "answer")
# Keys of the section model about what trainer and engines share.
SHARED = ("held_once", "held_dir")


def check_offline(config: RunConfig) -> None:
    """Raises ConfigError naming keys that have no effect, and the algorithm that makes it so."""
    name = config.algorithm.name
    if config.replay.mode != "off":
        raise ConfigError(
            f"replay.mode={config.replay.mode} replays routes, and algorithm={name} has none: it "
            "learns from the rows' own answers, which no engine has sampled; leave replay.mode out"
        )
    wanted = [(part, key) for part in SAMPLING for key in type(getattr(config, part)).model_fields]
    wanted += [("algorithm", key) for key in KEYS] + [("model", key) for key in SHARED]
    given = [
        f"{part}.{key}={value_text(getattr(section, key))}"
        for part, key in wanted
        if is_set(section := getattr(config, part), key) and (part, key) != ("replay", "mode")
    ]
    if given:
        have, them = ("has", "it") if len(given) == 1 else ("have", "them")
        raise ConfigError(
            f"{', '.join(given)} {have} no effect with algorithm={name}: it learns from the rows' "
            f"own answers, and nothing is sampled; leave {them} out"
        )
    _check_held_out(config)
    for data_set, one in config.data.sets.items():
        if one.reward is not None:
            raise ConfigError(
                f"data.sets.{data_set}.reward={one.reward} has no effect with algorithm={name}: it "
                "learns from the rows' own answers, and nothing is scored"
            )
    for source in config.sources().values():
        if source.answer_key is not None and config.learns_from == "pairs":
            raise ConfigError(
                f"{source.key('answer_key')}={source.answer_key} has no effect with "
                f"algorithm={name}, whose answers are the columns chosen and rejected"
            )


def _check_held_out(config: RunConfig) -> None:
    """Held-out rows are judged by their own answers: what says how to sample has no effect."""
    name, sources = config.algorithm.name, config.eval.sources()
    given = [("eval.prompts_at_once", config.eval, "prompts_at_once")]
    given += [(one.key(key), one, key) for one in sources.values() for key in SAMPLED]
    for key, section, field in given:
        if is_set(section, field):
            raise ConfigError(
                f"{key}={value_text(getattr(section, field))} has no effect with algorithm={name}: "
                "held-out rows are judged by their own answers, and nothing is sampled. To sample, "
                "evaluate the adapter with a recipe whose algorithm does: lora-moe-rl eval RECIPE "
                "adapter.init_from=RUN"
            )
    algorithm = ALGORITHMS.find(name)
    if sources and not algorithm.judges():
        raise ConfigError(
            f"eval.sets has no effect with algorithm={name}: {algorithm.__name__} writes no "
            "`held_out`, which says what is told of rows that are not trained on "
            "(docs/adding/algorithm.md)"
        )
