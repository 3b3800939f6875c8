"""TRL's environments as they are: a class with `reset`, public methods that are tools, and perhaps
`get_reward` (TRL's `environment_factory`).

    reset(**row)   a text or None: the text stands at the end of the prompt
    method(...)    a tool of the policy; what it raises is told to it
    get_turn_reward()  of the turn whose calls it has answered; TRL has no such method
    get_turn_state()   what the turn to come begins in, for advantage=gigpo; nor has it this
    get_reward()   of the conversation that has ended; those of turns and a reward function's are
                   added

Each conversation has an environment of its own, in a process of its own (parts/instances.py). What
it draws at random follows from the prompt: all conversations of a group are set the same task, and
a run that goes on sets the same ones. The contract: https://huggingface.co/docs/trl/openenv and
https://huggingface.co/docs/trl/grpo_trainer (agent training).
"""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from lora_moe_rl.calls.pool import NoWorker
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.eval_rules import prompt_room
from lora_moe_rl.config.evaluation import EVAL
from lora_moe_rl.config.plugins import PARTS
from lora_moe_rl.config.section import is_set
from lora_moe_rl.data.held_out import seed_of_prompt
from lora_moe_rl.data.maker import PromptMaker
from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.data.scores import Played
from lora_moe_rl.environments.base import Environment
from lora_moe_rl.environments.parts.conversation import Conversation, finish, together
from lora_moe_rl.environments.parts.endings import Failed, no_counts, tried
from lora_moe_rl.environments.parts.instances import Instance, Instances
from lora_moe_rl.environments.parts.templates import Introduced
from lora_moe_rl.environments.parts.tool_calls import Call
from lora_moe_rl.environments.parts.tool_talk import (
    Answering,
    Rewarding,
    Showing,
    ToolSettings,
    ToolTalk,
)
from lora_moe_rl.environments.parts.toolbox import Toolbox
from lora_moe_rl.errors import ConfigError, DataError
from lora_moe_rl.files.importing import absolute_spec
from lora_moe_rl.ports import Policy, Rewards

COLUMN = "environment"  # of a row, which of several factories it is for
log = logging.getLogger(__name__)


