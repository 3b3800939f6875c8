"""A server of `lora-moe-rl tinker` and what a client does with it, for tests."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import tinker
from cli_run import CliRun
from tinker import types

SETTINGS = (
    "adapter.rank=8", "trainer.world_size=2", "trainer.ep=2", "refit.slots=2",
    "model.max_length=64", "replay.audit=1",
)  # fmt: skip
PROMPTS = ([5, 9, 17, 40], [30, 12, 7], [64, 65, 66, 67, 68, 69])
STEP = types.AdamParams(learning_rate=0.01, eps=1e-3)


class Server:
    """One that has started, in a folder that may outlive it."""

    def __init__(self, model: Path, folder: Path, *settings: str):
        options = ("--port", "0", "--dir", str(folder / "kept"), "--name", "base")
        self.run = CliRun("tinker", model, *options, *SETTINGS, *settings, output=folder / "out")
        self.run.wait_for_text("TINKER_BASE_URL=")
        self.url = re.search(r"TINKER_BASE_URL=(http://\S+)", self.run.output)[1]
        self.kept = folder / "kept" / "models"

    def log(self, name: str) -> str:
        (found,) = self.kept.parent.glob(f"*/logs/{name}.log")
        return found.read_text()

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key="tml-any")

    def ends(self) -> None:
        self.run.process.send_signal(signal.SIGTERM)
        assert self.run.finish(120) == 0, self.run.output
        assert not self.run.leftovers()


def sampled(sampler, num_samples=4, seed=11, **how):
    """(prompt, sequence) of each sample of each prompt."""
    params = types.SamplingParams(max_tokens=7, seed=seed, **how)
    asked = [
        (ids, sampler.sample(types.ModelInput.from_ints(ids), num_samples, params))
        for ids in PROMPTS
    ]
    return [(ids, one) for ids, future in asked for one in future.result().sequences]


def data_of(pairs, advantage=lambda number: (-1.0) ** number):
    found = []
    for number, (prompt, one) in enumerate(pairs):
        given = [0.0] * (len(prompt) - 1)
        inputs = {
            "target_tokens": (prompt + one.tokens)[1:],
            "logprobs": given + one.logprobs,
            "advantages": given + [advantage(number)] * len(one.tokens),
        }
        fed = types.ModelInput.from_ints((prompt + one.tokens)[:-1])
        found.append(types.Datum(model_input=fed, loss_fn_inputs=inputs))
    return found


def learn(client, data, loss="importance_sampling", **config) -> types.ForwardBackwardOutput:
    passed = client.forward_backward(data, loss, config or None)
    stepped = client.optim_step(STEP)
    assert stepped.result().metrics["grad_norm"] > 0
    return passed.result()


def logprobs_of(output) -> list[np.ndarray]:
    return [np.array(one["logprobs"].data, np.float32) for one in output.loss_fn_outputs]
