"""`lora-moe-rl tinker`: a training service for clients of Tinker's SDK."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from lora_moe_rl.endpoint.command import owners_key
from lora_moe_rl.endpoint.listening import Listening
from lora_moe_rl.errors import ConfigError, LoraMoeRlError
from lora_moe_rl.run.standing import Loop
from lora_moe_rl.service import start
from lora_moe_rl.service.engine_room import EngineRoom
from lora_moe_rl.service.folders import Folders
from lora_moe_rl.service.settings import check_key

# How long requests are still answered once ranks have failed: Tinker's SDK asks for a result after
# it was promised one, and a server that is gone for ever.
LAST_ANSWERS_S = 5.0
ABOUT = """\
Serve Tinker's protocol from this machine's (or a Ray cluster's) trainer ranks and rollout engines:
scripts of the tinker SDK and tinker-cookbook train and sample here, with router replay.

TARGET is a recipe (.py), a config file, or a model (directory, hub name, tiny model). Clients set
TINKER_BASE_URL to the address that is printed, and TINKER_API_KEY to the key, which begins with
tml- (any such one where none is asked for).
"""
EPILOG = """\
examples:
  lora-moe-rl tinker qwen3_moe
  lora-moe-rl tinker Qwen/Qwen3-30B-A3B adapter.rank=32 trainer.world_size=8 trainer.ep=8 \\
    rollout.engines=4 rollout.tp=2 refit.slots=8
  KEY=tml-… lora-moe-rl tinker recipe.py --host 0.0.0.0 --key-env KEY
"""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    key = owners_key(options)
    check_key(key)
    directory = Path(options.dir).expanduser().absolute()
    config = start.config_of(options.target, options.settings, directory)
    name = options.name or str(config.model.path)
    listening = Listening(options.host, options.port, "--key-env" if key is None else None)
    try:
        with _locked(directory):
            folders = Folders(directory / start.MODELS)
            with start.backend(config, name) as room:
                asyncio.run(_serve(room, listening, key, folders), loop_factory=Loop)
    finally:
        listening.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl tinker",
        description=ABOUT,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as adapter.rank=32")
    parser.add_argument(
        "--name", help="what clients call the base model (model.path, as it is given)"
    )
    parser.add_argument(
        "--dir", default="runs/tinker", help="where checkpoints and logs are kept (runs/tinker)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address it listens on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8100, help="0: any that is free (8100)")
    parser.add_argument(
        "--key-env", metavar="NAME", help="the environment variable that holds the key that is "
        "asked for; without one none is",
    )  # fmt: skip
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser


def _locked(directory: Path) -> FileLock:
    """The lock by which one service alone has a directory. Raises ConfigError for one that another
    service uses."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"--dir {directory} is in use by another service; choose another, or end that one"
        ) from error
    return lock


async def _serve(room: EngineRoom, listening: Listening, key: str | None, folders: Folders) -> None:
    """Until a signal comes, or ranks fail, which is raised."""
    from lora_moe_rl.service.app import Service

    loop = asyncio.get_running_loop()
    starting = asyncio.create_task(room.start())
    deaths: list[LoraMoeRlError] = []

    def stop() -> None:
        starting.cancel()
        listening.stop()

    def died(error: LoraMoeRlError) -> None:
        deaths.append(error)
        loop.call_later(LAST_ANSWERS_S, stop)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    room.turn.on_death = died
    await asyncio.wait([starting])
    if deaths:
        raise deaths[0]
    if starting.cancelled():  # by a signal
        return
    starting.result()
    service = Service(room, folders, key)
    facts = room.facts
    print(f"TINKER_BASE_URL={listening.root} serves {facts.base_model}, ranks to {facts.rank}",
          flush=True)  # fmt: skip
    watching = asyncio.create_task(service.watch())
    try:
        await listening.serve(service.app())
    finally:
        watching.cancel()
    if deaths:
        raise deaths[0]
