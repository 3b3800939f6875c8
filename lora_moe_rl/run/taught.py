"""Whom a run asks about its samples: a model behind a server, or the policy itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from lora_moe_rl import ports
from lora_moe_rl.algorithms.base import Algorithm
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.teacher import SelfTeacherSettings, TeacherSettings
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.errors import ConfigError, RewardError
from lora_moe_rl.rewards.by_set import NoRewards
from lora_moe_rl.rewards.self_teacher import Reader, SelfTeacher
from lora_moe_rl.rewards.teacher import Teacher
from lora_moe_rl.rollout.facts import most_likeliest
from lora_moe_rl.telemetry.timeline import TEACH, Timeline
from lora_moe_rl.telemetry.timeline import engine as engine_name

SHOWN = "0"  # stands for what is shown, which is as long as it is


def open_teacher(
    algorithm: Algorithm,
    config: RunConfig,
    environment: Environment,
    engines: ports.Engines,
    newest: Callable[[], int],
    timeline: Timeline,
) -> ports.Teacher:
    """The teacher of an algorithm that has one. `newest`: the version that `engines` serve."""
    settings, alone = algorithm.teacher, isinstance(environment.rewards, NoRewards)
    assert settings is not None
    if isinstance(settings, TeacherSettings):
        return Teacher(settings, alone, top_k(algorithm))
    reader, prompts = _reader(settings, config, environment), config.algorithm.prompts_per_step

    def watch(number: int) -> ports.Watch:
        return lambda index: timeline.span(engine_name(index), TEACH, number)

    return SelfTeacher(reader, engines, newest, alone, prompts, watch, top_k(algorithm))


def _reader(settings: SelfTeacherSettings, config: RunConfig, environment: Environment) -> Reader:
    sources, length = config.data.sources(), config.model.max_length
    return Reader(settings, sources, environment.prompt_tokenizer, length)


def top_k(algorithm: Algorithm) -> int:
    """Of how many of its likeliest tokens a teacher is asked at each place."""
    return 0 if algorithm.divergence is None else algorithm.divergence.top_k


def ask(algorithm: Algorithm, tokenizer: Any, longest: int) -> str:
    """What a server says of its teacher, as a sentence. Raises ConfigError as `Teacher.probe`."""
    settings = algorithm.teacher
    assert isinstance(settings, TeacherSettings)

    async def probe() -> str:
        teacher = Teacher(settings, alone=False, top_k=top_k(algorithm))
        try:
            return await teacher.probe(tokenizer, longest)
        finally:
            await teacher.close()

    return asyncio.run(probe())


def try_reading(
    algorithm: Algorithm,
    config: RunConfig,
    environment: Environment,
    prompts: Sequence[Prompt],
) -> tuple[str, list[str]]:
    """What the policy would read as its own teacher of some prompts: a sentence, and warnings.
    Raises ConfigError for prompts that cannot be written so, and for an environment whose
    conversations do not begin with them."""
    if not environment.begins_with_row:
        raise ConfigError(
            f"algorithm={config.algorithm.name} has the policy read a row's prompt once more, with "
            f"a solution or feedback in it, and conversations of environment="
            f"{config.environment.name} begin with other messages; use environment=single_turn or "
            "tools, or a teacher behind a server (algorithm=opd)"
        )
    settings = algorithm.teacher
    assert isinstance(settings, SelfTeacherSettings)
    reader, key = _reader(settings, config, environment), settings.feedback_key
    solution = "" if settings.success_reward is None else SHOWN
    try:
        more = max(
            len(reader.token_ids(one, reader.written(one, solution, SHOWN if key else "")))
            - len(one.token_ids)
            for one in prompts
        )
    except RewardError as error:
        raise ConfigError(str(error)) from error
    weights = {"policy": "the adapter that is served", "base": "the bare base"}
    found = f"the policy itself, with {weights[settings.teacher_weights]}"
    most, wanted = most_likeliest(config.rollout), top_k(algorithm)
    if most is not None and wanted > most:
        raise ConfigError(
            f"algorithm.teacher_top_k={wanted}, and the engines tell {most} likeliest tokens; set "
            f"rollout.engine_args.max_logprobs={wanted}, or lower teacher_top_k"
        )
    if solution:
        found += f"; reads samples with a reward of {settings.success_reward:g} or more"
    if key:
        of = "of the rows" if any(key in one.columns for one in prompts) else "that is logged"
        found += f"; reads the column {key} {of}"
    room = config.model.max_length - more - max(len(one.token_ids) for one in prompts)
    response = config.rollout.max_response_tokens
    if not solution or room > 2 * response:
        return found, []
    return found, [
        f"{found}; a sample and the solution that its teacher reads may have "
        f"rollout.max_response_tokens={response} tokens each, and model.max_length="
        f"{config.model.max_length} leaves about {room} for both: nothing is learned of samples "
        "that do not fit (teacher/too_long); raise model.max_length"
    ]
