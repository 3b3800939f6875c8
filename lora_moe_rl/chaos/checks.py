"""What has to hold at the end of a run that had faults, whatever they were."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from filelock import FileLock, Timeout

from lora_moe_rl.config import RunConfig
from lora_moe_rl.files import checkpoint
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.telemetry import names
from lora_moe_rl.telemetry.metrics import read_steps

SHARED_MEMORY = Path("/dev/shm")
LAST = 4  # the reward is compared over the last of so many parts of the steps
SIGMAS = 4.0  # of the difference of two means
ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    found: str


def files(config: RunConfig) -> list[Check]:
    """Checks the files of the run directory: steps, tickets, samples, the last checkpoint, the
    lock."""
    run_dir, steps = RunDir(config, resume=True), config.trainer.steps
    if not run_dir.has_steps:
        return [Check("steps on record", False, f"there is no run in {run_dir.path}")]
    records, order = read_steps(run_dir.metrics_file), list(read_jsonl(run_dir.order_file))
    newest = checkpoint.newest_valid(run_dir.checkpoints)
    last = checkpoint.step_of(newest.path) if newest.path else 0
    return [
        once("steps on record", [record["step"] for record in records], steps),
        once("steps in order.jsonl", [record["step"] for record in order], steps),
        tickets(order, config),
        samples(read_jsonl(run_dir.samples_file), config.logging.samples_per_step),
        Check("last checkpoint is whole", last == steps, f"of step {last}"),
        free(run_dir.path / ".lock"),
    ]


def restarts(happened: Sequence[str], records: Iterable[Mapping[str, Any]]) -> list[Check]:
    """No more than faults, by their kinds, that end an engine or the ranks: many notice a death,
    and it is one. A run that was resumed begins to count anew."""
    lines, found = list(records), []
    for name, prefix in ((names.RESTARTS, "engine."), (names.TRAINER_RESTARTS, "rank.")):
        most = max((int(line.get(name) or 0) for line in lines), default=0)
        faults = sum(kind.startswith(prefix) for kind in happened)
        found.append(Check(name, most <= faults, f"{most} for {faults} faults"))
    return found


def once(name: str, found: Sequence[int], steps: int) -> Check:
    """Each of 1 to `steps`, in turn."""
    wrong = sorted((Counter(found) - Counter(range(1, steps + 1))).elements())
    lacking = sorted(set(range(1, steps + 1)) - set(found))
    passed = list(found) == list(range(1, steps + 1))
    return Check(name, passed, f"{len(found)}; twice or beyond: {wrong}; lacking: {lacking}")


def tickets(order: Iterable[Mapping[str, Any]], config: RunConfig) -> Check:
    """No prompt was trained twice, and none of those before the last was lost. Numbers tell prompts
    apart where they never come again, from one generator, and none is left out on purpose."""
    groups = [group["drawn"] for record in order for group in record["groups"]]
    wanted = config.trainer.steps * config.algorithm.prompts_per_step
    data, name = config.data, "prompts trained"
    own = data.generator is not None and not data.sets and not data.filter
    if not own or config.algorithm.draw_again or config.schedule.lag:
        return Check(name, len(groups) == wanted, f"{len(groups)} groups of {wanted}; rows repeat")
    twice = sorted(row for row, count in Counter(groups).items() if count > 1)
    lost = sorted(set(range(wanted)) - set(groups))
    passed = not twice and not lost and len(groups) == wanted
    return Check(name, passed, f"{len(groups)} of {wanted}; twice: {twice}; lost: {lost}")


def samples(records: Iterable[Mapping[str, Any]], a_step: int) -> Check:
    """No sample of a step is on record twice; `a_step` is how many of a step there may be."""
    found = Counter((record["step"], record["sample"]) for record in records)
    twice = sorted(key for key, count in found.items() if count > 1)
    passed = not twice and bool(found) == bool(a_step)
    return Check("samples on record", passed, f"{len(found)}; twice: {twice}")


def free(lock: Path) -> Check:
    """Nobody holds the run directory's lock."""
    try:
        with FileLock(lock).acquire(timeout=0):
            return Check("lock is free", True, str(lock))
    except Timeout:
        return Check("lock is free", False, f"{lock} is held")


def shared_memory() -> set[Path]:
    """Our files of shared memory."""
    with suppress(OSError):
        return {path for path in SHARED_MEMORY.iterdir() if path.lstat().st_uid == os.getuid()}
    return set()


def no_shared_memory(before: set[Path]) -> Check:
    """None is there that was not before, but what somebody still has mapped: of another program."""
    left = sorted(str(path) for path in shared_memory() - before)
    left = [name for name in left if name not in _mapped()] if left else []
    return Check("no shared memory is left", not left, ", ".join(left) or "none")


def no_processes(left: Sequence[str]) -> Check:
    return Check("no process is left", not left, "; ".join(left) or "none")


def _mapped() -> str:
    """What the processes of this user have mapped."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            found.append(maps.read_text())
    return "\n".join(found)


def rewards(with_faults: Sequence[float], without: Sequence[float]) -> Check:
    """The mean rewards of steps of two runs: those of the last quarter do not differ by more than
    SIGMAS times what chance lets such means differ by."""
    name, size = "reward as without faults", max(2, len(without) // LAST)
    ours, theirs = with_faults[-size:], without[-size:]
    if len(ours) < size:
        return Check(name, False, f"{len(ours)} steps to compare, of {size}")
    error = math.sqrt((variance(ours) + variance(theirs)) / size)
    apart = abs(fmean(ours) - fmean(theirs))
    found = (
        f"{fmean(ours):.3f} and {fmean(theirs):.3f} over {size} steps, bound {SIGMAS * error:.3f}"
    )
    return Check(name, apart <= SIGMAS * error, found)


def rewards_of(run_dir: Path) -> list[float]:
    """The mean reward of each step that has one."""
    found = (record.get(names.REWARD) for record in read_steps(run_dir / "metrics.jsonl"))
    return [value for value in found if value is not None]


def same_bits(ours: Path, theirs: Path) -> list[Check]:
    """Checks that two run directories have the same samples, order and adapter, to the last bit."""
    import numpy as np
    from safetensors.numpy import load_file

    found = []
    for name in ("samples.jsonl", "order.jsonl"):
        equal = (ours / name).read_bytes() == (theirs / name).read_bytes()
        found.append(Check(f"{name} as without faults", equal, "byte by byte"))
    a, b = (load_file(run_dir / "adapter" / ADAPTER) for run_dir in (ours, theirs))
    differing = [key for key in a.keys() | b.keys() if not _equal(np, a.get(key), b.get(key))]
    text = f"{len(a)} tensors; differing: {sorted(differing)}"
    return [*found, Check("adapter as without faults", bool(a) and not differing, text)]


def _equal(np: Any, one: Any, other: Any) -> bool:
    if one is None or other is None:
        return False
    return one.dtype == other.dtype and bool(np.array_equal(one, other))