class Trl(Environment):
    class Settings(ToolSettings):
        factory: str | None = Field(
            None, description="TRL's environment_factory: file.py:Class, module:Class."
        )
        factories: dict[str, str] = Field(
            {},
            description="Several by name, instead of one: the column `environment` of a row says "
            'which is its: {"coding": "mine.py:Coding", "game": "mine.py:Game"}.',
        )
        max_environments: int = Field(
            256, ge=1, description="Most environments at the same time, each of which is a process."
        )

        @model_validator(mode="after")
        def _tools_have_workers(self) -> Trl.Settings:
            if is_set(self, "tool_workers") and not self.tools:
                raise ValueError(
                    f"environment.tool_workers={self.tool_workers} has no effect without "
                    "environment.tools: an environment's own methods are called in its process; "
                    "leave it out"
                )
            return self

        def absolute(self) -> dict[str, Any]:
            found = super().absolute()
            if self.factory is not None:
                found["factory"] = absolute_spec(self.factory)
            found["factories"] = {name: absolute_spec(f) for name, f in self.factories.items()}
            return found

    settings: Settings
    rewards_itself: ClassVar[bool] = True
    shows_itself: ClassVar[bool] = True
    begins_with_row: ClassVar[bool] = False

    def __init__(self, config: RunConfig, rewards: Rewards, tokenizer: Any):
        super().__init__(config, rewards, tokenizer)
        settings = self.settings
        self.factories = dict(settings.factories)
        if settings.factory is not None:
            self.factories[""] = settings.factory
        if not self.factories or (settings.factory is not None and settings.factories):
            raise ConfigError(
                "environment=trl needs environment.factory=file.py:Class, or several by name as "
                "environment.factories, and not both"
            )
        functions = {**config.rewards(), **config.eval_rewards()}
        self.rewarded = any(one.function for some in functions.values() for one in some)
        self.talk = ToolTalk(config, settings, tokenizer)
        self.toolbox: Toolbox | None = None
        self._told_of_tasks = False
        limits = settings.tool_timeout_s, settings.max_output_chars
        self.instances = Instances(
            list(self.factories.values()), settings.max_environments, *limits
        )
        try:
            if settings.tools:
                self.toolbox = Toolbox(settings.tools, settings.tool_workers, *limits)
            self._check_rewards()
            self.introduced = {name: self._introduced(name) for name in self.factories}
        except ConfigError:
            self.close()
            raise
        self.makers = {
            (data_set, name): PromptMaker(source, introduced, prompt_room(config, source))
            for data_set, source in config.sources().items()
            for name, introduced in self.introduced.items()
        }

    def _check_rewards(self) -> None:
        described = self.instances.described.values()
        for one in described:
            if not (self.rewarded or one.gives_rewards):
                raise ConfigError(
                    f"{one.kind} has no method get_reward or get_turn_reward, and reward.function "
                    "is not set: one of them has to give rewards"
                )
        advantage = getattr(self.config.algorithm, "advantage", None)
        if not isinstance(advantage, str):
            return
        kind = PARTS["advantage"].find(advantage)
        if kind.separates_rewards and any(one.gives_rewards for one in described):
            raise ConfigError(
                f"algorithm.advantage={advantage} looks at each reward function by itself, and "
                "does not know get_reward and get_turn_reward: return it from a reward function, "
                "which is given `environments`"
            )
        if kind.needs_teacher and not self.rewarded:
            raise ConfigError(
                f"algorithm.advantage={advantage} without reward.function learns from its teacher "
                "alone, and what the environment gives would be lost: set reward.function"
            )

    def _introduced(self, name: str) -> Introduced:
        schemas = [*self._own_tools(), *self.instances.described[self.factories[name]].schemas]
        names = Counter(schema["function"]["name"] for schema in schemas)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ConfigError(
                f"environment.tools and {self.factories[name]} both have {', '.join(twice)}"
            )
        return Introduced(self.tokenizer, schemas, self.talk.form)

    def _own_tools(self) -> list[dict[str, Any]]:
        return self.toolbox.schemas if self.toolbox is not None else []

    @property
    def prompt_tokenizer(self) -> Any:
        """Which factory's tools a prompt tells of is known when it is rolled out; with one they are
        told of in what `check` shows too."""
        return self.introduced.get("", self.tokenizer)

    @property
    def about(self) -> str:
        of = {
            self.factories[name]: introduced.about for name, introduced in self.introduced.items()
        }
        return "; ".join(f"{factory}: {tools or 'no tools'}" for factory, tools in of.items())

    def close(self) -> None:
        self.instances.close()
        if self.toolbox is not None:
            self.toolbox.close()

    async def rollout(self, prompt: Prompt, policy: Policy) -> Group:
        counts, name = no_counts(), self._name_of(prompt)

        async def talk(one: Conversation, own: Counter[str]) -> str:
            return await self._played(prompt, name, one, own)

        talks = [
            tried(
                lambda i=i: self.conversation(prompt, policy, i),
                talk,
                self.settings.retries,
                counts,
            )
            for i in range(self.group_size)
        ]
        done = await together(talks)
        self._check_one_task(prompt, done)
        group = await finish(prompt, policy, done, self.rewards, counts)
        whole = [one for one in done if one.failure is None]
        if own := [one.own_rewards for one in whole if one.own_rewards is not None]:
            kind = self.instances.described[self.factories[name]].kind
            group.details.metrics[kind] = own
        return group

    def _check_one_task(self, prompt: Prompt, done: Sequence[Conversation]) -> None:
        """Says, once, that a group's conversations were set other tasks: their rewards are compared
        with each other."""
        tasks = {tuple(one.begun_with) for one in done if one.failure is None}
        if len(tasks) > 1 and not self._told_of_tasks:
            self._told_of_tasks = True
            log.warning(
                "prompt %s: reset set %d of its group's %d conversations other tasks, and a group "
                "is rewarded for doing better than its others: draw from random or numpy.random, "
                "which are seeded, or from the argument seed of reset",
                prompt.number, len(tasks), len(done),
            )  # fmt: skip

    def _name_of(self, prompt: Prompt) -> str:
        if "" in self.factories:
            return ""
        name = prompt.columns.get(COLUMN)
        if name not in self.factories:
            raise DataError(
                f"prompt {prompt.number}: its column {COLUMN} is {name!r}, which is none of "
                f"environment.factories: {', '.join(self.factories)}"
            )
        return name

    async def _played(
        self, prompt: Prompt, name: str, one: Conversation, counts: Counter[str]
    ) -> str:
        """A conversation with an environment of its own, from reset to reward."""
        instance, usable = await self.instances.begin(self.factories[name]), False
        try:
            shown = await self._reset(prompt, name, one, instance)
            answering = self._answering(instance)
            introduced = self.introduced[name]
            described = self.instances.described[instance.factory]
            rewarding = self._rewarding(instance) if described.rewards_turns else None
            showing = self._showing(instance) if described.tells_states else None
            end = await self.talk.until_the_end(
                prompt, one, introduced, answering, counts, rewarding, showing
            )
            rewarded = described.rewards
            told = await instance.ask("end", rewarded=rewarded, shown=self.rewarded)
            one.own_reward = _checked(told["reward"], instance.factory, "get_reward")
            if self.rewarded:
                one.played = Played(instance.factory, told["state"], shown)
            usable = True
            return end
        finally:
            await self.instances.give_back(instance, usable)

    async def _reset(self, prompt: Prompt, name: str, one: Conversation, instance: Instance) -> Any:
        """Begins the conversation with the prompt and what the environment has to add, which is
        returned."""
        row = {"prompt": prompt.text, **prompt.columns}
        if name != "":
            row.pop(COLUMN)
        told = await instance.ask("reset", row=row, seed=self._seed(prompt))
        shown = with_observation(prompt.text, told["observation"])
        if shown == prompt.text and "" in self.factories:
            return shown
        maker = self.makers[prompt.data_set, name]
        place = f"prompt {prompt.number}, after {instance.factory}.reset"
        try:
            token_ids = maker.encode(shown, prompt.columns, place)
        except DataError as error:
            if shown == prompt.text:
                raise
            raise Failed("environment_error", str(error)) from error
        one.begin(token_ids, shown if shown != prompt.text else None)
        if one.room < 1:
            raise Failed(
                "environment_error",
                f"{place}, has {len(token_ids)} tokens, which leave no room within "
                f"model.max_length={self.config.model.max_length}",
            )
        return shown

    def _seed(self, prompt: Prompt) -> int:
        """Of what an environment draws for a prompt: others in training than in an evaluation."""
        if prompt.data_set.startswith(EVAL):
            return seed_of_prompt(self.config.eval.seed, prompt.data_set, prompt.number)
        return int(np.random.SeedSequence([self.config.seed, prompt.number]).generate_state(1)[0])

    def _answering(self, instance: Instance) -> Answering:
        own = {schema["function"]["name"] for schema in self._own_tools()}

        async def call(call: Call) -> tuple[bool, str]:
            if self.toolbox is not None and call.name in own:
                try:
                    return await self.toolbox.call(call)
                except NoWorker as error:
                    raise Failed("environment_error", f"environment.tools {error}") from error
            asked = {"name": call.name, "positional": call.positional, "named": call.named}
            try:
                pickle.dumps(asked)  # as it is sent; a model may nest arguments as deep as it likes
            except Exception as error:
                return False, f"the arguments of {call.name} cannot be sent: {error}"
            told = await instance.ask("call", **asked)
            return told["done"], told["text"]

        return call

    def _rewarding(self, instance: Instance) -> Rewarding:
        async def rewarding() -> float | None:
            told = await instance.ask("turn_reward")
            return _checked(told["reward"], instance.factory, "get_turn_reward")

        return rewarding

    def _showing(self, instance: Instance) -> Showing:
        async def showing() -> str | None:
            return (await instance.ask("get_turn_state"))["state"]

        return showing


def with_observation(text: Any, observation: str | None) -> Any:
    """The prompt with what `reset` returned at its end, as TRL puts it: at the end of its last
    message."""
    if observation is None:
        return text
    if isinstance(text, str):
        return text + observation
    return [*text[:-1], {**text[-1], "content": text[-1]["content"] + observation}]


def _checked(reward: float | None, factory: str, method: str) -> float | None:
    """Raises Failed for a reward that is no finite number in float32."""
    if reward is None or abs(reward) <= np.finfo(np.float32).max:
        return reward
    raise Failed("environment_error", f"{factory}: {method} returned {reward}, not a finite number")
