"""The run directory: what a run leaves behind, and what it is resumed from.

config.yaml      the resolved config; `lora-moe-rl train RUN/config.yaml --resume` goes on
metrics.jsonl    one line a step
samples.jsonl    a few samples a step: prompt, response, reward, versions
order.jsonl      which groups each step trained, and the versions that sampled them
timeline.jsonl   who did what when, one line a step
checkpoints/     see checkpoint.py
adapter/         the newest exported PEFT adapter
logs/            one file an actor, and one of what libraries say at their import
curves.png       reward, mismatch and step time, at the end
timeline.png     who did what when in the last steps, at the end; timeline.trace.json for Perfetto
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from filelock import FileLock, Timeout

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import read_config_file, to_yaml
from lora_moe_rl.config.keys import is_section
from lora_moe_rl.data.samples import NOT_SAMPLED, Details, Group
from lora_moe_rl.errors import RunDirError

LOG_TAIL_LINES = 20
CONFIG, METRICS, ORDER = "config.yaml", "metrics.jsonl", "order.jsonl"
TIMELINE, TIMELINE_PICTURE, TIMELINE_TRACE = (
    f"timeline.{end}" for end in ("jsonl", "png", "trace.json")
)

# What a checkpoint's tensors depend on: a resumed run cannot change them.
FIXED = ("model.path", "adapter")
# Of these, what `starting.other_ranks` can change under adapter.resize=true.
RESIZABLE = {
    f"adapter.{key}"
    for key in (
        "rank", "expert_rank", "expert_rank_over_top_k", "rank_pattern",
        "alpha", "expert_alpha", "alpha_pattern", "rslora",
    )
}  # fmt: skip


class RunDir:
    """The run directory of `config`, locked as long as the `with` block lasts.

    Raises RunDirError when it holds a run that is not to be resumed, when there is nothing to
    resume, when what cannot change has changed, or when another process is using it.
    """

    def __init__(self, config: RunConfig, resume: bool):
        self.config, self.resume = config, resume
        self.path = config.run_dir.absolute()
        self._lock = FileLock(self.path / ".lock")

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS

    @property
    def samples_file(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def order_file(self) -> Path:
        return self.path / ORDER

    @property
    def timeline_file(self) -> Path:
        return self.path / TIMELINE

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def curves_file(self) -> Path:
        return self.path / "curves.png"

    def __enter__(self) -> RunDir:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise RunDirError(
                f"{self.path} is in use by another run; wait for it to end, or choose another "
                f"directory with logging.run_dir=DIR"
            ) from error
        except OSError as error:
            raise RunDirError(
                f"cannot use {self.path} as the run directory: {error.strerror or error}; choose "
                f"another with logging.run_dir=DIR"
            ) from error
        try:
            self._check_earlier_run()
            for folder in (self.checkpoints, self.logs):
                folder.mkdir(exist_ok=True)
            replace_file(self.config_file, to_yaml(self.config).encode())
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def has_steps(self) -> bool:
        """Whether it holds a run. One that failed before its first step holds nothing: it may be
        started again."""
        if not self.config_file.exists():
            return False
        return any((_size(self.metrics_file), *self.checkpoints.glob("step-*")))

    def _check_earlier_run(self) -> None:
        has_config = self.config_file.exists()
        if self.has_steps and not self.resume:
            raise RunDirError(
                f"{self.path} holds a run already; go on with it by --resume, or choose another "
                f"directory with logging.run_dir=DIR"
            )
        if not has_config and self.resume:
            raise RunDirError(
                f"there is no run in {self.path} to resume; leave out --resume, or name its "
                f"directory with logging.run_dir=DIR"
            )
        if not has_config and any(path.name != ".lock" for path in self.path.iterdir()):
            raise RunDirError(
                f"{self.path} is not empty and holds no run; choose another directory with "
                f"logging.run_dir=DIR"
            )
        if self.resume:
            _check_unchanged(read_config_file(self.config_file), self.config, self.path)

    def log_path(self, actor: str) -> Path:
        """The log file of one actor (`trainer-0`, `engine-0`)."""
        return self.logs / f"{actor}.log"

    def tail(self, actor: str, num_lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of an actor's log; '' when it wrote none."""
        return tail(self.log_path(actor), num_lines)

    def rewind(self, step: int) -> None:
        """Cuts what is written each step back to `step`, from which the run goes on. What is cut
        off is kept in `<file>.bak`."""
        for path in (self.metrics_file, self.samples_file, self.order_file, self.timeline_file):
            _cut_after(path, step)

    def write_timeline(self, record: dict[str, Any]) -> None:
        """Appends the spans of a step (telemetry/timeline.py)."""
        _append(self.timeline_file, [record])

    def write_order(self, step: int, version: int, groups: Sequence[Group]) -> None:
        """Appends which prompts the step that updates `version` trains, in the order of the batch,
        each with the versions of its tokens and the length of its longest response: with the seeds,
        which are of the prompts' numbers, all that says what the step was made of."""
        order = [
            {
                "row": group.prompt.row,
                "versions": _versions(group),
                "longest": max(len(sample.response_ids) for sample in group.samples),
            }
            for group in groups
        ]
        _append(self.order_file, [{"step": step, "version": version, "groups": order}])

    def write_samples(
        self,
        step: int,
        groups: Sequence[Group],
        signals: Sequence[Signal] | None,
        every: bool = False,
    ) -> None:
        """Appends `logging.samples_per_step` of the step's samples, or all, with their signals
        (None: there are none)."""
        samples = [(g, i) for g, group in enumerate(groups) for i in range(len(group.samples))]
        wanted = len(samples) if every else self.config.logging.samples_per_step
        records = []
        for chosen in _spread(len(samples), wanted):
            g, i = samples[chosen]
            signal = signals[g] if signals is not None else None
            records.append({"sample": chosen} | _sample_record(step, groups[g], signal, i))
        _append(self.samples_file, records)


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """A line for each."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(to_json(record) + "\n" for record in records)


def _sample_record(step: int, group: Group, signal: Signal | None, index: int) -> dict[str, Any]:
    sample = group.samples[index]
    advantages = signal.advantages[index][sample.mask] if signal is not None else np.zeros(0)
    return {
        "step": step,
        "row": group.prompt.row,
        **({"data_set": group.prompt.data_set} if group.prompt.data_set else {}),
        "prompt": group.prompt.text,
        "response": sample.text,
        "reward": float(group.rewards[index]),
        **_reward_details(group.details, index),
        "advantage": _one_number(advantages),
        "finish_reason": sample.finish_reason,
        "tokens": len(sample.response_ids),
        "versions": sorted({int(version) for version in sample.versions[sample.mask]}),
    }


def _reward_details(details: Details, index: int) -> dict[str, Any]:
    """What several functions gave a sample, what they have logged, why it failed; as far as there
    is any."""
    found: dict[str, Any] = {
        "rewards": {name: float(one.rewards[index]) for name, one in details.by_function.items()},
        "extra": {column: values[index] for column, values in details.extra.items()},
        "failure": details.reasons.get(index),
    }
    return {key: value for key, value in found.items() if value}


def _versions(group: Group) -> list[int]:
    """Of the tokens that a policy sampled."""
    found = np.unique(np.concatenate([sample.versions for sample in group.samples]))
    return found[found != NOT_SAMPLED].tolist()


def _one_number(values: np.ndarray) -> float:
    """The value that all have, or else their mean; NaN when there are none."""
    if not len(values):
        return math.nan
    return float(values[0] if (values == values[0]).all() else values.mean())


def _spread(total: int, wanted: int) -> list[int]:
    """Up to `wanted` of `total` places, spread evenly, so that samples are of different prompts."""
    wanted = min(wanted, total)
    return [i * total // wanted for i in range(wanted)]


def to_json(record: dict[str, Any]) -> str:
    """One line of JSON. NaN and infinities become null: JSON has no word for them."""
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file. A last line that was cut off in the middle is left out."""
    if path.exists():
        for line in _lines(path):
            try:
                yield json.loads(line)
            except ValueError:
                return


