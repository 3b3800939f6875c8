"""The language model of a checkpoint of text and images, as a checkpoint of its own.

Tensors are copied bit for bit, quantised ones too, under the names that they have without the
larger model; its config is what config.json says of it, and the tokenizer and the rest are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lora_moe_rl.adapters.families import Family, ModelShape, around
from lora_moe_rl.adapters.families.common.family import Around
from lora_moe_rl.errors import ExportError
from lora_moe_rl.export.merged import MergeReport, write_part
from lora_moe_rl.files.untrusted import SafeWeights, inside, read_json
from lora_moe_rl.models.directory import check_model_dir

# Of the larger model: how images come to it.
_PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# Keys that config.json can have for all parts together.
_SHARED = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("quantization_config", "tie_word_embeddings"),
)
# The larger model's code, and where it lay.
_LEFT_OUT = ("auto_map", "_name_or_path")
_SHOWN = 3


def write(model: Path, out: Path | str, say: Callable[[str], None]) -> MergeReport:
    """Writes `out`, new or empty, or goes on with it. Raises ModelError for a language model that
    is not supported, ExportError for a checkpoint that has none inside, for weights without a
    place, and for a disk that refuses, FileError for a damaged checkpoint."""
    config = read_json(inside(model, "config.json"))
    family, larger = _larger(model, config)
    new = config_of(config, family, larger)
    ModelShape.from_hf_config(new)  # whether it is supported, before anything is copied
    own: dict[str, str | None] = dict.fromkeys(_PROCESSORS)
    with SafeWeights.open(model) as base:
        names = _names((entry.name for entry in base.entries()), larger, model)
        report = write_part(base, names, new, out, own, say)
    check_model_dir(Path(out))
    return report


def _larger(model: Path, config: Mapping[str, Any]) -> tuple[Family, Around]:
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "missing"
    if (found := around(architecture)) is None:
        raise ExportError(
            f"{model} is of architecture {architecture}, which is no model of text and images that "
            "is known; one whose language model is trained as it is needs no copy of that"
        )
    if not isinstance(config.get(found[1].key), dict):
        raise ExportError(f"config.json of {model} lacks {found[1].key}, its language model's")
    return found


def config_of(config: Mapping[str, Any], family: Family, larger: Around) -> dict[str, Any]:
    """The language model's config.json."""
    language = config[larger.key]
    shared = {key: config[key] for key in _SHARED if key in config and key not in language}
    new = {key: value for key, value in language.items() if key not in _LEFT_OUT} | shared
    if isinstance(quantised := new.get("quantization_config"), dict) and "ignore" in quantised:
        # Names of modules; patterns (re:) fit with and without the prefix.
        ignored = [name.removeprefix(larger.prefix) for name in quantised["ignore"]]
        new["quantization_config"] = quantised | {"ignore": ignored}
    return new | {"architectures": [family.architecture]}


def _names(found: Iterable[str], larger: Around, model: Path) -> dict[str, tuple[str]]:
    """`{name in the checkpoint: (name of the language model by itself,)}`."""
    names, unknown = {}, []
    for name in found:
        if name.startswith(larger.prefix):
            names[name] = (name.removeprefix(larger.prefix),)
        elif not name.startswith(larger.left_out):
            unknown.append(name)
    if unknown or not names:
        shown = ", ".join(sorted(unknown)[:_SHOWN]) or "nothing"
        raise ExportError(
            f"{model} has {shown} beside {larger.prefix}* ({len(names):,} tensors) and "
            f"{', '.join(f'{one}*' for one in larger.left_out)}: it is not laid out as "
            f"{larger.architecture}"
        )
    return names
