"""Settings as they stand on a command line."""

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override


def changed(*arguments: str, base: RunConfig | None = None) -> RunConfig:
    return override(base or RunConfig(), arguments)
