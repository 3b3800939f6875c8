"""What a run is: one typed, frozen config, and its ways in: recipes, files, the command line.

Importing this package imports no torch.
"""

from lora_moe_rl.config.adapter import AdapterConfig
from lora_moe_rl.config.data import DataConfig, SetConfig, SourceConfig
from lora_moe_rl.config.engines import MismatchConfig, RefitConfig, ReplayConfig, RolloutConfig
from lora_moe_rl.config.reward import RewardConfig, RewardFunction, WeightedFunctionConfig
from lora_moe_rl.config.schema import (
    Aggregation,
    AlgorithmConfig,
    CheckpointConfig,
    EnvironmentConfig,
    LoggingConfig,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    TrackerConfig,
)
from lora_moe_rl.config.section import Section
from lora_moe_rl.config.trainer import TrainerConfig

__all__ = [
    "AdapterConfig",
    "Aggregation",
    "AlgorithmConfig",
    "CheckpointConfig",
    "DataConfig",
    "EnvironmentConfig",
    "LoggingConfig",
    "MismatchConfig",
    "ModelConfig",
    "RefitConfig",
    "ReplayConfig",
    "RewardConfig",
    "RewardFunction",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "Section",
    "SetConfig",
    "SourceConfig",
    "TrackerConfig",
    "TrainerConfig",
    "WeightedFunctionConfig",
]
