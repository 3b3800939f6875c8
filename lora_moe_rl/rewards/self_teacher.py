"""The policy as its own teacher: what it gives the sampled tokens once it has read more.

    sampled   What is 23 + 58?                                        The sum is 71
    scored    What is 23 + 58?  Correct solution: 81  Correctly ...   The sum is 71

The run's own engines score, under the adapter version that has sampled (or without any), or the
newest where that is no longer served. What is read is another prompt, rendered as the row's own is,
and behind it the sample's tokens as they are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_moe_rl.config import SourceConfig
from lora_moe_rl.config.teacher import SelfTeacherSettings
from lora_moe_rl.data.maker import PromptMaker
from lora_moe_rl.data.samples import TOO_LONG, Group, Prompt, Sample
from lora_moe_rl.data.top import Top
from lora_moe_rl.errors import ConfigError, DataError, NotServed, RewardError
from lora_moe_rl.ports import Engines, Watch
from lora_moe_rl.rewards.teacher import MINUS_INFINITY, Judgement, put_all

# Of many chat templates the prompt ends with <think>, and what is sampled begins behind it.
THINKING = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Reading:
    """The tokens that stand in the place of a sample's prompt, and what they hold beside it, in a
    word. Without tokens the teacher reads nothing more than the policy."""

    token_ids: list[int]
    word: str


class Reader:
    """Makes the other prompts. `sources`: the data sets that are trained on, by name. `tokenizer`:
    what renders the environment's prompts. `longest`: tokens that an engine takes."""

    def __init__(
        self,
        settings: SelfTeacherSettings,
        sources: Mapping[str, SourceConfig],
        tokenizer: Any,
        longest: int,
    ):
        self.settings, self.longest = settings, longest
        self._makers = {name: PromptMaker(one, tokenizer, longest) for name, one in sources.items()}

    def of_sample(self, group: Group, index: int) -> Reading:
        """Raises RewardError for a prompt that cannot be written otherwise."""
        asked, word = self.asked(group, index)
        if not word:
            return Reading([], "")
        token_ids = self.token_ids(group.prompt, asked)
        if len(token_ids) + len(group.samples[index].response_ids) >= self.longest:
            return Reading([], TOO_LONG)
        return Reading(token_ids, word)

    def asked(self, group: Group, index: int) -> tuple[Any, str]:
        """The other prompt as text or messages, and what it holds; '' where that is nothing."""
        (place, solution), feedback = self._solution(group, index), self._feedback(group, index)
        words = [f"solution {place}"] if solution else []
        words += ["feedback"] if feedback else []
        return self.written(group.prompt, solution, feedback), ", ".join(words)

    def written(self, prompt: Prompt, solution: str, feedback: str) -> Any:
        """A prompt with what the teacher reads beside it, '' for nothing. Raises RewardError for
        messages that do not end with one of the user."""
        settings, text = self.settings, prompt.text
        if solution:
            solution = settings.solution_template.format(successful_previous_attempt=solution)
        if feedback:
            feedback = settings.feedback_template.format(feedback_raw=feedback)
        places = {"solution": solution, "feedback": feedback}
        if isinstance(text, str):
            return settings.reprompt_template.format(prompt=text, **places)
        *before, last = text
        if last["role"] != "user" or not isinstance(last["content"], str):
            raise RewardError(
                f"{_place(prompt)}: it ends with what {last['role']!r} says, and a solution or "
                "feedback is put into a last message of the user; leave such rows out"
            )
        content = settings.reprompt_template.format(prompt=last["content"], **places)
        return [*before, {**last, "content": content}]

    def token_ids(self, prompt: Prompt, asked: Any) -> list[int]:
        """Of a prompt that was written otherwise, rendered as its own. Raises RewardError."""
        try:
            return self._makers[prompt.data_set].encode(asked, prompt.columns, _place(prompt))
        except DataError as error:
            raise RewardError(str(error)) from error

    def _solution(self, group: Group, index: int) -> tuple[int, str]:
        """The place and the text of the first sample of another conversation of the prompt that has
        succeeded, and said anything; '' where there is none."""
        least, conversations = self.settings.success_reward, group.conversation_of
        if least is None:
            return -1, ""
        for other in group.ends[conversations[group.ends] != conversations[index]].tolist():
            if group.rewards[other] >= least and (text := self._text(group.samples[other])):
                return other, text
        return -1, ""

    def _text(self, sample: Sample) -> str:
        if not self.settings.remove_thinking:
            return sample.text
        return THINKING.sub("", sample.text).strip()

    def _feedback(self, group: Group, index: int) -> str:
        key = self.settings.feedback_key
        if key is None:
            return ""
        logged = group.details.extra.get(key)
        found = group.prompt.columns.get(key) if logged is None else logged[index]
        return "" if found is None else str(found).strip()

    def knows_feedback(self, group: Group) -> bool:
        """Whether somebody gives what algorithm.feedback_key names, or it names nothing."""
        key = self.settings.feedback_key
        return key is None or key in group.details.extra or key in group.prompt.columns


