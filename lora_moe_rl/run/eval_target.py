"""What `lora-moe-rl eval` is to evaluate: a run, a checkpoint, or what a recipe begins with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_moe_rl.config import RunConfig, TrackerConfig
from lora_moe_rl.config.overrides import override, with_settings
from lora_moe_rl.config.recipes import CONFIG, load_config, resolve
from lora_moe_rl.errors import CheckpointError, ConfigError, RunDirError
from lora_moe_rl.files import checkpoint
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.telemetry import console


def read_target(target: str | None, settings: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """The config to evaluate with, and the checkpoint, None for a recipe. `settings` are laid over
    the config, of which no tracker is told and whose run directory is a new one; the adapter is
    that of the checkpoint.

    Raises ConfigError when there are no eval sets, RunDirError for a run without a checkpoint and
    for a run directory that holds an evaluation already.
    """
    base, path = _found(target)
    run_dir = f"{base.run_dir}-eval"
    if path is not None:
        run_dir = f"{path.parents[1]}-eval-{path.name}"
    config = resolve(override(base, [f"logging.run_dir={run_dir}", *settings]))
    if not config.eval.sets:
        raise ConfigError(
            f"{target or 'the config'} has no eval.sets: name held-out data, as "
            "eval.sets.NAME.path=FILE"
        )
    if (there := RunDir(config, resume=False)).has_steps:
        raise RunDirError(
            f"{there.path} holds an evaluation or a run already; choose another directory with "
            "logging.run_dir=DIR"
        )
    return config.model_copy(update={"tracker": TrackerConfig()}), path


def _found(target: str | None) -> tuple[RunConfig, Path | None]:
    path = Path(target or "").absolute()
    if target is None or not path.is_dir():
        return load_config(target), None
    if (path / checkpoint.MANIFEST).is_file():
        run, found = path.parents[1], path
    else:
        newest = checkpoint.newest_valid(path / "checkpoints")
        console.warn_skipped(newest)
        run, found = path, newest.path
    if not (run / CONFIG).is_file():
        raise RunDirError(
            f"{run} is no run directory (it has no {CONFIG}). An adapter is evaluated with a "
            "recipe: lora-moe-rl eval RECIPE adapter.init_from=DIR; a model: "
            "lora-moe-rl eval RECIPE model=DIR"
        )
    if found is None:
        raise RunDirError(f"{run} has no checkpoint to evaluate")
    return _with_adapter_of(found, load_config(str(run / CONFIG))), found


def _with_adapter_of(path: Path, config: RunConfig) -> RunConfig:
    """`config`, which the run has now, with the ranks that the checkpoint was made at. A damaged
    one is told of later."""
    try:
        adapter = checkpoint.parse_manifest(path)["metadata"].get("adapter")
    except CheckpointError:
        return config
    if not isinstance(adapter, dict):
        return config
    now = {"resize": False, "init_from": config.adapter.init_from}
    return with_settings(config, {"adapter": adapter | now})
