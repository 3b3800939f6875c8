"""What a trainer rank computes in chosen steps, op by op: traces of torch's profiler.

RUN/traces/trainer-R-step-N.json, a file for each rank R and step N of logging.profile, in Chrome's
trace format. The profiler watches and takes time; it changes no number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_moe_rl.config import RunConfig

log = logging.getLogger(__name__)

FOLDER = "traces"


def path_of(run_dir: Path, rank: int, step: int) -> Path:
    return run_dir / FOLDER / f"trainer-{rank}-step-{step}.json"


@contextmanager
def traced(config: RunConfig, kind: str, rank: int, step: int) -> Iterator[None]:
    """Around an update of `step` on a device of this `kind`: writes its trace, if one is asked for.
    A disk that refuses it costs the trace, and a line in the rank's log."""
    if step not in config.logging.profile:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if kind == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as found:
        yield
    path = path_of(config.run_dir, rank, step)
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(exist_ok=True)
        found.export_chrome_trace(str(part))
        part.replace(path)
    except (OSError, RuntimeError) as error:
        log.warning("no trace %s: %s", path, error)