def _place(prompt: Prompt) -> str:
    return f"prompt {prompt.number}, as its teacher reads it"


class SelfTeacher:
    """`newest`: the adapter version that the engines serve. `alone`: whether nothing else gives
    rewards; a sample's reward is then minus its reverse KL to the teacher. `prompts`: of how many
    it is looked whether any has the feedback that is asked for. `watch(number)`: what goes around
    each request for a sample of that prompt, with the index of the engine. `top_k`: how many of the
    teacher's likeliest tokens are wanted at each place."""

    def __init__(
        self,
        reader: Reader,
        engines: Engines,
        newest: Callable[[], int],
        alone: bool,
        prompts: int,
        watch: Callable[[int], Watch],
        top_k: int = 0,
    ):
        self.reader, self.engines, self.alone, self._watch = reader, engines, alone, watch
        self._bare, self._newest = reader.settings.teacher_weights == "base", newest
        self._prompts, self.top_k = prompts, top_k
        self._without_feedback: int | None = 0  # prompts so far; None: somebody gives it

    async def score(self, group: Group) -> None:
        """Puts the teacher's logprobs into a group, its likeliest tokens, and what it has read. Of
        a sample without a reward, where others give them, and of one with nothing to read, the
        logprobs are the policy's own, and the likeliest tokens nothing's. Raises ConfigError for
        samples that begin with other tokens than their row's prompt, and once so many prompts were
        without the feedback that is asked for."""
        self._look_for_feedback(group)
        for sample in group.samples:
            if not np.array_equal(sample.prompt_ids, group.prompt.token_ids):
                raise ConfigError(
                    f"prompt {group.prompt.number}: its environment begins a sample with other "
                    "tokens than those of the row's prompt, which a policy that teaches itself "
                    "reads once more; say begins_with_row = False in its class, and take a "
                    "teacher behind a server (algorithm=opd)"
                )
        read = [""] * len(group.samples)

        async def one(index: int) -> Judgement:
            sample = group.samples[index]
            if not self.alone and np.isnan(group.rewards[index]):
                return sample.logprobs, None
            reading = self.reader.of_sample(group, index)
            read[index] = reading.word
            if not reading.token_ids:
                return sample.logprobs, None
            watch = self._watch(group.prompt.number)
            return await self._of_response(reading.token_ids, sample, watch)

        asked = (one(index) for index in range(len(group.samples)))
        put_all(group, await asyncio.gather(*asked, return_exceptions=True), self.alone, self.top_k)
        group.teacher_read = read

    async def _of_response(self, token_ids: list[int], sample: Sample, watch: Watch) -> Judgement:
        """Logprobs, float32 [R], behind another prompt, 0 for tokens that no policy sampled, and
        the likeliest tokens there. Of an adapter that has not sampled all of them it is what the
        prompt makes of its logprobs that is added to the sample's own, so that nothing is learned
        of what was trained in between; the likeliest tokens are that adapter's."""
        sampled = {*sample.versions[sample.mask].tolist()}
        version = None if self._bare else max(sampled, default=self._newest())
        while True:
            try:
                found, top = await self._behind(token_ids, sample, version, watch)
                if version is not None and sampled - {version}:
                    own, _ = await self._behind(sample.prompt_ids.tolist(), sample, version, watch)
                    found = sample.logprobs + found - own
                return found * sample.mask, top
            except NotServed:  # newer ones took its place
                if version == self._newest():
                    raise
                version = self._newest()

    async def _behind(
        self, token_ids: list[int], sample: Sample, version: int | None, watch: Watch
    ) -> Judgement:
        """Of the sample's tokens after those of a prompt."""
        every = [*token_ids, *sample.response_ids.tolist()]
        told = await self.engines.score_prompt(every, version, self.top_k, watch)
        found, top = told.logprobs[len(token_ids) :], told.top
        if top is not None:
            logprobs = np.maximum(top.logprobs, np.float32(MINUS_INFINITY))
            top = Top(top.token_ids[len(token_ids) :], logprobs[len(token_ids) :])
        if found.shape != sample.mask.shape or not np.isfinite(found).all():
            raise RewardError(
                f"an engine gave {len(found)} logprobs, not all of them finite, of the "
                f"{len(sample.mask)} tokens that it was to score behind another prompt"
            )
        return found, top

    def _look_for_feedback(self, group: Group) -> None:
        if self.reader.knows_feedback(group):
            self._without_feedback = None
        unrewarded = not self.alone and np.isnan(group.rewards).all()  # nothing was logged
        if self._without_feedback is None or unrewarded:
            return
        self._without_feedback += 1
        if self._without_feedback < self._prompts:
            return
        key = self.reader.settings.feedback_key
        raise ConfigError(
            f"algorithm.feedback_key={key}: of {self._prompts} prompts none has a column of that "
            f"name, and no reward function has logged one (log_extra('{key}', values)); name one "
            "that is there"
        )
