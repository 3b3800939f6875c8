"""The section `faults`: what a run does about being dead or stuck as a whole."""

from __future__ import annotations

from pydantic import Field

from lora_moe_rl.config.section import LONGEST_WAIT_S, Section


class FaultsConfig(Section):
    max_resumes: int = Field(
        3, ge=0,
        description="With --supervise: how often in a row a run whose process has died is started "
        "again without a new checkpoint in between.",
    )  # fmt: skip
    stall_s: float = Field(
        900, ge=0, le=LONGEST_WAIT_S,
        description="Stop, with the stacks of all processes in logs, when nothing has happened and "
        "nothing was under way for so many seconds and the longest time-out of rewards, tools and "
        "teachers; 0: never.",
    )  # fmt: skip
