"""A reward by a judge: a model behind an OpenAI-compatible server reads each completion and gives
it a number.

    reward.function=lora_moe_rl.rewards:Judge reward.args.url=http://host:8000/v1 \
        reward.args.model=NAME

Requests are bounded in number at a time, and each completion's in number and in time. One that gets
no judgement has failed, with the reason; it is never a 0. What a judge has said is kept by a hash
of the question, so that equal completions are judged once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import string
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_moe_rl.errors import ConfigError, RewardError
from lora_moe_rl.files.texts import encodable
from lora_moe_rl.rewards.builtin import completion_text
from lora_moe_rl.rewards.server import Server

TEMPLATE = """You are judging an answer to a question.

Question:
{prompt}

Answer to judge:
{completion}

How good is the answer, from 0 (wrong or useless) to 10 (right and complete)? Give your reasons in a
few sentences, then end with one line of the form
Score: N"""

SHOWN = 100  # characters of an answer that makes no sense
IN_MEMORY = 100_000


class Judge:
    """The reward of a judge's number divided by `highest`: 0 to 1.

    url: of the server, up to and with `/v1`. model: its name there. template: the question, with
    `{prompt}`, `{completion}` and any column of the data in braces; braces that stand for
    themselves are doubled. score: a regular expression whose one group is the number; its last
    match counts. key_env: the environment variable that holds the key, None for a server that wants
    none. options: what else a request says (`{"temperature": 0, "max_tokens": 512}`).

    concurrency: requests at a time. timeout_s: of a request. retries: more tries after one that
    failed, with growing pauses. patience_s: of a completion, all of its tries, once it is its turn.
    cache: a directory in which judgements are kept, for other runs too; None: in memory.

    Raises ConfigError for arguments that cannot work.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str = TEMPLATE,
        score: str = r"[Ss]core:\s*\**\s*([-+]?\d+(?:\.\d+)?)",
        highest: float = 10.0,
        key_env: str | None = None,
        options: dict[str, Any] | None = None,
        concurrency: int = 16,
        timeout_s: float = 20.0,
        retries: int = 3,
        patience_s: float = 50.0,
        cache: str | None = None,
    ):
        _check(template, score, highest)
        self.model, self.template, self.pattern = model, template, re.compile(score)
        self.highest, self.options = highest, options or {}
        bounds = (concurrency, timeout_s, retries, patience_s)
        self._server = Server("judge", "args.", url, key_env, *bounds)
        self._kept = Kept(cache)
        self._asking: dict[str, asyncio.Task[str]] = {}

    async def __call__(
        self,
        prompts: list,
        completions: list,
        completion_ids: list,
        trainer_state: Any,
        log_extra: Callable,
        log_metric: Callable,
        log_turn_rewards: Callable | None = None,
        **columns,
    ) -> list[float | BaseException]:
        """The rewards of one prompt's samples; an error in the place of one that has none."""
        del completion_ids, trainer_state, log_metric, log_turn_rewards  # columns is what is left
        questions = [
            self._question(prompt, completion, {key: values[i] for key, values in columns.items()})
            for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        judged = [self._judge(question) for question in questions]
        found = await asyncio.gather(*judged, return_exceptions=True)
        said = [None if isinstance(one, BaseException) else one[1] for one in found]
        log_extra("judgement", said)
        return [one if isinstance(one, BaseException) else one[0] for one in found]

    def _question(self, prompt: Any, completion: Any, columns: dict[str, Any]) -> str:
        known = columns | {"prompt": as_text(prompt), "completion": completion_text(completion)}
        try:
            return encodable(self.template.format(**known))
        except KeyError as error:
            raise ConfigError(
                f"args.template names {{{error.args[0]}}}, and there is no such column; there are "
                f"{', '.join(sorted(known))}; braces that stand for themselves are doubled"
            ) from error

    async def _judge(self, question: str) -> tuple[float, str]:
        """The reward and what the judge said. A question that is being asked is not asked twice."""
        key = self._hash(question)
        if (kept := self._kept.get(key)) is not None:
            return self._read(kept), kept
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(self._ask(question))
            self._asking[key].add_done_callback(lambda done: self._asked(key, done))
        said = await asyncio.shield(self._asking[key])
        reward = self._read(said)
        self._kept.put(key, said)  # once it is known to make sense
        return reward, said

    def _asked(self, key: str, done: asyncio.Task[str]) -> None:
        del self._asking[key]
        if not done.cancelled():
            done.exception()  # who waited has it; if nobody did, nothing is to be said of it

    async def _ask(self, question: str) -> str:
        """Raises RewardError when the server gives no answer, or one without a text."""
        answer = await self._server.ask(
            lambda client: client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": question}],
                **self.options,
            )
        )
        try:
            return encodable(str(answer.choices[0].message.content or ""))
        except (AttributeError, IndexError, TypeError) as error:  # the client checks no shapes
            what = repr(answer)[:SHOWN]
            raise RewardError(
                f"the judge at {self._server.url} answered without a text: {what}"
            ) from error

    def _read(self, said: str) -> float:
        """Raises RewardError when there is no number in what the judge said, or one out of
        bounds."""
        numbers = self.pattern.findall(said)
        if not numbers:
            raise RewardError(f"no {self.pattern.pattern!r} in what the judge said: {_end(said)}")
        number = float(numbers[-1])
        if not 0 <= number <= self.highest:
            raise RewardError(
                f"the judge gave {number:g}, which is not from 0 to args.highest={self.highest:g}"
            )
        return number / self.highest

    def _hash(self, question: str) -> str:
        asked = [self._server.url, self.model, self.options, question]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class Kept:
    """What was said, by a hash: the newest IN_MEMORY, and all in a directory if there is one."""

    def __init__(self, directory: str | None):
        self._said: dict[str, str] = {}
        self._directory = None if directory is None else Path(directory).expanduser()
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"args.cache={directory} cannot be a directory: {error.strerror}"
                ) from error

    def get(self, key: str) -> str | None:
        if key in self._said or self._directory is None:
            return self._said.get(key)
        try:
            return (self._directory / key).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def put(self, key: str, said: str) -> None:
        if key in self._said:
            return
        self._said[key] = said
        if len(self._said) > IN_MEMORY:
            del self._said[next(iter(self._said))]
        if self._directory is not None:
            scratch = self._directory / f".{key}.{uuid.uuid4().hex}"
            scratch.write_text(said, encoding="utf-8")
            os.replace(scratch, self._directory / key)


def as_text(prompt: Any) -> str:
    """A prompt as a judge reads it: of messages, each after its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _check(template: str, score: str, highest: float) -> None:
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(f"args.template: {error}; double braces that are no names") from error
    if "" in names or "completion" not in names:
        raise ConfigError(
            "args.template must have {completion}, which is what to judge, and no empty braces"
        )
    try:
        groups = re.compile(score).groups
    except re.error as error:
        raise ConfigError(f"args.score={score} is no regular expression: {error}") from error
    if groups != 1:
        raise ConfigError(f"args.score={score} needs one group, the number; it has {groups}")
    if highest <= 0:
        raise ConfigError(f"args.highest={highest:g} is to be above 0")


def _end(text: str) -> str:
    return repr(text if len(text) <= SHOWN else "..." + text[-SHOWN:])
