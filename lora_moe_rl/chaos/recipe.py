"""The recipe of a run that has faults: the config of another one, and ranks that have the faults
that they are asked for (`hooks.py`). `command.py` sets the environment, without which nothing here
does anything."""

from __future__ import annotations

import os

from lora_moe_rl.config.recipes import load_config

RECIPE = "LORA_MOE_RL_CHAOS_RECIPE"  # its path, in the environment
HOOKED = "LORA_MOE_RL_CHAOS_HOOKED"  # whether ranks are asked for any

config = load_config(os.environ.get(RECIPE))

if HOOKED in os.environ:
    from lora_moe_rl.chaos.hooks import FaultyWorker
    from lora_moe_rl.cluster import trainer

    trainer.LoggedWorker = FaultyWorker
