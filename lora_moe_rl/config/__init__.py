"""What a run is: one typed, frozen config, and its ways in: recipes, files, the command line.

Importing this package imports no torch.
"""

from lora_moe_rl.config.schema import (
    AdapterConfig,
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EnvironmentConfig,
    LoggingConfig,
    ModelConfig,
    RefitConfig,
    ReplayConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    Section,
    TrackerConfig,
    TrainerConfig,
)

__all__ = [
    "AdapterConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "DataConfig",
    "EnvironmentConfig",
    "LoggingConfig",
    "ModelConfig",
    "RefitConfig",
    "ReplayConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "TrackerConfig",
    "TrainerConfig",
]
