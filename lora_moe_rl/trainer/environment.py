"""What a process that trains sets up before it imports torch and Megatron. Imports neither."""

import sys

# Threads that wait must not spin: ranks and engines take turns on the same cores. mcore compiles
# small functions at their first call, for seconds, with nothing to gain.
CPU_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TORCHDYNAMO_DISABLE": "1"}

# On two cores a step of a model as wide as this takes as long with one thread as with two, and of
# narrower ones less (docs/figures.md).
NARROW = 512


def threads_of(cores: int, hidden_size: int) -> int:
    """Threads of a rank on the CPU that has this many cores; one for a narrow model."""
    return 1 if hidden_size <= NARROW else max(1, cores)


def without_trackers() -> None:
    """Megatron-core's timers import wandb where it is installed, a fifth of what a rank imports. No
    rank tracks anything: the controller does. To be called before Megatron is imported, in a
    process of a rank's own."""
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]
