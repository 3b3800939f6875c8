"""Trainer ranks behind the port of cluster/lasting_trainer.py that die when they are told to, and
train a vector instead of a model: what an update comes to depends on its last bit on all before."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from ray.exceptions import ActorDiedError

from lora_moe_rl.cluster.lasting_trainer import is_lost
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.errors import ActorFailed, ActorSilent
from lora_moe_rl.files.trainer_state import Saved
from lora_moe_rl.refit.parts import SentPart


def death() -> ActorFailed:
    error = ActorFailed("trainer-1", "the actor died (signal SIGKILL)", "its last words")
    error.__cause__ = ActorDiedError()
    return error


def hang() -> ActorSilent:
    return ActorSilent("trainer-0, trainer-1", "no answer within 60 s")


def broken_group() -> ActorFailed:
    error = ActorFailed("trainer-0", "Connection closed by peer")
    error.__cause__ = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] no")
    return error


def bug() -> ActorFailed:
    error = ActorFailed("trainer-0", "shapes do not match")
    error.__cause__ = RuntimeError("shapes do not match")
    return error


@dataclass
class MortalRanks:
    """`fates`: by method, what its next calls raise, None for nothing; the state is spoiled first,
    as it is when a step was applied and not told of. `events`: what was asked, in turn."""

    fates: dict[str, list[Exception | None]] = field(default_factory=dict)
    parts_last: bool = False
    forgets: bool = False  # what is loaded is not what was held
    dtype: str = "float32"
    state: np.ndarray = field(default_factory=lambda: np.arange(4.0))
    version: int = 0
    life: int = 0
    dead: bool = False  # until they are started anew
    events: list[str] = field(default_factory=list)

    def _do(self, method: str) -> None:
        self.events.append(method)
        fates = self.fates.get(method, [])
        fate = fates.pop(0) if fates else None
        if fate or (self.dead and method != "start_anew"):
            self.state, self.dead = self.state * np.nan, self.dead or is_lost(fate)
            raise fate or death()

    async def update(self, batch, routes):
        self.state = np.sin(self.state + batch.step + sum(routes)) / 3
        self.version += 1
        self._do("update")
        return UpdateResult(self.version, {}, 0, 0, 1.0), self.send_now()

    def send_now(self):
        part = SentPart(0, self.version, f"memory of life {self.life}", 8, (hash(self._bits()),))
        return [part]

    async def send(self):
        self._do("send")
        return self.send_now()

    async def sent(self, parts):
        self._do("sent")
        return list(parts)

    def sent_now(self, parts):
        return list(parts)

    async def score(self, sequences, routes, adapters=True):
        self._do("score")
        return [self.state.copy()]

    async def score_ahead(self, sequences) -> None: ...

    async def copy(self):
        self._do("copy")
        return [(self.version, self.state.copy())]

    def load_copy(self, parts) -> None:
        self._do("load_copy")
        ((self.version, self.state),) = parts
        if self.forgets:
            self.state = self.state + 1e-6

    async def check_alive(self) -> None:
        self._do("check_alive")

    @property
    def places(self) -> list:
        self.events.append("stacks")
        return []

    def end(self) -> None:
        self.events.append("end")

    def start_anew(self) -> None:
        self._do("start_anew")
        self.state, self.version, self.life = np.arange(4.0), 0, self.life + 1
        self.dead = False

    def save(self, directory: Path) -> Saved:
        self._do("save")
        np.save(directory / "state.npy", self.state)
        return Saved({"version": self.version}, {})

    def load(self, directory: Path, meta: dict) -> None:
        self._do("load")
        self.state, self.version = np.load(directory / "state.npy"), meta["version"]

    def set_adapter(self, tensors) -> None:
        self.state = tensors["all"]

    def _bits(self) -> bytes:
        return self.state.tobytes()


def batch(step: int) -> SimpleNamespace:
    return SimpleNamespace(step=step)
