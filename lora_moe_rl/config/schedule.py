"""The section `schedule`: who waits for whom."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_moe_rl.config.section import Section

# What becomes of a group that is older than schedule.lag allows (run/schedule.py).
Stale = Literal["wait", "train", "drop", "redraw"]


class ScheduleConfig(Section):
    lag: int = Field(
        0,
        ge=0,
        description="Steps that rollouts may be ahead of training: 0 takes turns, 1 samples the "
        "next step while this one is trained. A token is at most so many steps old, with "
        "stale=train twice as many.",
    )
    stale: Stale = Field(
        "wait",
        description="A group that would become older than lag: the trainer waits for it (wait), or "
        "does not, and then it is trained all the same (train), replaced by another prompt (drop) "
        "or sampled once more (redraw).",
    )
    in_flight: Literal["finish", "continue"] = Field(
        "finish",
        description="A request in flight when a version is published: it ends on the version that "
        "it began with (finish), or goes on under the new one from the tokens it has (continue).",
    )
    continued: Literal["join", "split"] = Field(
        "join",
        description="How a continued sample is trained: in one forward, each token on the routes "
        "of its own version (join), or in one for each version, with all tokens before its own on "
        "the routes that this version took for them (split): exact, and they are fed once more.",
    )

    @property
    def slots(self) -> int:
        """Versions that engines hold at once: the next, and all that requests may be under way at.
        Of continued ones that is the newest alone."""
        return 2 if self.in_flight == "continue" else self.lag + 2

    @property
    def max_age(self) -> int:
        """Steps that a token may be old at most. One that is not waited for is there after lag + 1
        steps; of what was drawn before that, lag steps are left then, of which its own is one."""
        return 2 * self.lag if self.stale == "train" else self.lag
