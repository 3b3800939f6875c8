"""`lora-moe-rl fetch URL --out DIR`: a run directory from what `checkpoint.push_to` has."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from lora_moe_rl.config.options import natural
from lora_moe_rl.errors import CheckpointError, FileError
from lora_moe_rl.files import checkpoint, owner, storage
from lora_moe_rl.files.out_directory import require_empty


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl fetch",
        description="Make a run directory from the copies that checkpoint.push_to has of a run, to "
        "go on in: the newest checkpoint that is valid in every byte, or that of a step.",
    )
    parser.add_argument("url", help="what checkpoint.push_to was")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    parser.add_argument("--step", type=natural, metavar="N", help="that of step N; else the newest")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    path = fetch(options.url.rstrip("/"), options.out, options.step)
    print(f"{path}\ngo on with: lora-moe-rl train {options.out}/config.yaml --resume")
    return 0


def fetch(url: str, out: Path, step: int | None = None) -> Path:
    """Returns the checkpoint in `out`. Raises FileError when there is none to fetch, and
    CheckpointError, with every reason, when none of them is valid."""
    require_empty(out)
    there = storage.steps(url)
    if step is not None:
        if step not in there:
            raise FileError(f"{url} has no checkpoint of step {step}; it has {there or 'none'}")
        there = [step]
    if not there:
        raise FileError(f"{url} has no whole checkpoint yet")
    fs, root = storage.reach(url)
    with storage.told(f"{url} cannot be read"):
        has_config = fs.isfile(config := f"{root}/config.yaml")
    if not has_config:
        raise FileError(f"{url} has no config.yaml, with which a run would go on")
    skipped = []
    for one in reversed(there):
        path = out / storage.CHECKPOINTS / checkpoint.directory_name(one)
        try:
            with storage.told(f"{url} cannot be read"):
                storage.download(url, one, path)
            checkpoint.read_manifest(path)
        except (CheckpointError, FileError) as error:
            skipped.append(f"step {one}: {error}")
            shutil.rmtree(path, ignore_errors=True)
            continue
        with storage.told(f"{url} cannot be read"):
            fs.get_file(config, str(out / "config.yaml"))
            whose = f"{root}/{owner.OWNER}"
            owner.made_of_copies(out, fs.cat_file(whose) if fs.isfile(whose) else None)
        return path
    raise CheckpointError(f"no checkpoint of {url} is valid:\n  " + "\n  ".join(skipped))
