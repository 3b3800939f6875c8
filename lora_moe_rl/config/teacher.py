"""Settings of a teacher, which exist with what asks one (algorithm.advantage=teacher)."""

from __future__ import annotations

from pydantic import Field

from lora_moe_rl.config.section import LONGEST_WAIT_S, Section


class TeacherSettings(Section):
    teacher_url: str | None = Field(
        None,
        description="The teacher's server, with vLLM's OpenAI-compatible API, up to and with /v1.",
    )
    teacher_model: str | None = Field(None, description="The teacher's name at its server.")
    teacher_key_env: str | None = Field(
        None, description="The environment variable with the key of that server; null: no key."
    )
    teacher_concurrency: int = Field(32, ge=1, description="Requests to the teacher at a time.")
    teacher_timeout_s: float = Field(
        60, gt=0, le=LONGEST_WAIT_S, description="Longest time for one request to the teacher."
    )
    teacher_retries: int = Field(
        3, ge=0, description="More tries of a request after one that failed, with growing pauses."
    )
    teacher_patience_s: float = Field(
        200,
        gt=0,
        le=LONGEST_WAIT_S,
        description="Longest time for a sample with all its tries, once it is its turn.",
    )
