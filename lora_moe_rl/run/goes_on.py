"""The checkpoint that a run goes on from, and how its ranks come to hold it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import CheckpointError, RunDirError
from lora_moe_rl.files import adapter_source, checkpoint
from lora_moe_rl.files.checkpoint import Found
from lora_moe_rl.files.checkpoint_contents import check_resumable
from lora_moe_rl.files.retention import Metric
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.models.fingerprint import check_unchanged
from lora_moe_rl.run import adapter_start, plateau, warm_up
from lora_moe_rl.run.plateau import Plateau
from lora_moe_rl.run.preflight import Preflight
from lora_moe_rl.run.prepared import Prepared
from lora_moe_rl.telemetry import console
from lora_moe_rl.telemetry.metrics import read_evaluations

if TYPE_CHECKING:
    from lora_moe_rl.cluster.lasting_trainer import LastingTrainer


def steps_done(config: RunConfig, resume: bool, fork: Path | None) -> int:
    """What the checkpoint to go on from has done, as far as it has to be known before anything
    starts. Raises RunDirError when there is none to fork."""
    if fork is not None:
        if not (fork / checkpoint.MANIFEST).is_file():
            raise RunDirError(
                f"--resume-from {fork} is no checkpoint (it has no {checkpoint.MANIFEST}); name "
                "one by its directory: RUN/checkpoints/step-000100"
            )
        try:
            checkpoint.read_manifest(fork)
            return checkpoint.step_of(fork)
        except CheckpointError as error:
            raise RunDirError(f"--resume-from {fork} is not valid: {error}") from error
    root = RunDir(config, resume).checkpoints
    if not resume or checkpoint.newest_step(root) < config.trainer.steps:
        return 0
    newest = checkpoint.newest_valid(root).path
    return checkpoint.step_of(newest) if newest else 0


def nothing_is_left(config: RunConfig, resume: bool, fork: Path | None) -> bool:
    """Whether a run that is to go on has done all that it was to do, which is said."""
    step = steps_done(config, resume, fork)
    if step >= config.trainer.steps and not _last_evaluation_is_missing(config, step, resume):
        console.say_done(step, config.trainer.steps)
        return True
    if resume and step < config.trainer.steps and (ended := _ended_early(config)):
        console.say(f"nothing is left to do: {plateau.text(config.checkpoint, ended)}")
        return True
    return False


def _last_evaluation_is_missing(config: RunConfig, step: int, resume: bool) -> bool:
    """Whether a run that has done all its steps ended before its last evaluation did."""
    last = config.trainer.steps
    if not resume or step != last or not config.eval.is_due(step, last):
        return False
    return step not in evaluated(RunDir(config, resume))


def evaluated(run_dir: RunDir) -> set[int]:
    """The steps whose evaluation is on record."""
    return {record["step"] for record in read_evaluations(run_dir.metrics_file)}


def _ended_early(config: RunConfig) -> Plateau | None:
    """Why nothing is left to do for a run that is to be resumed: its metric got no better
    (checkpoint.stop_after) up to its newest checkpoint."""
    if not config.checkpoint.stop_after:
        return None
    run_dir = RunDir(config, resume=True)
    values = Metric(run_dir.metrics_file, config.checkpoint.best_metric).read()
    newest = checkpoint.newest_valid(run_dir.checkpoints).path
    return plateau.of_run(config.checkpoint, values, checkpoint.step_of(newest) if newest else 0)


def check_places(config: RunConfig, resume: bool) -> None:
    """The run directory, and that of the adapter to start from, as far as they can be looked at
    before a model is fetched. Raises RunDirError and AdapterError."""
    run_dir = RunDir(config, resume)
    run_dir.check_usable()
    if config.adapter.init_from is not None and not run_dir.has_steps:
        adapter_source.require(Path(config.adapter.init_from))


def newest(run_dir: RunDir, ready: Preflight) -> Found | None:
    """The checkpoint to go on from, which fits base, adapter and data, and the data where they
    stood; None when there is none yet."""
    found = checkpoint.newest_valid(run_dir.checkpoints)
    console.say_resume(found)
    if found.path is None:
        return None
    fitting = _fitting(found, ready)
    if lost := adapter_start.lost_critic(found, ready.config):
        console.warn(lost)
    config, meta = ready.config, found.metadata
    ended = warm_up.at_its_end(config, meta["trainer"])
    if ended and meta["step"] < config.trainer.steps:
        console.warn(ended)
    ready.source.load_state_dict(found.metadata["data"])
    return fitting


def restore(run: Prepared, trainer: LastingTrainer) -> int:
    """Adapter and moments as the run goes on from them. Returns the adapter's version."""
    if run.frozen is not None:
        trainer.set_reference(run.frozen.read)
    if run.found is None:
        if run.start is not None:
            trainer.set_adapter(run.start.tensors)
            console.say_notes(run.start.notes)
        return 0
    found, meta = run.found, run.found.metadata
    assert found.path is not None
    old = adapter_start.other_ranks(found, run.config, run.spec)
    if old is None:
        trainer.load(found.path, meta["trainer"])
    else:
        resized = adapter_start.resized(found, old, run.spec, run.config.seed)
        with resized as (directory, notes):
            trainer.load(directory, meta["trainer"])
        console.say_notes(notes)
    return meta["trainer"]["version"]


def at(directory: Path, ready: Preflight) -> Found:
    """That checkpoint, which fits base and adapter. Raises RunDirError for one that is damaged, or
    gone."""
    try:
        metadata = checkpoint.read_manifest(directory)
    except CheckpointError as error:
        raise RunDirError(
            f"{directory}: {error}. A run that goes on removes its older checkpoints "
            "(checkpoint.keep): take its newest"
        ) from error
    return _fitting(Found(directory, metadata, []), ready)


def _fitting(found: Found, ready: Preflight) -> Found:
    check_resumable(found)
    check_unchanged(found.metadata["base"], ready.model_dir)
    adapter_start.other_ranks(found, ready.config, ready.spec)
    return found
