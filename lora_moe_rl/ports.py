"""The ports: all that the run knows of what it drives.

The loop, the publisher and the algorithms call these and nothing else; no Megatron, vLLM, Ray or
loss stands above them. Who implements what:

    Prompts       data/prompts.py for one data set, data/mixture.py for several
    Trainer       cluster/lasting_trainer.py, over cluster/trainer.py and trainer/ (Megatron-core)
    Engines       cluster/engines.py, over rollout/ (vLLM); of them the loop sees a Sampler
    Policy        cluster/ticket_policy.py: the engines as one ticket sees them
    Rewards       rewards/by_set.py, over rewards/runner.py and rewards/combining.py
    Teacher       rewards/teacher.py, or rewards/self_teacher.py
    Environment   environments/, a file each
    Algorithm     algorithms/, a file each (the base class is algorithms/base.py)
    Publisher     run/publisher.py
    Channel       refit/transports/, a file each (the base class is in its __init__)

Sampler, Environment and Publisher of a run that learns from its rows' own answers: run/offline.py.

Calls that take long are coroutines. Routes, parts of adapters and other bulk data pass by
reference: `Ref` is whatever the implementation hands out and takes back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

    from lora_moe_rl.algorithms.base import Pass
    from lora_moe_rl.data.batch import TrainBatch
    from lora_moe_rl.data.samples import Group, Prompt, Sample
    from lora_moe_rl.data.scores import Played, Scores
    from lora_moe_rl.data.told import ToldPrompt
    from lora_moe_rl.data.update_result import UpdateResult
    from lora_moe_rl.files.trainer_state import Saved
    from lora_moe_rl.kernels.merge.rounding import Arrived

Ref = Any
Watch = Callable[[int], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Receipt:
    """What an engine answers when it has taken an adapter version: it is served. `bytes` and
    `tensors` came in, `checksum` is that of the version. `seconds` by stage of the engine's work,
    and `total`. `arrived`: of merged weights, what rounding left of the change, by module.
    `peak_gib`: the most memory that any of its workers has held (telemetry/peak.py)."""

    version: int
    bytes: int
    tensors: int
    checksum: str
    seconds: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, Arrived] = field(default_factory=dict)
    peak_gib: float = 0.0


@dataclass(frozen=True)
class Scored:
    """What one engine gives for some sequences: its number, logprobs, float32 [L - 1] of each, and
    a reference to the routes it took. `checksum` is equal for equal routes; `complete`: none are
    missing."""

    engine: int
    logprobs: list[np.ndarray]
    routes: Ref
    checksum: str
    complete: bool


@dataclass(frozen=True)
class Turn:
    """One question of a conversation, whose tokens so far are what is gone on from.

    `conversation` is its place among those of the prompt, `number` counts its questions from 0:
    both seed the answer. `recorded`: the leading rows of routes that earlier turns have, of which
    the newest were `recorded_by` that adapter version (None: there are none); only those after them
    are recorded anew, or all under another version (schedule.continued=split). `max_tokens`: the
    longest answer.
    """

    conversation: int
    number: int
    recorded: int
    max_tokens: int
    recorded_by: int | None = None


@dataclass(frozen=True)
class Manner:
    """How something is sampled otherwise than a run's samples. `seed` None: one that follows from
    who asks. `max_tokens`: the longest response to a prompt, None: that of training; a turn has its
    own. `stop`: texts that end it with the token that completes one, as rollout.stop does. What
    ends a sample of training ends it too."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


class Written(NamedTuple):
    """What an engine wrote: a text, why it ended (stop or length), and how many tokens it has."""

    text: str
    finish_reason: str
    num_tokens: int


