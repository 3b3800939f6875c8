"""What data sets need of each other, and what would be ignored."""

from __future__ import annotations

import math

from lora_moe_rl.config import RunConfig, SourceConfig
from lora_moe_rl.config.keys import value_text
from lora_moe_rl.config.section import is_set
from lora_moe_rl.data.rows import is_hub
from lora_moe_rl.errors import ConfigError


def check_data(config: RunConfig) -> None:
    """Raises ConfigError that names the key and the way out."""
    if config.data.sets:
        _check_sets(config)
    for source in config.sources().values():
        _check_source(source)


def _check_sets(config: RunConfig) -> None:
    """What stands beside data.sets, and would be ignored."""
    data = config.data
    first = next(iter(data.sets))
    for name in SourceConfig.model_fields:
        if is_set(data, name):
            raise ConfigError(
                f"data.{name}={value_text(getattr(data, name))} has no effect with data.sets, each "
                f"of which has its own: set data.sets.{first}.{name}, and leave data.{name} out or "
                f"set it to {value_text(SourceConfig.model_fields[name].default)}"
            )
    sets = (*data.sets.values(), *config.eval.sets.values())
    if config.reward.function is not None and all(one.reward for one in sets):
        raise ConfigError(
            f"reward.function={config.reward.function} has no effect: every set of data.sets has "
            "a reward of its own; set it to null"
        )


def _check_source(source: SourceConfig) -> None:
    """One data set."""
    path, generator = source.key("path"), source.key("generator")
    if source.path is not None and source.generator is not None:
        raise ConfigError(
            f"{path}={source.path} and {generator}={source.generator} are both set; prompts come "
            f"from one of them: set the other to null"
        )
    for column, (least, most) in source.filter.items():
        low, high = (-math.inf if least is None else least), (math.inf if most is None else most)
        if low > high or (least is None and most is None):
            fault = "lets no row through" if low > high else "has no bound"
            raise ConfigError(
                f"{source.key('filter')}={value_text(source.filter)}: {column} {fault}; write "
                "[least, most], with null for no bound"
            )
    if source.generator is not None and is_set(source, "order"):
        raise ConfigError(
            f"{source.key('order')}={source.order} has no effect with {generator}="
            f"{source.generator}, whose rows come as it gives them"
        )
    if source.args and source.generator is None:
        raise ConfigError(
            f"{source.key('args')}={value_text(source.args)} has no effect with {generator}=null: "
            "they are the arguments of a generator"
        )
    if source.system_prompt is not None and source.system_prompt_file is not None:
        raise ConfigError(
            f"{source.key('system_prompt')} and {source.key('system_prompt_file')}="
            f"{source.system_prompt_file} are both set; set one of them to null"
        )
    for name in ("split", "subset"):
        if is_set(source, name) and not (source.path is not None and is_hub(source.path)):
            raise ConfigError(
                f"{source.key(name)}={getattr(source, name)} has no effect with "
                f"{path}={value_text(source.path)}: it applies only to a hub data set"
            )
