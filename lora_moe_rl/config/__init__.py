"""What a run is: one typed, frozen config, and its ways in: recipes, files, the command line.

Importing this package imports no torch.
"""

from lora_moe_rl.config.adapter import AdapterConfig
from lora_moe_rl.config.checkpoint import CheckpointConfig
from lora_moe_rl.config.data import DataConfig, SetConfig, SourceConfig
from lora_moe_rl.config.engines import MismatchConfig, RefitConfig, ReplayConfig, RolloutConfig
from lora_moe_rl.config.evaluation import EvalConfig, EvalSetConfig
from lora_moe_rl.config.faults import FaultsConfig
from lora_moe_rl.config.model import ModelConfig
from lora_moe_rl.config.placement import PlacementConfig
from lora_moe_rl.config.reward import RewardConfig, RewardFunction, WeightedFunctionConfig
from lora_moe_rl.config.schedule import ScheduleConfig
from lora_moe_rl.config.schema import (
    Aggregation,
    AlgorithmConfig,
    EnvironmentConfig,
    LearnsFrom,
    LoggingConfig,
    Reweight,
    RunConfig,
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
    "EvalConfig",
    "EvalSetConfig",
    "FaultsConfig",
    "LearnsFrom",
    "LoggingConfig",
    "MismatchConfig",
    "ModelConfig",
    "PlacementConfig",
    "RefitConfig",
    "ReplayConfig",
    "RewardConfig",
    "RewardFunction",
    "Reweight",
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