class Prompts(Protocol):
    """All prompts of a run, without end."""

    @property
    def dropped(self) -> int:
        """Rows left out so far because their prompts are too long."""
        ...

    @property
    def filtered(self) -> int:
        """Rows left out so far by data.filter."""
        ...

    def next(self, n: int) -> list[Prompt]: ...

    def lengths(self) -> list[int]:
        """Tokens of each prompt, with its longest answer if it has any, as far as they are known;
        none is drawn."""
        ...

    def examples(self, n: int) -> list[Prompt]:
        """Some prompts to be looked at, `n` or one of each data set; none is drawn."""
        ...

    def repeated(self, per_step: int) -> list[str]:
        """A sentence for each data set that has fewer prompts than a step takes of it."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises DataError when the data are not the same."""
        ...


class Answers(Protocol):
    """Who is asked in turns."""

    async def sample(
        self, token_ids: Sequence[int], n: int, turn: Turn | None = None
    ) -> tuple[list[Sample], Ref]:
        """`n` samples that go on from `token_ids`, and a reference to their routes: `n` responses
        to a prompt, or with `turn` one more turn of a conversation (`n` is 1 then).

        Raises EngineDied when the engine that was asked has died; it is started anew meanwhile.
        """
        ...


class Policy(Answers, Protocol):
    """The policy as one ticket sees it: at one adapter version, or from that one on at the newest
    (schedule.in_flight=continue), seeded by the ticket's number."""

    def join(self, samples: Sequence[Sequence[Ref]]) -> Ref:
        """The routes of several samples, from those of the turns of each."""
        ...

    def beside(self, version: int | None, manner: Manner) -> Answers:
        """Adapter `version`, or the bare base (None), on the same engines: for turns that are in no
        sample, and have no routes. Asking it raises NotServed for a version that no slot holds any
        more."""
        ...

    def held_up(self) -> float:
        """Seconds so far in which requests waited for engines that were started anew, gave way to
        an update or took a version: of no time-out of whoever asks."""
        ...


class Sampler(Protocol):
    """Who samples, as the loop sees it."""

    restarts: int

    def policy(self, version: int, seed: int, watch: Watch, manner: Manner | None = None) -> Policy:
        """`watch(index)` is a context manager that goes around each request for samples, with the
        index of the engine that is asked. `manner` None is that of training; with one of their own,
        an evaluation's, all samples are of `version`."""
        ...

    async def pin(self, version: int | None) -> None:
        """From now on this version keeps its slot, however many newer ones are published; None:
        none does."""
        ...

    def lost(self, version: int) -> bool:
        """Whether no engine will ever serve a version again, which all have served: those that came
        back have only newer ones."""
        ...

    async def all_back(self) -> None:
        """Waits until every engine that died serves again: it takes the newest version from the
        trainer's parts, which the next update writes over."""
        ...

    def overwrite(self) -> None:
        """From now on the trainer writes over those parts, until the next version is published."""
        ...

    async def give_way(self) -> None:
        """The trainer updates next. Where it shares their devices, engines end what they do, and
        give memory back."""
        ...


class Engines(Sampler, Protocol):
    """All rollout engines as one."""

    @property
    def present(self) -> list[int]:
        """Those that are asked, by number: others have left the run, or not joined it yet."""
        ...

    async def write(
        self, token_ids: list[int], max_tokens: int, temperature: float, seed: int
    ) -> Written:
        """What the bare base writes after `token_ids`."""
        ...

    async def score_prompt(
        self, token_ids: Sequence[int], version: int | None, top: int, watch: Watch
    ) -> ToldPrompt:
        """Every token at temperature 1, and the `top` likeliest at each place, by one engine, which
        `watch` is told as in `policy`. `version` None is the bare base. Raises NotServed for a
        version that no slot holds any more, and EngineDied when the engine has died."""
        ...

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        version: int | None,
        engines: Sequence[int] | None = None,
    ) -> list[Scored]:
        """Every token after the first at temperature 1, by each of `engines` (None: those that are
        present then). `version` None is the bare base."""
        ...

    async def publish(self, version: int, parts: Sequence[Ref]) -> list[Receipt]:
        """Every engine takes the version, or an error is raised."""
        ...

    async def keep(self, version: int, parts: Sequence[Ref]) -> list[int]:
        """The trainer made no other version than the one that is served, whose parts are these now.
        Engines that came back while it updated take it; returns which."""
        ...

    async def come_back(self) -> dict[str, float]:
        """Has what was given back again, and nothing in it; asked for samples are engines only
        after `go_on`. Returns metrics, where anything was given back."""
        ...

    def go_on(self) -> None:
        """The version that was published last is proven."""
        ...

    async def move_on(self, version: int) -> None:
        """Requests for samples go on under `version`, which is served: those in flight are ended
        with what they have and continued, and none begins under an older one any more."""
        ...

    async def differing(
        self, version: int, parts: Sequence[Ref], engines: Sequence[int] | None = None
    ) -> list[str]:
        """The tensors of a served version that one of `engines` (None: all) does not hold as they
        were sent, as far as it can be read back."""
        ...

    async def roll_back(self, version: int, parts: Sequence[Ref]) -> list[str]:
        """Takes a version back, so that the one before it, if there is still one, serves again.
        Returns what `differing` does."""
        ...


