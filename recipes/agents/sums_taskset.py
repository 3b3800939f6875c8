"""A verifiers taskset of sums, as `vf-init` would begin one: `with_verifiers.py sums_taskset`."""

from __future__ import annotations

import random

import verifiers.v1 as vf
from adds_twice import score

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return score(trace.last_reply or "", self.data.answer)


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 1000


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        draw = random.Random(0)
        pairs = [(draw.randrange(50), draw.randrange(50)) for _ in range(self.config.num_tasks)]
        return [
            SumTask(SumData(idx=i, prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)
            for i, (a, b) in enumerate(pairs)
        ]
