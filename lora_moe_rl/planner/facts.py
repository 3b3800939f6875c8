"""What the planner knows of a model: its `config.json` and what was published about it.

`models/*.json` hold the sizes of published models; a Hugging Face directory is read as it is; the
tiny models are in `models/` too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from lora_moe_rl.adapters.families import Config, ModelShape, language_config
from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import read_json
from lora_moe_rl.models.quantised import said_of
from lora_moe_rl.tiny.make import NAMES, QUANTISED, form_of, shape_of

MODELS = Path(__file__).parent / "models"
Format = Literal["bf16", "fp8", "int4", "mxfp4", "float32"]
PACKED: tuple[Format, ...] = ("fp8", "int4", "mxfp4")


@dataclass(frozen=True)
class Facts:
    """`checkpoint`: how the published weights are stored. `parameters`: their published number,
    with those of `prediction_layers` layers that predict further tokens and are not trained here;
    `stated` says by whom. None and '' for a directory. `path`: what model.path is for it;
    `remote_tokenizer`: whether its tokenizer is known to be code that comes with the model."""

    name: str
    config: Config
    shape: ModelShape
    checkpoint: Format
    source: str
    path: str
    remote_tokenizer: bool = False
    parameters: int | None = None
    prediction_layers: int = 0
    stated: str = ""

    def in_trainer(self, weights: Format) -> Format:
        """What the trainer holds of the base, computing in `weights`: packed parts as they are."""
        quantised = self.checkpoint in PACKED and weights == "bf16"
        return self.checkpoint if quantised else weights


@cache
def known() -> dict[str, Mapping[str, Any]]:
    """`{file name without .json: what it holds}`."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(MODELS.glob("*.json"))}


def find(name: str) -> Facts:
    """The facts of a model by its name (kimi-k2), hub name, or Hugging Face directory.

    Raises ModelError for a name that is none of these, with the nearest that are.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _of_directory(path)
    if name in NAMES:  # to the letter: deepseek-v3 is the published model
        entry = dict(known()[f"tiny_{shape_of(name)}"])
        if (form := form_of(name)) in QUANTISED:
            entry["checkpoint"] = form
        return _of_entry(entry, name)
    for stem, entry in known().items():
        if plain(name) in {plain(stem), plain(entry["name"]), *map(plain, entry["hub"])}:
            hub = next((h for h in entry["hub"] if plain(h) == plain(name)), entry["hub"][0])
            if (positions := entry.get("positions", {}).get(hub)) is not None:
                config = {**entry["config"], "max_position_embeddings": positions}
                entry = {**entry, "config": config}
            return _of_entry(entry, hub)
    names = [entry["name"] for entry in known().values()]
    near = get_close_matches(plain(name), [plain(n) for n in names], n=3, cutoff=0.4)
    nearest = [n for n in names if plain(n) in near]
    raise ModelError(
        f"{name!r} is not a model that the planner knows, and not a directory with a config.json; "
        + (f"did you mean {' or '.join(nearest)}? " if nearest else "")
        + f"It knows {', '.join(names)}"
    )


def plain(name: str) -> str:
    """A name without case, punctuation and the owner: moonshotai/Kimi-K2 is kimik2."""
    return re.sub(r"[^a-z0-9]", "", name.lower().rpartition("/")[2])


def config_of(stem: str) -> dict[str, Any]:
    """A published config as far as it is read here."""
    return dict(known()[stem]["config"])


def _of_entry(entry: Mapping[str, Any], path: str) -> Facts:
    published = entry["published"]
    return Facts(
        entry["name"],
        language_config(entry["config"]),
        ModelShape.from_hf_config(entry["config"]),
        entry["checkpoint"],
        entry["source"],
        path,
        entry.get("remote_tokenizer", False),
        published["parameters"],
        published["prediction_layers"],
        published["as"],
    )


def _of_directory(path: Path) -> Facts:
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path} has no config.json: it is not a Hugging Face model directory")
    config = read_json(file)
    shape = ModelShape.from_hf_config(config)
    return Facts(
        path.name, language_config(config), shape, _format(config, file), str(file), str(path)
    )


def _format(config: Config, file: Path) -> Format:
    """How the weights of a directory are stored, as its config says."""
    quantization = said_of(config)
    if not quantization:
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return "float32" if dtype == "float32" else "bf16"
    method = quantization.get("quant_method")
    if method == "fp8":
        return "fp8"
    groups = quantization.get("config_groups") or {}
    weights = [(group or {}).get("weights") or {} for group in groups.values()]
    if method == "compressed-tensors" and {one.get("num_bits") for one in weights} == {4}:
        return "mxfp4" if quantization.get("format") == "mxfp4-pack-quantized" else "int4"
    raise ModelError(
        f"{file}: quant_method={method!r} is not a format that the planner can size; it knows "
        f"{', '.join(get_args(Format))}"
    )
