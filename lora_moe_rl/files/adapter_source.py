"""Where an adapter comes from: a run, one of its checkpoints, or a PEFT directory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.adapters import peft_import
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.peft import BASE_KEY
from lora_moe_rl.adapters.peft_import import Order
from lora_moe_rl.adapters.served import served
from lora_moe_rl.adapters.shards import Shard, assemble
from lora_moe_rl.adapters.spec import VALUE_HEAD, AdapterSpec
from lora_moe_rl.config import AdapterConfig, RunConfig
from lora_moe_rl.errors import AdapterError, CheckpointError, ModelError
from lora_moe_rl.files import checkpoint
from lora_moe_rl.files.checkpoint_contents import check_adapter, slice_of
from lora_moe_rl.files.trainer_state import CRITIC, POLICY, Whose, files
from lora_moe_rl.files.untrusted import SafeFile, inside, read_json
from lora_moe_rl.models import quantised
from lora_moe_rl.models.directory import find_local
from lora_moe_rl.models.fingerprint import check_unchanged, fingerprint
from lora_moe_rl.telemetry import console

PEFT_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Source:
    """A whole adapter: float32 arrays of the shapes in `spec.tensor_shapes`.

    `config.model.path` is its base as the run named it, or as `adapter_config.json` names it.
    `base` is what the run kept of it (`base_model.base_record`); a PEFT directory keeps nothing.
    `form` is that of a base that is quantised in a way we know.
    """

    path: Path
    spec: AdapterSpec
    tensors: dict[str, np.ndarray]
    config: RunConfig
    base: dict[str, Any] | None
    form: quantised.Form | None

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the adapter's base; None where nothing was kept of it."""
        return None if self.base is None else self.base["fingerprint"]

    def check_base(self, directory: Path) -> None:
        """Raises ModelError when `directory` is not the base that the run was made on."""
        if self.base is not None:
            check_unchanged(self.base, directory)


def load(
    path: Path, base: Path | None = None, order: Order | None = None, whose: Whose = POLICY
) -> Source:
    """The adapter at `path`; of a run, that of its newest valid checkpoint. `whose`: the policy's,
    or the critic's, among whose tensors is VALUE_HEAD.

    `base` is the directory of the base model, which a PEFT directory needs where its
    `adapter_config.json` does not name one that is here. `order`: see `peft_import.read`.

    Raises AdapterError, CheckpointError, FileError or ModelError with what is wrong.
    """
    path = Path(path)
    require(path)
    if (path / "checkpoints").is_dir():
        found = checkpoint.newest_valid(path / "checkpoints")
        console.warn_skipped(found)
        if found.path is None:
            raise CheckpointError(f"{path} has no checkpoint yet; let the run save one")
        return _from_checkpoint(found.path, found.metadata, base, whose)
    if (path / checkpoint.MANIFEST).is_file():
        return _from_checkpoint(path, _read_manifest(path), base, whose)
    if whose == CRITIC:
        raise AdapterError(
            f"{path} is no run and no checkpoint, and a critic is read from these alone"
        )
    return _from_peft(path, base, order)


def require(path: Path) -> None:
    """Raises AdapterError for what no adapter comes from, by the names of its files alone."""
    marks = (path / checkpoint.MANIFEST, path / PEFT_CONFIG)
    if not (path / "checkpoints").is_dir() and not any(mark.is_file() for mark in marks):
        raise AdapterError(
            f"{path} is no run (it has no checkpoints/), no checkpoint (no {checkpoint.MANIFEST}) "
            f"and no PEFT directory (no {PEFT_CONFIG})"
        )


def checkpoint_spec(metadata: dict[str, Any]) -> AdapterSpec:
    """The adapter that a checkpoint holds, from its metadata alone, which `check_adapter` has let
    pass. Raises CheckpointError for settings that are of no adapter of that base."""
    try:
        shape = ModelShape.from_hf_config(metadata["base"]["config"])
        return AdapterSpec.build(shape, AdapterConfig(**metadata["adapter"]), servable=False)
    except (ValueError, TypeError) as error:  # of ours, and pydantic's
        raise CheckpointError(
            f"the checkpoint does not say what adapter it holds, of which base: {error}"
        ) from error


def checkpoint_shards(
    directory: Path, kind: str = "adapter", whose: Whose = POLICY
) -> Iterator[Shard]:
    """The slices of one of `trainer_state.KINDS` in a verified checkpoint."""
    for path in files(directory, whose):
        file = SafeFile.open(path)
        for entry in file.entries.values():
            of, name, start = slice_of(entry)
            if of == kind:
                yield Shard(name, start, file.read(entry.name).numpy())
        file.close()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        return checkpoint.read_manifest(path)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} is not valid: {error}") from error


def _from_checkpoint(
    path: Path, metadata: dict[str, Any], base: Path | None, whose: Whose
) -> Source:
    check_adapter(path, metadata)
    if base is not None:
        check_unchanged(metadata["base"], base)
    spec = checkpoint_spec(metadata)
    shapes = spec.tensor_shapes
    if whose == CRITIC:
        if not files(path, CRITIC):
            raise CheckpointError(
                f"{path} has no critic; algorithms like ppo and vapo train one (docs/algorithms.md)"
            )
        spec = spec.of_critic()
        shapes = spec.tensor_shapes | {VALUE_HEAD: (1, spec.shape.hidden_size)}
    tensors = assemble(shapes, checkpoint_shards(path, whose=whose))
    tensors = {name: served(spec, name, whole) for name, whole in tensors.items()}
    base_model = {"path": metadata["base"]["path"], "revision": metadata["base"].get("revision")}
    config = RunConfig(model=base_model, adapter=AdapterConfig(**metadata["adapter"]))
    form = _form(metadata["base"]["config"])
    return Source(path, spec, tensors, config, metadata["base"], form)


def _from_peft(path: Path, base: Path | None, order: Order | None) -> Source:
    settings = read_json(inside(path, PEFT_CONFIG))
    named, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    directory = base or _local(named, revision)
    if directory is None:
        of = f" at revision {revision!r}" if revision else ""
        raise AdapterError(
            f"{path} is of the base {named!r}{of}, which is no directory here; give it with "
            "--base DIR"
        )
    config = read_json(directory / "config.json")
    shape, form = ModelShape.from_hf_config(config), _form(config)
    spec, tensors = peft_import.read(path, shape, order)
    _warn_of_another(path, named, directory)
    return Source(path, spec, tensors, RunConfig(model=str(directory)), None, form)


def _form(config: dict[str, Any]) -> quantised.Form | None:
    return None if any(quantised.refused(config)) else quantised.form(config)


def _warn_of_another(path: Path, named: Any, base: Path) -> None:
    """Says it when an adapter that this project has written is of other weights than `base` has.
    The same model in another format has others too, and so has one that it was merged into."""
    file = path / "adapter_model.safetensors"
    trained_on = SafeFile.open(file).metadata.get(BASE_KEY) if file.is_file() else None
    if trained_on is not None and trained_on != fingerprint(base):
        console.warn(
            f"{path} was trained on {named}, and {base} has other weight files than that had: "
            "right for the same model in another format, wrong for any other, and for one that "
            "this adapter is merged into already"
        )


def _local(named: Any, revision: Any) -> Path | None:
    """The directory of what a file names as the base: only if it is on this machine, nothing is
    fetched or made because a file says so."""
    if not isinstance(named, str) or not named or not isinstance(revision, str | None):
        return None
    try:
        found = find_local(named, revision)
    except (ModelError, OSError, RuntimeError):  # no name that a file system takes; no such ~user
        return None
    return found if found is not None and (found / "config.json").is_file() else None
