"""What a run is: one typed, frozen config. Importing this file imports no torch.

Every default stands in this folder and nowhere else. An unknown key is an error; an option that
does not apply to the chosen mode is an error that names both.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from lora_moe_rl.config import aliases
from lora_moe_rl.config.adapter import AdapterConfig
from lora_moe_rl.config.checkpoint import CheckpointConfig
from lora_moe_rl.config.data import DataConfig, SourceConfig
from lora_moe_rl.config.engines import MismatchConfig, RefitConfig, ReplayConfig, RolloutConfig
from lora_moe_rl.config.evaluation import EVAL, EvalConfig
from lora_moe_rl.config.faults import FaultsConfig
from lora_moe_rl.config.model import ModelConfig
from lora_moe_rl.config.placement import PlacementConfig
from lora_moe_rl.config.plugins import (
    ALGORITHMS,
    ENVIRONMENTS,
    TRACKERS,
    Kind,
    choices,
    settings_together,
)
from lora_moe_rl.config.records import LoggingConfig
from lora_moe_rl.config.reward import RewardConfig, RewardFunction
from lora_moe_rl.config.schedule import ScheduleConfig
from lora_moe_rl.config.section import LONGEST_WAIT_S, Section
from lora_moe_rl.config.trainer import TrainerConfig

# What weighs the same in a step's loss (algorithms/parts/aggregation.py), by verl's names.
Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]

# By what samples of a step are drawn once more (algorithms/parts/reweight.py), by verl's names.
Reweight = Literal["pow", "max_min", "max_random"]

# What an algorithm learns from: samples that engines make and rewards score, or what the rows
# themselves hold, one wanted answer each, or a chosen and a rejected one.
LearnsFrom = Literal["rollouts", "answers", "pairs"]


class AlgorithmConfig(Section):
    """What all algorithms have; each adds settings of its own (`algorithms/`)."""

    name: str = Field(
        "grpo",
        description="The algorithm: a file of algorithms/, or a class as file.py:Class. Each may "
        "have other defaults than those below (docs/presets.md).",
    )
    prompts_per_step: int = Field(16, ge=1, description="Prompts of one step.")
    group_size: int = Field(8, ge=1, description="Samples of each prompt.")
    epochs: int = Field(1, ge=1, description="Passes over the samples of a step.")
    mini_batches: int = Field(1, ge=1, description="Optimizer steps of one pass.")
    mask_truncated: bool = Field(
        False, description="Leave samples that hit the length limit out of the loss."
    )

    aggregation: Aggregation = Field(
        "token-mean", description="What weighs the same: tokens, samples or prompts."
    )
    draw_again: int = Field(
        0,
        ge=0,
        description="Draw another prompt for one whose rewards are all equal, at most this many "
        "times prompts_per_step in a step; 0: never.",
    )
    equal_within: float = Field(
        1e-6,  # SkyRL's value
        ge=0,
        description="Rewards of a prompt that are no further apart count as equal: those of a "
        "judge come with rounding.",
    )
    reweight: Reweight | None = Field(
        None,
        description="Draw the samples of a step once more by their rewards, with replacement "
        "(PF-PPO): by |reward| to a power (pow), the largest and the smallest alone (max_min), or "
        "the largest four times as often as the others (max_random); null: each stands once.",
    )
    reweight_power: float = Field(2.0, gt=0, description="That power, with reweight=pow.")  # verl's

    @model_validator(mode="after")
    def _power_is_read(self):
        power = self.reweight_power
        if self.reweight != "pow" and power != type(self).model_fields["reweight_power"].default:
            raise ValueError(
                f"algorithm.reweight_power={power:g} has no effect with algorithm.reweight="
                f"{self.reweight or 'null'}: it applies only with reweight=pow"
            )
        return self

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one step, each of which makes a version."""
        return self.epochs * self.mini_batches

    @property
    def on_policy(self) -> bool:
        """True when each step makes one update: the ratio is 1 and needs no old-logprob pass."""
        return self.updates_per_step == 1


class EnvironmentConfig(Section):
    """What all environments have; each adds settings of its own (`environments/`)."""

    name: str = Field(
        "single_turn",
        description="How a prompt becomes samples: a file of environments/, or file.py:Class.",
    )

    def absolute(self) -> dict[str, Any]:
        """The settings that depend on the current directory, so that they no longer do."""
        return {}


