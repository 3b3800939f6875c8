"""The policy as a ticket's environment asks it, with the times that the timeline draws."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from lora_moe_rl.data.samples import Sample
from lora_moe_rl.ports import Answers, Manner, Ref, Sampler, Turn
from lora_moe_rl.run.tickets import Ticket
from lora_moe_rl.telemetry.timeline import REWARD, REWARDS, SAMPLE, Timeline
from lora_moe_rl.telemetry.timeline import engine as engine_name


class TimedPolicy:
    """A ticket's policy, which notes who is at work on it, and when its last sample came. `begins`
    is called before its first request. `manner`: of what is not trained on."""

    def __init__(
        self,
        engines: Sampler,
        timeline: Timeline,
        ticket: Ticket,
        seed: int,
        manner: Manner | None = None,
        begins: Callable[[], None] | None = None,
    ):
        self._begins = begins
        self.ticket, self.timeline = ticket, timeline
        self.policy = engines.policy(ticket.version, seed, self._asked, manner)
        self._answered = self.timeline.clock()

    def _asked(self, index: int) -> AbstractContextManager[None]:
        return self.timeline.span(engine_name(index), SAMPLE, self.ticket.number)

    async def sample(
        self, token_ids: Sequence[int], n: int, turn: Turn | None = None
    ) -> tuple[list[Sample], Ref]:
        begins, self._begins = self._begins, None
        if begins is not None:
            begins()
        answer = await self.policy.sample(token_ids, n, turn)
        self.ticket.sampled_at = time.perf_counter()
        self._answered = self.timeline.clock()
        return answer

    def join(self, samples: Sequence[Sequence[Ref]]) -> Ref:
        return self.policy.join(samples)

    def beside(self, version: int | None, manner: Manner) -> Answers:
        return self.policy.beside(version, manner)

    def held_up(self) -> float:
        return self.policy.held_up()

    def scored(self) -> None:
        """Called once the rewards of all that was sampled are there, if anything was."""
        if self.ticket.sampled_at:
            self.timeline.ended(REWARDS, REWARD, self.ticket.number, self._answered)
