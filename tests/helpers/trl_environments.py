"""Environments as TRL's documentation has them (grpo_trainer, "Agent Training", and openenv, of
TRL 1.13), written by us after it; and some that do no good."""

from __future__ import annotations

import os
import random
import subprocess
import time


class IncrementEnv:
    """It sets its own task, and gives its own reward."""

    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class OwnRandom(IncrementEnv):
    """Its random numbers are its own, seeded by nobody."""

    def reset(self, **kwargs) -> str | None:
        super().reset()
        return f"Increment the counter by {random.Random().random()}."


class Seeded(IncrementEnv):
    """So are these, by the seed that it is given."""

    def reset(self, seed: int) -> str | None:
        super().reset()
        return f"Increment the counter by {random.Random(seed).random()}."


class TargetEnv(IncrementEnv):
    """The task is the row's."""

    def reset(self, target, **kwargs) -> None:
        self.counter, self.target = 0, target


class StepsEnv(IncrementEnv):
    """Each turn is worth what it has incremented by, but for 3, of which nothing is said, and 4,
    which is worth what no reward can be; the whole is worth 10."""

    def reset(self, **kwargs) -> None:
        self.counter = self.before = 0

    def get_reward(self) -> float:
        return 10.0

    def get_turn_reward(self) -> float | None:
        self.before, step = self.counter, self.counter - self.before
        return {3: None, 4: float("inf")}.get(step, step)


class OnlySteps(StepsEnv):
    get_reward = None


class StatesEnv(IncrementEnv):
    """Its state is its counter; at 3 nothing is said of it, and at 4 what no state can be."""

    def reset(self, **kwargs) -> None:
        self.counter, self.target = 0, 2

    async def get_turn_state(self):
        return {3: None, 4: 4}.get(self.counter, f"at {self.counter}")


class EchoClient:
    """In the place of OpenEnv's client."""

    def step(self, message: str) -> tuple[str, float]:
        return message, 0.1 * len(message)


class EchoToolEnv:
    """A reward function looks at it."""

    def __init__(self):
        self.env = EchoClient()
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        told, self.reward = self.env.step(message)
        return told


def reward_func(environments, **kwargs) -> list[float]:
    assert all(isinstance(env, EchoToolEnv) for env in environments)
    return [env.reward for env in environments]


def asked(prompts, environments, **kwargs) -> list[float]:
    """Whether the prompt is what `reset` made of it."""
    return [
        float(prompt[-1]["content"] == f"Do! Increment the counter by {env.target}.")
        for prompt, env in zip(prompts, environments, strict=True)
    ]


class GameEnv:
    def reset(self, **kwargs) -> str:
        self.open = "environment" not in kwargs
        return "Open the door."

    def get_reward(self) -> float:
        return float(self.open)

    async def move(self, action: str):
        """
        Apply an action to the game.

        Args:
            action: What to do.
        """
        if action == "again":
            raise ValueError("Game over.")


class Evil:
    """Does what the row says, while the file `left` beside it says how often it still does."""

    def reset(self, how: str, left: str, **kwargs):
        self.how, self.reward = how, 1.0
        with open(left) as file:
            often = int(file.read())
        with open(left, "w") as file:
            file.write(str(max(0, often - 1)))
        if not often:
            self.how = "good"
        if self.how == "reset raises":
            raise RuntimeError("no such world")
        if self.how == "reset hangs":
            time.sleep(600)
        if self.how == "reset returns":
            return 3

    def act(self) -> str:
        """Acts."""
        if self.how == "exits":
            os._exit(3)
        if self.how == "hangs":
            subprocess.Popen(["sleep", "613"], start_new_session=True)
            time.sleep(600)
        if self.how == "prints":
            print("x" * (1 << 30))
        if self.how == "raises":
            raise ValueError("not now")
        if self.how == "bytes":
            return b"\xff"
        return "acted"

    def get_reward(self) -> float:
        if self.how == "reward raises":
            raise RuntimeError("no judge")
        if self.how == "nan":
            return float("nan")
        if self.how == "none":
            return None
        return self.reward


class Untyped:
    def reset(self, **kwargs): ...

    def act(self, how):
        """Acts."""


class NoReset:
    def act(self) -> None:
        """Acts."""
