"""owner.json: whose copies are at checkpoint.push_to. A place has one owner.

In a run directory it says which run that is, at the place whose copies are there:

    {"run": 32 hex digits, "run_dir": where that run was, "follows": the run whose copy was fetched}

A directory that is a copy of another is another run. One that was made of copies
(`lora-moe-rl fetch`) becomes their owner when it goes on, and the run that made them is none any
more.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.replacing import replace_file

OWNER = "owner.json"
LONGEST = 1 << 16  # bytes of such a file


class OthersError(ConfigError):
    """A place whose copies are another run's."""


@dataclass(frozen=True)
class Owner:
    run: str
    run_dir: str
    follows: str | None = None

    @classmethod
    def parse(cls, content: bytes) -> Owner | None:
        """None for what is no such file."""
        try:
            found = json.loads(content[:LONGEST])
            run, run_dir, follows = found["run"], found["run_dir"], found.get("follows")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not isinstance(run, str) or not isinstance(run_dir, str):
            return None
        return cls(run, run_dir, follows if isinstance(follows, str) else None)

    def content(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def made_of_copies(run_dir: Path, there: bytes | None) -> None:
    """Writes down that `run_dir` was made of copies whose owner.json is `there`."""
    before = None if there is None else Owner.parse(there)
    follows = None if before is None else before.run
    _write(run_dir, Owner(secrets.token_hex(16), str(run_dir.absolute()), follows))


def of_run(run_dir: Path) -> Owner:
    """Which run that is; one that has not said so yet, or is a copy of one that has, is a new
    one."""
    found, place = _read(run_dir), str(run_dir.absolute())
    if found is not None and not _is_copy(found, run_dir):
        return found
    return _write(run_dir, Owner(secrets.token_hex(16), place))


def claim(fs: Any, root: str, run_dir: Path) -> None:
    """Makes the run the owner of a place that has none, or that of what it was fetched from. Raises
    OthersError when another is."""
    own, path = of_run(run_dir), f"{root}/{OWNER}"
    if not fs.exists(path):
        with suppress(FileExistsError):  # another run's, a moment ago
            fs.pipe_file(path, own.content(), mode="create")
    there = _at(fs, root)
    if there is not None and own.follows == there.run != own.run:
        fs.pipe_file(path, own.content())
        there = _at(fs, root)
    if there is not None and own.run == there.run:
        return
    whose = "" if there is None else f", that in {there.run_dir}"
    raise OthersError(
        f"the place is another run's{whose} ({root}/{OWNER}); name another place, or remove that "
        "file if no run needs it any more"
    )


def _at(fs: Any, root: str) -> Owner | None:
    return Owner.parse(fs.cat_file(f"{root}/{OWNER}"))


def _read(run_dir: Path) -> Owner | None:
    try:
        return Owner.parse((run_dir / OWNER).read_bytes())
    except FileNotFoundError:
        return None


def _write(run_dir: Path, owner: Owner) -> Owner:
    replace_file(run_dir / OWNER, owner.content())
    return owner


def _is_copy(found: Owner, run_dir: Path) -> bool:
    """Whether the directory that the file is of is still there, and is not this one."""
    first = Path(found.run_dir)
    try:
        if first.samefile(run_dir):
            return False
        before = _read(first)
    except OSError:  # it was moved, or is another machine's
        return False
    return before is not None and before.run == found.run