def _lines(path: Path) -> list[bytes]:
    """The lines of a JSONL file, with their ends. Only a line feed ends one: str.splitlines would
    also split at U+2028 and its like, which JSON leaves as they are inside a text."""
    with open(path, "rb") as file:
        return file.readlines()


def tail(path: Path, num_lines: int) -> str:
    """The last lines of a text file; '' when there is none."""
    bytes_a_line = 400
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_lines * bytes_a_line))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:])


def replace_file(path: Path, content: bytes) -> None:
    """Writes `path` whole or not at all."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_bytes(content)
    os.replace(scratch, path)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _cut_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept, cut = [], []
    for line in _lines(path):
        try:
            keep = line.endswith(b"\n") and json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            keep = False
        (kept if keep else cut).append(line)
    if cut:
        with open(path.with_name(path.name + ".bak"), "ab") as backup:
            backup.writelines(line if line.endswith(b"\n") else line + b"\n" for line in cut)
        replace_file(path, b"".join(kept))


def _check_unchanged(saved: dict[str, Any], config: RunConfig, path: Path) -> None:
    """Raises RunDirError when a key of FIXED differs between the saved config and `config`, unless
    adapter.resize allows it."""
    before, now = _flat(saved), _flat(yaml.safe_load(to_yaml(config)))
    changed = [
        key
        for key in now
        # As text: the order of a map's keys means something (adapter.rank_pattern).
        if key.startswith(FIXED)
        and key != "adapter.resize"
        and not (config.adapter.resize and key in RESIZABLE)
        and json.dumps(before.get(key)) != json.dumps(now[key])
    ]
    if not changed:
        return
    values = "; ".join(f"{key} was {before.get(key)} and is now {now[key]}" for key in changed)
    way_out = "Leave them as they were, or start anew with logging.run_dir=DIR"
    if set(changed) <= RESIZABLE:
        way_out += (
            "; or set adapter.resize=true: the adapter is brought to the new ranks and alphas by "
            "an SVD (exact when growing, the best approximation when shrinking), and Adam begins "
            "anew for what changed"
        )
    raise RunDirError(
        f"{path} cannot be resumed with another base or other adapters: {values}. {way_out}"
    )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{dotted key: value}`; a map that is a value stays one."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if is_section(name) and isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value
    return flat
