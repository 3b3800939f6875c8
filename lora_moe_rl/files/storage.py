"""Copies in a directory or in storage that fsspec reaches (s3://, gs://, …), and the process that
makes them.

    TARGET/config.yaml
    TARGET/owner.json                 which run's copies these are (owner.py)
    TARGET/checkpoints/step-000010/   as in the run directory; manifest.json is written last
    TARGET/adapters/step-000010/      the PEFT directory; adapter_config.json is written last

A copy is whole when its last file is there. A run that goes on from an older step leaves the course
of the later ones: their last file becomes left.json, and nothing is removed.

`python -m lora_moe_rl.files.storage` is run by `pusher.py`, which can end it: a request to storage
may hang for ever.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lora_moe_rl.errors import CheckpointError, ConfigError, FileError, LoraMoeRlError
from lora_moe_rl.files import checkpoint, owner
from lora_moe_rl.files.out_directory import require_place

CHECKPOINTS, ADAPTERS = "checkpoints", "adapters"
LAST = (checkpoint.MANIFEST, "adapter_config.json")
LEFT = "left.json"
OTHERS = 3  # exit code


def reach(url: str) -> tuple[Any, str]:
    """(file system, path in it) of a directory or a URL. Raises ConfigError when no package is
    there that speaks its protocol."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{url} cannot be reached: {error}") from error


def check_place(target: str) -> None:
    """Raises ConfigError or FileError for a place that nothing can be copied to, as far as that can
    be said without going there."""
    named = f"checkpoint.push_to={target}"
    if "://" not in target:
        require_place(Path(target), named)
        return
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(target.partition("://")[0].rpartition("::")[2])
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{named} cannot be reached: {error}") from error


def begin(run_dir: Path, target: str, config: Path, goes_on: int | None) -> list[int]:
    """Makes the run the owner of `target`, and puts the file `config` there. goes_on: the step that
    it goes on from; None for a new run, which raises ConfigError where there are copies. Raises
    OthersError where another run is the owner. Returns the later steps, whose copies were whole and
    are none any more."""
    fs, root = reach(target)
    if goes_on is None and fs.exists(f"{root}/{CHECKPOINTS}") and fs.ls(f"{root}/{CHECKPOINTS}"):
        raise ConfigError(
            f"checkpoint.push_to={target} holds copies of a run already; name another place"
        )
    fs.makedirs(root, exist_ok=True)
    owner.claim(fs, root, run_dir)
    left = set[int]()
    for folder, last in zip((CHECKPOINTS, ADAPTERS), LAST, strict=True):
        whole = _whole(fs, f"{root}/{folder}", last) if fs.exists(f"{root}/{folder}") else {}
        for path in (path for step, path in whole.items() if step > (goes_on or 0)):
            fs.mv(f"{path}/{last}", f"{path}/{LEFT}")
        left |= {step for step in whole if step > (goes_on or 0)}
    fs.put_file(str(config), f"{root}/config.yaml")
    return sorted(left)


def upload(source: Path, target: str) -> None:
    """Copies the files of `source` into `target`, unless the same are there as a whole already."""
    fs, root = reach(target)
    names = sorted(
        (path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()),
        key=lambda name: (name in LAST, name),
    )
    last = names[-1]
    if last == checkpoint.MANIFEST and fs.exists(f"{root}/{last}"):
        if fs.cat_file(f"{root}/{last}") == (source / last).read_bytes():
            return
        fs.rm_file(f"{root}/{last}")  # until it is whole again it is none
    if fs.exists(f"{root}/{LEFT}"):  # of another course, whose files are written over now
        fs.rm_file(f"{root}/{LEFT}")
    for name in names:
        folder = f"{root}/{name}".rpartition("/")[0]
        fs.makedirs(folder, exist_ok=True)
        fs.put_file(str(source / name), f"{root}/{name}")


def steps(url: str) -> list[int]:
    """The steps of the whole checkpoints that are there, ascending. Raises FileError when there is
    nothing to look into."""
    with told(f"{url} has no {CHECKPOINTS} that can be listed"):
        fs, root = reach(url)
        return sorted(_whole(fs, f"{root}/{CHECKPOINTS}", checkpoint.MANIFEST))


@contextmanager
def told(what: str) -> Iterator[None]:
    """What is raised inside becomes a FileError that says `what`: the packages of protocols have
    classes of their own for a key or a server that is not there."""
    try:
        yield
    except LoraMoeRlError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise FileError(f"{what}: {reason}") from error


def _whole(fs: Any, folder: str, last: str) -> dict[int, str]:
    """The path of each step in `folder` that has its last file."""
    found = [path.rstrip("/") for path in fs.ls(folder, detail=False)]
    names = {path: path.rpartition("/")[2].removeprefix("step-") for path in found}
    return {
        int(digits): path
        for path, digits in names.items()
        if digits.isdigit() and fs.exists(f"{path}/{last}")
    }


def download(url: str, step: int, into: Path) -> None:
    """Copies a checkpoint into the directory `into`: the files that its manifest names, of the
    sizes that it names. Raises CheckpointError when that is not what is there."""
    fs, root = reach(url)
    name = checkpoint.directory_name(step)
    root = f"{root}/{CHECKPOINTS}/{name}"
    into.mkdir(parents=True)
    fs.get_file(f"{root}/{checkpoint.MANIFEST}", str(into / checkpoint.MANIFEST))
    for file, entry in checkpoint.files_of(into).items():
        size = fs.info(f"{root}/{file}")["size"]
        if size != entry["size"]:
            raise CheckpointError(f"{url}: {name}/{file} has {size} bytes, not {entry['size']}")
        (into / file).parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(f"{root}/{file}", str(into / file))


def main(arguments: list[str]) -> int:
    """`begin RUN TARGET CONFIG [STEP]` or `upload RUN TARGET DIR PLACE`, that below the target.

    Says on its last line why it failed; with exit code 2 another try would too, and with OTHERS
    because another run's copies are there. `begin` prints the steps whose copies are none any more.
    Ends with the process that holds its standard input."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    what, run_dir, target, *more = arguments
    try:
        if what == "begin":
            config, *step = more
            print(*begin(Path(run_dir), target, Path(config), int(step[0]) if step else None))
        else:
            owner.claim(*reach(target), Path(run_dir))
            upload(Path(more[0]), f"{target}/{more[1]}")
    except owner.OthersError as error:
        print(error, file=sys.stderr)
        return OTHERS
    except LoraMoeRlError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Exception as error:  # whatever a protocol's package raises
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


def _end_with_parent() -> None:
    # Not by sys.stdin, whose lock a thread that reads would still hold when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
