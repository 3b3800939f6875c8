"""A tiny model's directory: made if need be, and found in the cache the second time.

Importing this file imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

from lora_moe_rl.errors import ModelError

TINY_NAMES = ("qwen3_moe", "deepseek_v3")
# The same, with linears as quantised checkpoints have them, and the files that make it so.
QUANTISED = {"int4": ("quantise",), "fp8": ("quantise", "widen"), "mxfp4": ("quantise",)}
QUANTISED_NAMES = tuple(f"{name}-{form}" for form in QUANTISED for name in TINY_NAMES)
# The same, pre-trained further on several problems in a row, as conversations have them.
TURNS_NAMES = tuple(f"{name}-turns" for name in TINY_NAMES)
NAMES = TINY_NAMES + TURNS_NAMES + QUANTISED_NAMES
MARK = ".lora_moe_rl.made"  # in a directory of the user's: which it is
SOURCES = ("arithmetic", "muon", "pretrain", "shapes", "tokenizer")


def make_tiny(
    name: str, out: Path | None = None, force: bool = False, progress: bool = True
) -> Path:
    """Pre-train a tiny model (about a minute on two cores), or find it in the cache.

    Without `out` it goes into the cache directory under a key of all that decides its weights;
    `force` makes it anew. Returns the Hugging Face directory.
    """
    if name not in NAMES:
        raise ModelError(f"{name!r} is not a tiny model; there are {', '.join(NAMES)}")
    target = Path(out) if out else cached_at(name)
    if (target / "config.json").is_file() and not force:
        if out:
            _require_same(name, target)
        return target
    if out and target.exists() and not target.is_dir():
        raise ModelError(f"{target} is no directory; name another")
    if out and target.is_dir() and any(target.iterdir()) and not force:
        raise ModelError(f"{target} exists and holds no model; name another directory, or --force")

    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        # Another process may have made it while this one waited.
        if force or not (target / "config.json").is_file():
            _make(name, target, progress)
            if out:
                (target / MARK).write_text(cached_at(name).name)
    return target


def _require_same(name: str, target: Path) -> None:
    """Raises ModelError where the model that is at a place of the user's is another. In the cache
    the directory's name says which it is."""
    mark = target / MARK
    there = mark.read_text() if mark.is_file() else ""
    if there != cached_at(name).name:
        raise ModelError(
            f"{target} holds another model than {name} as it is made now; name another directory, "
            "or --force"
        )


def _make(name: str, target: Path, progress: bool) -> None:
    if name not in QUANTISED_NAMES:
        from lora_moe_rl.tiny.build import build

        known = make_tiny(shape_of(name), progress=progress) if name in TURNS_NAMES else None
        build(name, target, progress, known)
        return
    from lora_moe_rl.tiny.quantise import quantise
    from lora_moe_rl.tiny.widen import widen

    source = make_tiny(shape_of(name), progress=progress)
    if form_of(name) != "fp8":
        quantise(source, target, "int4" if form_of(name) == "int4" else "mxfp4")
        return
    with tempfile.TemporaryDirectory() as folder:
        widen(source, wide := Path(folder) / "wide")
        quantise(wide, target, "fp8")


def shape_of(name: str) -> str:
    """A tiny model's shape: qwen3_moe of qwen3_moe-turns."""
    return name.partition("-")[0]


def form_of(name: str) -> str:
    """What a tiny model is beside its shape: turns of qwen3_moe-turns; '' of the shape alone."""
    return name.partition("-")[2]


def find_tiny(name: str) -> Path | None:
    """The directory of a tiny model in the cache, if it was made already."""
    target = cached_at(name)
    return target if (target / "config.json").is_file() else None


def cached_at(name: str) -> Path:
    """Where a tiny model is in the cache, or will be."""
    return cache_dir() / f"{name}-{_cache_key(name)}"


def cache_dir() -> Path:
    """Where made models are kept: $LORA_MOE_RL_CACHE, or ~/.cache/lora_moe_rl."""
    return Path(os.environ.get("LORA_MOE_RL_CACHE") or Path.home() / ".cache" / "lora_moe_rl")


def _cache_key(name: str) -> str:
    """A hash of what decides the weights: our sources and the versions of what they call."""
    here = Path(__file__).parent
    sources = SOURCES + QUANTISED.get(form_of(name), ())
    parts = [name, *((here / f"{source}.py").read_text() for source in sources)]
    parts += [version(package) for package in ("torch", "transformers", "tokenizers")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
