"""Bringing a fault about in a run, from outside wherever that can be done; and seeing that it has
come about."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lora_moe_rl.chaos.child import Child, alive, stopped
from lora_moe_rl.chaos.kinds import KINDS
from lora_moe_rl.chaos.plan import Fault
from lora_moe_rl.files import checkpoint, trainer_state


@dataclass(frozen=True)
class Scene:
    """Where faults come about. `asked`: the folder through which ranks are asked for some."""

    child: Child
    run_dir: Path
    asked: Path


@dataclass(frozen=True)
class Injected:
    """A fault that was brought about. `who` has it; `happened` says whether it has come about by
    now; `lift` takes it away, where that is not the run's to do."""

    who: str
    happened: Callable[[], bool]
    lift: Callable[[], None] = lambda: None


def inject(scene: Scene, fault: Fault) -> Injected | None:
    """None: there is nobody yet who could have it."""
    if KINDS[fault.kind].inside:
        return _ask(scene, fault.kind)
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        return INJECTORS[fault.kind](scene, fault.victim)
    return None


def _one(processes: Sequence[psutil.Process], victim: int) -> psutil.Process | None:
    return processes[victim % len(processes)] if processes else None


def _kill(process: psutil.Process | None) -> Injected | None:
    if process is None:
        return None
    process.kill()
    return Injected(f"process {process.pid}", lambda: not alive(process))


def _stop(processes: Sequence[psutil.Process]) -> Injected | None:
    if not processes:
        return None
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    who = ", ".join(str(process.pid) for process in processes)
    halted = lambda: all(stopped(p) or not alive(p) for p in processes)  # noqa: E731
    return Injected(f"process {who}", halted)


def _kill_engine(scene: Scene, victim: int) -> Injected | None:
    return _kill(_one(scene.child.actors("engine"), victim))


def _stop_engine(scene: Scene, victim: int) -> Injected | None:
    """Its actor goes on, and answers."""
    actor = _one(scene.child.actors("engine"), victim)
    return _stop(actor.children(recursive=True) if actor else [])


def _kill_rank(scene: Scene, victim: int) -> Injected | None:
    return _kill(_one(scene.child.actors("trainer"), victim))


def _stop_rank(scene: Scene, victim: int) -> Injected | None:
    rank = _one(scene.child.actors("trainer"), victim)
    return _stop([rank] if rank else [])


def _kill_controller(scene: Scene, victim: int) -> Injected | None:
    return _kill(_one(scene.child.controllers(), victim))


def _stop_scorer(scene: Scene, victim: int) -> Injected | None:
    scorer = _one(scene.child.scorers(), victim)
    return _stop([scorer] if scorer else [])


def _fill_disk(scene: Scene, victim: int) -> Injected | None:
    """The kernel refuses what a rank writes beyond two thirds of its file of the newest checkpoint:
    a part of a version has a third of that, the adapter without Adam's moments, and still fits."""
    ranks = scene.child.actors("trainer")
    newest = checkpoint.newest_valid(scene.run_dir / "checkpoints").path
    if not ranks or newest is None:
        return None
    number = victim % len(ranks)
    rank = ranks[number]
    limit = (newest / trainer_state.file_name(number)).stat().st_size * 2 // 3
    before = resource.prlimit(rank.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (limit, before[1]))

    def limited() -> bool:
        return resource.prlimit(rank.pid, resource.RLIMIT_FSIZE)[0] == limit

    def lift() -> None:
        with suppress(ProcessLookupError):
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, before)

    return Injected(f"trainer-{number}", limited, lift)


def _ask(scene: Scene, kind: str) -> Injected:
    """Asks whichever rank comes first (`hooks.py`)."""
    done = scene.asked / f"{kind}.done"
    done.unlink(missing_ok=True)
    (scene.asked / f"{kind}.asked").touch()
    return Injected("a trainer rank", done.exists)


Injector = Callable[[Scene, int], Injected | None]
INJECTORS: dict[str, Injector] = {
    "engine.kill": _kill_engine,
    "engine.hang": _stop_engine,
    "rank.kill": _kill_rank,
    "rank.hang": _stop_rank,
    "controller.kill": _kill_controller,
    "disk.full": _fill_disk,
    "reward.hang": _stop_scorer,
}
