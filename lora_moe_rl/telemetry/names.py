"""Names of metrics that one place writes and another reads."""

from __future__ import annotations

REWARD, REWARD_STD = "reward/mean", "reward/std"
BASELINE = "reward/baseline"
REWARDS_NONE, REWARDS_FAILED = "reward/none", "reward/failed"
SOLVED_ALL, SOLVED_NONE = "reward/solved_all", "reward/solved_none"
TEACHER_KL, TEACHER_LOGPROB = "teacher/reverse_kl", "teacher/logprob"
TEACHER_TAUGHT, TEACHER_TOO_LONG = "teacher/taught", "teacher/too_long"
TEACHER_MASS = "teacher/top_k_mass"
REWEIGHT_KEPT, REWEIGHT_MOST = "reweight/kept", "reweight/most"
REWEIGHT_REWARD = "reweight/reward_mean"
LOSS = "loss/policy"
NLL, PERPLEXITY = "loss/nll", "loss/perplexity"
DPO, MARGIN, ACCURACY = "loss/dpo", "rewards/margins", "rewards/accuracies"
ANSWER_LENGTH, DATA_TOKENS_PER_SECOND = "data/answer_length", "data/tokens_per_second"
ENTROPY = "policy/entropy"
RESPONSE_LENGTH = "rollout/response_length"
TRUNCATED = "rollout/truncated"
TOKENS = "rollout/tokens"
TOKENS_PER_SECOND = "rollout/tokens_per_second"
RESTARTS = "rollout/restarts"
TRAINER_RESTARTS = "trainer/restarts"
CHECKPOINT_BEHIND, COPY_BEHIND = "checkpoint/steps_behind", "checkpoint/copy_steps_behind"
STALE = "rollout/stale"
IDLE_TRAINER, IDLE_ENGINES = "idle/trainer", "idle/engines"
MISMATCH_KL = "mismatch/kl"
MISMATCH_JUDGED = "mismatch/judged"
MISMATCH_LARGEST = "mismatch/max_abs_logprob_diff"
WORST_SAMPLE, WORST_TOKEN = "mismatch/worst_sample", "mismatch/worst_token"
WORST_ROLLOUT, WORST_TRAINER = "mismatch/worst_rollout_logprob", "mismatch/worst_trainer_logprob"
COVERAGE, DISAGREEMENT = "replay/coverage", "replay/disagreement"
BUSIEST, LOAD_ENTROPY, IDLE_EXPERTS = "experts/busiest", "experts/entropy", "experts/idle"
AUDITED = "replay/audited"
KL, KL_COEF = "loss/kl", "loss/kl_coef"
BY_TURN, BEFORE_LAST_TURN = "reward/by_turn", "reward/before_last_turn"
TURNS_ALONE, TURNS_ALIKE = "reward/turns_alone", "reward/turns_alike"
GRAD_NORM, SKIPPED = "optim/grad_norm", "optim/skipped"
VERSION = "adapter/version"
PROMPTS_SHARED = "trainer/prompts_shared"
TOKENS_PER_GPU = "perf/tokens_per_second_per_gpu"
MEMORY_PEAK, MEMORY_PLANNED = "memory/peak", "memory/planned"
PROOF_SECONDS = "refit/proof_seconds"
MEMORY_ENGINES = "memory/engines_peak"
TFLOPS, MFU = "perf/tflops_per_gpu", "perf/mfu"
REWARD_HISTOGRAM, ADVANTAGE_HISTOGRAM = "histogram/reward", "histogram/advantage"
LENGTH_HISTOGRAM = "histogram/response_length"
# Of an evaluation: after which step, of which adapter version, how long.
EVAL_STEP, EVAL_VERSION, EVAL_SECONDS = "eval/step", "eval/version", "eval/seconds"
# What of a set is looked at first: of what was sampled, and of rows' own answers (sft, dpo).
EVAL_FIRST = ("avg", "nll", "loss")

# A step's stages, which follow each other; what it takes beyond them is other.
STAGES = ("rollout", "reward", "train", "refit")
STEP_SECONDS = "time/step"
# Of these, what a run keeps: copies of the trainer's state within train, files behind refit.
COPIES, RECORDS = "time/copies", "time/records"


def stages(offline: bool) -> tuple[str, ...]:
    """The stages of a step of a run that samples, or of one that learns from the rows' own answers
    (`offline`)."""
    return ("train",) if offline else STAGES


def of_set(data_set: str, what: str) -> str:
    """The metric of one of several data sets: `what` is mean, groups, solved_all or solved_none."""
    return f"reward/{data_set}/{what}"


def of_function(function: str, what: str) -> str:
    """The metric of one of several reward functions: `what` is mean, std, none or failed."""
    return f"reward/{function}/{what}"


def of_reward(name: str) -> str:
    """The metric that a reward function has logged as `name`."""
    return f"reward/{name}"


def of_environment(what: str) -> str:
    """The metric of something that an environment counts, summed over a step."""
    return f"environment/{what}"


def kl_of_age(age: int) -> str:
    """The metric of the tokens that are `age` steps older than what is updated."""
    return f"mismatch/kl_age_{age}"


def of_busiest(layer: int) -> str:
    """The metric of a layer's busiest expert."""
    return f"{BUSIEST}/layer_{layer:02d}"


def time(stage: str) -> str:
    """The metric of a stage's seconds."""
    return f"time/{stage}"


def of_eval(place: str, what: str) -> str:
    """The metric of an eval set, or of one value of a column of it: `what` is avg, nll, …"""
    return f"eval/{place}/{what}"