class TrackerConfig(Section):
    """What all trackers have; each adds settings of its own (`telemetry/trackers/`)."""

    name: str = Field(
        "none",
        description="Where metrics go beside metrics.jsonl: a file of telemetry/trackers/, or "
        "file.py:Class; or several, separated by commas.",
    )
    end_timeout_s: float = Field(
        600.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="How long a run that ends waits for what its trackers have not sent yet.",
    )

    @model_validator(mode="after")
    def _somebody_is_waited_for(self):
        default = type(self).model_fields["end_timeout_s"].default
        if self.name == "none" and self.end_timeout_s != default:
            raise ValueError(
                f"tracker.end_timeout_s={self.end_timeout_s:g} has no effect with tracker=none"
            )
        return self


def _settings_of(kind: Kind, common: type[Section], value: Any) -> Any:
    """`value` as settings of the plug-in, or of the several, that it names; `NAME` is short for
    `{name: NAME}`."""
    if isinstance(value, str):
        value = {"name": value}
    if type(value) is common:
        value = value.model_dump(exclude_unset=True)
    if not isinstance(value, dict):
        return value
    name = value.get("name", common.model_fields["name"].default)
    if not isinstance(name, str):
        raise ValueError(f"{kind.key}={name!r} is not a name")
    plugins = kind.chosen(name)
    one = plugins[0] if len(plugins) == 1 else None
    settings = one.Settings if one else settings_together(kind.key, tuple(plugins))
    section = kind.key.removesuffix(".name")
    for key in value.keys() - settings.model_fields.keys():
        others = [n for n, other in choices(section).items() if key in other.model_fields]
        if others and not (one and one.composed):
            raise ValueError(
                f"{section}.{key}={value[key]} is no setting of {kind.key}={name}: it is one of "
                f"{', '.join(others)}"
            )
        if one and ":" in name and not one.composed and not aliases.find(f"{section}.{key}"):
            raise ValueError(_unknown_of_ones_own(section, key, settings))
    return one.read(value) if one else settings.model_validate(value)


def _unknown_of_ones_own(section: str, key: str, settings: type[Section]) -> str:
    """No key of the plug-ins that are here may be meant, which is what others are told."""
    names = list(settings.model_fields)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {section}.{near[0]}?" if near else f"there are {', '.join(names)}"
    return f"unknown config key '{section}.{key}'; {hint}"


