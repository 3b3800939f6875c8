"""Settings of a teacher, which exist with what asks one: a model behind a server
(algorithm.advantage=teacher), or the policy itself (algorithm.advantage=self_teacher)."""

from __future__ import annotations

from string import Formatter
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

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


# What each template has to hold.
PLACES = {
    "reprompt_template": ("prompt", "solution", "feedback"),
    "solution_template": ("successful_previous_attempt",),
    "feedback_template": ("feedback_raw",),
}


class SelfTeacherSettings(Section):
    """The names of places in the templates, and what stands in the templates until they are set,
    are the paper's (arXiv:2601.20802) and TRL's."""

    teacher_weights: Literal["policy", "base"] = Field(
        "policy",
        description="Whose weights the teacher has: those that the engines serve, or the bare "
        "base's, without any adapter.",
    )
    success_reward: float | None = Field(
        1.0,
        description="A sample with at least this reward is shown to the teacher of the prompt's "
        "other samples, as a solution; null: none is.",
    )
    feedback_key: str | None = Field(
        None,
        description="What else the teacher reads of a sample: a column that the reward function "
        "logs (log_extra), or one of the row; null: nothing.",
    )
    remove_thinking: bool = Field(
        False,
        description="Leave what stands in <think>...</think> out of a solution that is shown.",
    )
    reprompt_template: str = Field(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        description="What the teacher reads in the place of the prompt (of its last message).",
    )
    solution_template: str = Field(
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
        description="What stands for {solution} there, where there is one.",
    )
    feedback_template: str = Field(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        description="What stands for {feedback} there, where there is any.",
    )

    @field_validator(*PLACES)
    @classmethod
    def _has_its_places(cls, value: str, info: ValidationInfo) -> str:
        wanted, said = PLACES[str(info.field_name)], f"algorithm.{info.field_name}={value!r}"
        try:
            found = [name for _, name, _, _ in Formatter().parse(value) if name is not None]
        except ValueError as error:
            raise ValueError(f"{said} is no template: {error}; write a brace twice") from error
        if sorted(found) != sorted(wanted):
            places = " and ".join(f"{{{name}}}" for name in wanted)
            raise ValueError(f"{said} must hold {places}, each once, and no other place")
        return value

    @model_validator(mode="after")
    def _reads_something(self) -> SelfTeacherSettings:
        if self.success_reward is None and self.feedback_key is None:
            raise ValueError(
                "algorithm.success_reward=null and algorithm.feedback_key=null leave the teacher "
                "nothing to read that the policy has not: set one of them"
            )
        for key, decider in (
            ("solution_template", "success_reward"),
            ("remove_thinking", "success_reward"),
            ("feedback_template", "feedback_key"),
        ):
            default = type(self).model_fields[key].default
            if getattr(self, decider) is None and getattr(self, key) != default:
                raise ValueError(
                    f"algorithm.{key} has no effect with algorithm.{decider}=null; leave it out"
                )
        return self


AnyTeacher = TeacherSettings | SelfTeacherSettings
