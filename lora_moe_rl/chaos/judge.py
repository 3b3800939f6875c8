"""What became of one fault, from what can be seen of the run: looked at again and again. Pure.

it has happened ──> the run says so ──> a step is done ──> healed, or resumed
       └ the run ends with an error ──> stopped by its name, or by another
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_moe_rl.chaos.kinds import AGAIN, HEALED, KINDS, RESUMED, STOPPED, matches

NEVER = "did not happen"
UNNOTICED = "not noticed"
STUCK = "no step since"
ENDED = "ended otherwise"


@dataclass(frozen=True)
class Sight:
    """A run at one moment: seconds on some clock; what it has said since the fault; the records of
    its steps; its exit code once it has ended."""

    now: float
    said: str
    records: Sequence[Mapping[str, Any]]
    code: int | None = None

    @property
    def step(self) -> int:
        """The newest that is on record; 0 before the first."""
        return self.records[-1]["step"] if self.records else 0


class Judge:
    """Looks at a run from a fault at `sight` on. `happened`: whether it has been seen to happen."""

    def __init__(self, kind: str, sight: Sight, patience_s: float):
        self.rules, self.patience_s = KINDS[kind], patience_s
        self.happened = False
        self.noticed = self.good = False
        self.seconds: float | None = None  # from the fault to the next good step
        self._late = kind == "disk.full"  # until it is noticed it is in nobody's way
        self._began, self._at, self._step = sight.now, sight.step, sight.step

    def has_happened(self, now: float) -> None:
        self.happened, self._began = True, now

    def look(self, sight: Sight) -> str | None:
        """The outcome, once it is known."""
        new_step = self._new_step(sight)
        if sight.code is not None:
            named = STOPPED in self.rules.promised and matches(self.rules.says, sight.said)
            return STOPPED if sight.code and named else ENDED
        if not self.noticed:
            self._notice(sight)
        elif new_step:
            self._is_good(sight)
            return RESUMED if matches(AGAIN, sight.said) else HEALED
        return self._lost_patience(sight)

    def goes_on(self, sight: Sight) -> bool:
        """After a stop: whether the run that goes on from it has done a step."""
        if self._new_step(sight):
            self._is_good(sight)
        return self.good

    def _new_step(self, sight: Sight) -> bool:
        """Whether a step was done since the last look; a run that goes on from a checkpoint takes
        some off the record first."""
        before, self._step = self._step, sight.step
        return sight.step > before

    def _notice(self, sight: Sight) -> None:
        since = [record for record in sight.records if record["step"] > self._at]
        counted = any((record.get(self.rules.counts) or 0) > 0 for record in since)
        self.noticed = counted or matches(self.rules.says, sight.said)
        if self.noticed and self._late:
            self._began = sight.now

    def _is_good(self, sight: Sight) -> None:
        self.good, self.seconds = True, sight.now - self._began

    def _lost_patience(self, sight: Sight) -> str | None:
        if sight.now - self._began <= self.patience_s:
            return None
        if not self.happened:
            return NEVER
        return STUCK if self.noticed else UNNOTICED
