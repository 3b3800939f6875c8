"""Where a model's directory is, and whether it can be trained: found, fetched, or made if tiny.

Importing this file imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lora_moe_rl.adapters.families import FAMILIES, ModelShape, check_around
from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import SafeFile, check_one_model, read_json
from lora_moe_rl.models import quantised
from lora_moe_rl.models.tensor_shapes import check_complete, check_shapes
from lora_moe_rl.tiny.make import NAMES, find_tiny, make_tiny

# "original": the same weights once more, as gpt-oss and others have them.
NOT_FETCHED = ["*.bin", "*.pt", "*.pth", "*.gguf", "original/*"]


def resolve_model(path: str, revision: str | None = None, named: str = "model.path=") -> Path:
    """The local directory of `model.path`, or of what else the user gave it as (`named`).

    A Hugging Face directory is taken as it is; the name of a tiny model is made unless it is
    cached; anything else is a hub name, of which `revision` is fetched. Raises ModelError when
    there is no such model.
    """
    if (directory := Path(path).expanduser()).is_dir():
        return directory
    if path in NAMES:
        return make_tiny(path)
    _require_hub_name(path, named)
    return _download(path, revision, named)


def find_local(path: str, revision: str | None = None) -> Path | None:
    """What `resolve_model` would give if it is on this machine: nothing is made or fetched. None
    when it is not; raises ModelError for what could not be had anyway."""
    if (directory := Path(path).expanduser()).is_dir():
        return directory
    if path in NAMES:
        return find_tiny(path)
    _require_hub_name(path)
    return _cached(path, revision)


def base_name(path: str) -> str:
    """A base by the name that other tools find it under: a tiny model, which only we know by name,
    by its directory; a directory by its absolute path; a name of the hub as it is."""
    if Path(path).expanduser().is_dir() or path in NAMES:
        found = find_local(path)
        return path if found is None else str(found.absolute())
    return path


def is_hub_name(path: str) -> bool:
    """Whether it is `owner/name`, and no directory here."""
    is_path = path.startswith((".", "/", "~")) or path.count("/") != 1
    return not is_path and not Path(path).is_dir()


def _require_hub_name(path: str, named: str = "model.path=") -> None:
    if not is_hub_name(path):
        raise ModelError(
            f"{named}{path!r} is not a directory, and not a hub name (owner/name) or one of "
            f"the tiny models {', '.join(NAMES)}"
        )


def check_model_dir(path: Path | str) -> dict:
    """Checks that a Hugging Face directory can be loaded and trained, and returns its config.json.

    Raises ModelError for a missing config, missing shards, weights that are not safetensors
    (nothing is unpickled), architectures that are not supported and tensors of other shapes than
    the config says; FileError for shards that are not whole.
    """
    path = Path(path)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelError(f"{path} has no config.json: it is not a Hugging Face model directory")
    config = read_json(config_file)
    named = config.get("architectures")
    architectures = list(map(str, named)) if named and isinstance(named, list) else ["missing"]
    family = FAMILIES.get(architectures[0])
    check_around(architectures[0])
    if family is None or config.get("model_type") not in family.model_types:
        known = ", ".join(
            f"{name} (model_type {' or '.join(f.model_types)})" for name, f in FAMILIES.items()
        )
        raise ModelError(
            f"{config_file}: architecture {', '.join(architectures)} (model_type "
            f"{config.get('model_type')}) is not supported; supported are {known}"
        )
    for reason in quantised.refused(config):
        raise ModelError(f"{config_file}: {reason}")
    files = [SafeFile.open(path / shard) for shard in _shards(path)]
    names = {name for file in files for name in file.entries}
    for reason in quantised.tensors_refused(names):
        raise ModelError(f"{path}: {reason}")
    if quantised.form(config) == "fp8":
        _check_fp8_scales(files)
    shape = ModelShape.from_hf_config(config)
    check_complete(path, names, shape, prediction_layers(config))
    check_shapes(files, shape)
    return config


def prediction_layers(config: Mapping[str, Any]) -> int:
    """Layers that predict further tokens, which DeepSeek's and GLM's checkpoints have after the
    last."""
    said = {**config, **(config.get("text_config") or {})}
    found = [said.get(key) for key in ("num_nextn_predict_layers", "num_mtp_modules")]
    return sum(one for one in found if isinstance(one, int))


def _check_fp8_scales(files: Iterable[SafeFile]) -> None:
    for file in files:
        for name, entry in file.entries.items():
            if name.endswith("weight_scale_inv") and entry.dtype != "F32":
                raise ModelError(
                    f"{file.path}: {name} is {entry.dtype}; scales of an fp8 base are F32; "
                    f"{quantised.AS_NUMBERS}"
                )


def _shards(path: Path) -> list[str]:
    """The names of the files of weights. Raises ModelError where one is not there, FileError where
    there are two models."""
    index_file = path / "model.safetensors.index.json"
    if index_file.is_file():
        try:
            shards = sorted(set(json.loads(index_file.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index_file} is not an index of shards: {error!r}") from error
        check_one_model(index_file, shards)
        missing = [shard for shard in shards if not (path / shard).is_file()]
        if missing:
            raise ModelError(
                f"{path} lacks {len(missing)} of {len(shards)} weight shards ({missing[0]}, ...); "
                "fetch the model again"
            )
        return shards
    if not (path / "model.safetensors").is_file():
        pickled = sorted(file.name for file in [*path.glob("*.bin"), *path.glob("*.pt")])
        found = f"only {pickled[0]}, which would have to be unpickled" if pickled else "none"
        raise ModelError(
            f"{path} has no safetensors weights (found: {found}); convert or fetch them as "
            "model.safetensors"
        )
    return ["model.safetensors"]


def _cached(name: str, revision: str | None) -> Path | None:
    """The snapshot that the hub's cache has, whole as far as config and weights tell."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    try:
        _shards(directory)
    except ModelError:
        return None
    return directory


def _download(name: str, revision: str | None, named: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=NOT_FETCHED))
    except Exception as error:  # huggingface_hub raises some twenty kinds: offline, absent, gated
        raise ModelError(
            f"{named}{name!r} is not a local directory, and could not be fetched from the hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}; check the name and the "
            "network, or give a directory"
        ) from error