class Publisher(Protocol):
    """Takes versions from the trainer to where they are served."""

    version: int  # the newest one that is served

    async def start(self) -> None: ...

    async def publish(
        self, version: int, parts: Sequence[Ref], samples: Sequence[Sample]
    ) -> dict[str, float]:
        """Serves `version`, of which `parts` were sent, trained on `samples`. Returns metrics."""
        ...


class Trainer(Protocol):
    """All trainer ranks as one."""

    async def update(
        self, batch: TrainBatch, routes: Sequence[Ref]
    ) -> tuple[UpdateResult, list[Ref]]:
        """One step on a batch, with the routes of its groups in turn. Returns what it did, and the
        parts of the new version."""
        ...

    async def score(
        self, sequences: Sequence[Sequence[int]], routes: Ref | None, adapters: bool = True
    ) -> list[np.ndarray]:
        """Logprobs of every token after the first at temperature 1, with an engine's routes, or
        with its own (None); `adapters=False`: of the bare base."""
        ...

    async def judge(self, batch: TrainBatch) -> dict[Pass, list[np.ndarray]]:
        """Logprobs of every sample's response, float64 [R]: `old` of the current adapter, and
        `reference` of what it is measured against, if it is. Nothing is trained."""
        ...

    async def score_ahead(self, sequences: Sequence[Sequence[int]]) -> None:
        """Begins with what `score` will be asked for next, on routes of the trainer's own choice,
        which an engine may come to as well. Does not wait for it."""
        ...

    async def send(self) -> list[Ref]:
        """The parts of the current version."""
        ...

    async def sent(self, parts: Sequence[Ref]) -> list[Any]:
        """What the parts are (refit.parts.SentPart), once all are there."""
        ...

    def save(self, directory: Path) -> Saved:
        """All ranks write their state into `directory`. Blocks, so that a thread of its own asks
        for it; nothing may be trained meanwhile. Raises DiskError."""
        ...

    def load(self, directory: Path, meta: dict[str, Any]) -> None: ...


class Rewards(Protocol):
    async def score(
        self, prompt: Prompt, samples: Sequence[Sample], played: Sequence[Played] = ()
    ) -> Scores:
        """Rewards of a group, float32 [n], NaN for none; one line for each that failed; details.
        `played`: of each sample, if it came of an environment that reward functions are shown."""
        ...


class Teacher(Protocol):
    async def score(self, group: Group) -> None:
        """Puts the teacher's logprobs into a group; a sample that it could not score has failed, as
        one whose reward has."""
        ...


class Channel(Protocol):
    """The controller's end of a transport."""

    async def published(self, parts: Callable[[], Awaitable[Sequence[Any]]]) -> None:
        """A version is about to be served; `parts()` are its parts, once all are offered. Most
        transports need do nothing, and then nothing waits for them here."""
        ...

    def keep(self, versions: Iterable[int]) -> None:
        """Nothing needs the other versions any more."""
        ...