class RunConfig(Section):
    """One run. Recipes build it, the command line overrides it, the run directory keeps it."""

    name: str = Field("run", description="Name of the run.", pattern=r"^[A-Za-z0-9._-]+$")
    # numpy's and vLLM's are of 32 bits.
    seed: int = Field(0, ge=0, lt=1 << 32, description="Seed of adapters, data order and sampling.")
    model: ModelConfig = Field(ModelConfig(), description="The frozen base model.")
    adapter: AdapterConfig = Field(AdapterConfig(), description="What is trained.")
    trainer: TrainerConfig = Field(TrainerConfig(), description="Megatron-core.")
    rollout: RolloutConfig = Field(RolloutConfig(), description="vLLM.")
    placement: PlacementConfig = Field(PlacementConfig(), description="Devices, shared or not.")
    refit: RefitConfig = Field(RefitConfig(), description="Moving adapters into vLLM.")
    replay: ReplayConfig = Field(ReplayConfig(), description="Router replay.")
    mismatch: MismatchConfig = Field(
        MismatchConfig(), description="How far trainer and engines may be apart."
    )
    algorithm: SerializeAsAny[AlgorithmConfig] = Field(
        AlgorithmConfig(), description="The RL algorithm."
    )
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="Who waits for whom.")
    environment: SerializeAsAny[EnvironmentConfig] = Field(
        EnvironmentConfig(), description="How prompts become samples."
    )
    data: DataConfig = Field(DataConfig(), description="Prompts.")
    reward: RewardConfig = Field(RewardConfig(), description="Rewards.")
    eval: EvalConfig = Field(EvalConfig(), description="Held-out evaluation.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Checkpoints.")
    faults: FaultsConfig = Field(FaultsConfig(), description="A run that is dead or stuck.")
    logging: LoggingConfig = Field(LoggingConfig(), description="Run directory and console.")
    tracker: SerializeAsAny[TrackerConfig] = Field(TrackerConfig(), description="Trackers.")

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_name(cls, value: Any) -> Any:
        """`model=NAME` is short for `model.path=NAME`."""
        return {"path": value} if isinstance(value, str) else value

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm_settings(cls, value: Any) -> Any:
        return _settings_of(ALGORITHMS, AlgorithmConfig, value)

    @field_validator("environment", mode="before")
    @classmethod
    def _environment_settings(cls, value: Any) -> Any:
        return _settings_of(ENVIRONMENTS, EnvironmentConfig, value)

    @field_validator("tracker", mode="before")
    @classmethod
    def _tracker_settings(cls, value: Any) -> Any:
        return _settings_of(TRACKERS, TrackerConfig, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the config by value: the settings of one's own algorithm are of a class that no
        other process can import by its module's name."""
        return RunConfig.model_validate, (self.model_dump(exclude_unset=True),)

    @model_validator(mode="after")
    def _together(self):
        if self.offline:
            self._route_freely()
        elif self.rollout.max_response_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_response_tokens={self.rollout.max_response_tokens} leaves no room "
                f"for a prompt within model.max_length={self.model.max_length}"
            )
        if self.algorithm.prompts_per_step % self.algorithm.mini_batches:
            raise ValueError(
                f"algorithm.mini_batches={self.algorithm.mini_batches} does not divide "
                f"algorithm.prompts_per_step={self.algorithm.prompts_per_step}"
            )
        return self

    def _route_freely(self) -> None:
        """Without a rollout there are no routes to replay: replay.mode is off unless it was given
        (and then it is judged with all else that does not apply). It does not count as set."""
        if "mode" not in self.replay.model_fields_set:
            replay = self.replay.model_copy()
            object.__setattr__(replay, "mode", "off")
            object.__setattr__(self, "replay", replay)

    @property
    def learns_from(self) -> LearnsFrom:
        """What the algorithm declares."""
        return ALGORITHMS.find(self.algorithm.name).learns_from

    @property
    def offline(self) -> bool:
        """Whether the rows' own answers are learned from: nothing is sampled, no engine starts, no
        version is served."""
        return self.learns_from != "rollouts"

    @property
    def num_engines(self) -> int:
        """Engines that the run starts."""
        return 0 if self.offline else self.rollout.engines

    @property
    def serves_adapters(self) -> bool:
        """Whether engines are given adapters, of which vLLM does not take every kind."""
        return self.refit.mode == "adapter" and not self.offline

    @property
    def max_response_tokens(self) -> int:
        """The longest response: of the rollout, or what a prompt of one token leaves a row's
        answer."""
        return self.model.max_length - 1 if self.offline else self.rollout.max_response_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for the longest response."""
        return self.model.max_length - self.max_response_tokens

    def sources(self) -> dict[str, SourceConfig]:
        """Every data set: those that are trained on, and those that are held out (`eval/NAME`)."""
        return {**self.data.sources(), **self.eval.sources()}

    def rewards(self) -> dict[str, list[RewardFunction]]:
        """The reward functions of every data set, by the set's name ('': of the only one)."""
        if not self.data.sets:
            return {"": self._rewards_of("", None)}
        return {
            name: self._rewards_of(f"data.sets.{name}.reward", one.reward)
            for name, one in self.data.sets.items()
        }

    def eval_rewards(self) -> dict[str, list[RewardFunction]]:
        """The reward functions of every eval set, by its name `eval/NAME`."""
        return {
            EVAL + name: self._rewards_of(f"eval.sets.{name}.reward", one.reward)
            for name, one in self.eval.sets.items()
        }

    def _rewards_of(self, key: str, own: str | None) -> list[RewardFunction]:
        """Of a set whose own reward, under `key`, is `own`."""
        if own is not None and ":" in own:
            return [RewardFunction(key, own)]
        several = self.reward.functions
        if own is None and not several:
            return [RewardFunction("reward.function", self.reward.function, self.reward.args)]
        names = several if own is None else [name.strip() for name in own.split(",")]
        return [
            RewardFunction(
                f"reward.functions.{name}.function", one.function, one.args, one.weight, name
            )
            for name in names
            if (one := several.get(name)) is not None
        ]

    @property
    def run_dir(self) -> Path:
        model = Path(self.model.path).name
        return Path(self.logging.run_dir or f"runs/{self.name}-{model}").expanduser()
