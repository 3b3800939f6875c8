"""Names of metrics that one place writes and another reads."""

from __future__ import annotations

REWARD, REWARD_STD = "reward/mean", "reward/std"
REWARDS_NONE, REWARDS_FAILED = "reward/none", "reward/failed"
SOLVED_ALL, SOLVED_NONE = "reward/solved_all", "reward/solved_none"
LOSS = "loss/policy"
ENTROPY = "policy/entropy"
RESPONSE_LENGTH = "rollout/response_length"
TRUNCATED = "rollout/truncated"
TOKENS = "rollout/tokens"
TOKENS_PER_SECOND = "rollout/tokens_per_second"
RESTARTS = "rollout/restarts"
STALE = "rollout/stale"
IDLE_TRAINER, IDLE_ENGINES = "idle/trainer", "idle/engines"
MISMATCH_KL = "mismatch/kl"
MISMATCH_JUDGED = "mismatch/judged"
MISMATCH_LARGEST = "mismatch/max_abs_logprob_diff"
WORST_SAMPLE, WORST_TOKEN = "mismatch/worst_sample", "mismatch/worst_token"
WORST_ROLLOUT, WORST_TRAINER = "mismatch/worst_rollout_logprob", "mismatch/worst_trainer_logprob"
COVERAGE, DISAGREEMENT = "replay/coverage", "replay/disagreement"
GRAD_NORM, SKIPPED = "optim/grad_norm", "optim/skipped"
VERSION = "adapter/version"
REFIT_SECONDS = "refit/seconds"

# A step's stages, which follow each other; what it takes beyond them is other.
STAGES = ("rollout", "reward", "train", "refit")
STEP_SECONDS = "time/step"


def of_set(data_set: str, what: str) -> str:
    """The metric of one of several data sets: `what` is mean, groups, solved_all or solved_none."""
    return f"reward/{data_set}/{what}"


def of_function(function: str, what: str) -> str:
    """The metric of one of several reward functions: `what` is mean, std, none or failed."""
    return f"reward/{function}/{what}"


def of_reward(name: str) -> str:
    """The metric that a reward function has logged as `name`."""
    return f"reward/{name}"


def kl_of_age(age: int) -> str:
    """The metric of the tokens that are `age` steps older than what is updated."""
    return f"mismatch/kl_age_{age}"


def time(stage: str) -> str:
    """The metric of a stage's seconds."""
    return f"time/{stage}"
