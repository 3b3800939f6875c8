"""What a process that trains sets up before it imports torch and Megatron. Imports neither."""

import sys

# Threads that wait must not spin: ranks and engines take turns on the same cores. mcore compiles
# small functions at their first call, for seconds, with nothing to gain.
CPU_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TORCHDYNAMO_DISABLE": "1"}


def without_trackers() -> None:
    """Megatron-core's timers import wandb where it is installed, a fifth of what a rank imports. No
    rank tracks anything: the controller does. To be called before Megatron is imported, in a
    process of a rank's own."""
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]
