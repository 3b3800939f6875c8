"""A checkpoint whose head is its embedding, with a head of its own: the same model.

Tensors are copied bit for bit, the embedding twice. Adapters of the one are adapters of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lora_moe_rl.adapters.families import ModelShape, hf_embedding
from lora_moe_rl.errors import ExportError
from lora_moe_rl.export.merged import NO_FILES, MergeReport, write_part
from lora_moe_rl.files.untrusted import SafeWeights, inside, read_json
from lora_moe_rl.models.directory import check_model_dir

HEAD, KEY = "lm_head.weight", "tie_word_embeddings"


def write(model: Path, out: Path | str, say: Callable[[str], None]) -> MergeReport:
    """Writes `out`, new or empty, or goes on with it. Raises ModelError for a model that is not
    supported, ExportError for one that has a head of its own, or no embedding, and for a disk that
    refuses, FileError for a damaged checkpoint."""
    config = read_json(inside(model, "config.json"))
    new = dict(config) | {KEY: False}
    shape = ModelShape.from_hf_config(new)  # whether it is supported, before anything is copied
    with SafeWeights.open(model) as base:
        names = _names([entry.name for entry in base.entries()], config, shape, model)
        report = write_part(base, names, new, out, NO_FILES, say)
    check_model_dir(Path(out))
    return report


def _names(
    found: list[str], config: Mapping[str, Any], shape: ModelShape, model: Path
) -> dict[str, tuple[str, ...]]:
    """A head beside an embedding that config.json says is the head is what nobody reads."""
    embedding = hf_embedding(shape)
    if not config.get(KEY, HEAD not in found):
        raise ExportError(f"{model} has a head of its own already: it is trained as it is")
    if embedding not in found:
        raise ExportError(f"{model} has no {embedding}, which its config.json says is its head")
    names = {name: (name,) for name in found if name != HEAD}
    return names | {embedding: (embedding, HEAD)}
