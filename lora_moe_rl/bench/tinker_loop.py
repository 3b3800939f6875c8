"""What a client of Tinker's SDK does with a service in `bench tinker`, and how long it waits.

Shape letters: N tokens that are fed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from lora_moe_rl.bench import trl_step
from lora_moe_rl.bench.step import GROUP, LR, MAX_DIFF, PROMPTS, RANK, TOKENS
from lora_moe_rl.errors import BenchmarkError

KEY = "tml-bench"  # any
SAMPLED = (16, 64, 256)  # prompts at a time, of GROUP samples each
ROUNDS = 3  # of each size
LEARNED = (128, 512, 2048)  # data of one forward_backward


class Loop(NamedTuple):
    """Seconds of one step that the client waited."""

    publish: float
    sample: float
    learn: float
    whole: float


class Taken(NamedTuple):
    number: int
    seconds: float

    @property
    def of_one(self) -> float:
        return self.seconds / self.number


def measure(url: str, warmup: int, steps: int) -> tuple[list[Loop], dict[str, list[Taken]]]:
    """Steps after those to warm up, and what grows. Raises BenchmarkError for steps that were not
    right."""
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    (model,) = rest.get_server_capabilities().result().supported_models
    name = model.model_name or ""
    client = service.create_lora_training_client(name, rank=RANK).result()
    prompts = _prompts(client.get_tokenizer())
    steps_of = [_step(client, prompts) for _ in range(warmup + steps)]
    sampler = client.save_weights_and_get_sampling_client().result()
    growth = {
        "samples": grown(lambda count: _sampled(sampler, prompts, count), SAMPLED),
        "data": grown(lambda count: _learned(client, sampler, prompts, count), LEARNED),
    }
    return steps_of[warmup:], growth


def grown(call: Callable[[int], Taken], sizes: Sequence[int]) -> list[Taken]:
    """The medians of ROUNDS calls of each size, after one to warm up, every second round from the
    largest size down."""
    for size in sizes:
        call(size)
    found: dict[int, list[Taken]] = {size: [] for size in sizes}
    for number in range(ROUNDS):
        for size in sizes[:: -1 if number % 2 else 1]:
            found[size].append(call(size))
    return [Taken(of[0].number, median(one.seconds for one in of)) for of in found.values()]


def _prompts(tokenizer: Any):
    """Token ids without end."""
    from lora_moe_rl.tiny.arithmetic import problems

    return (tokenizer.encode(text, add_special_tokens=False) for text, _ in problems(0))


def _step(client: Any, prompts: Any) -> Loop:
    import tinker

    began = time.perf_counter()
    sampler = client.save_weights_and_get_sampling_client().result()
    published = time.perf_counter()
    groups = groups_of(sampler, list(islice(prompts, PROMPTS)))
    data = [datum for prompt, group in groups for datum in _of_group(prompt, group)]
    sampled = time.perf_counter()
    learning = client.forward_backward(data, "importance_sampling")
    stepping = client.optim_step(tinker.AdamParams(learning_rate=LR, beta2=0.999))
    check(learning.result().metrics)
    stepping.result()
    ended = time.perf_counter()
    return Loop(published - began, sampled - published, ended - sampled, ended - began)


def groups_of(sampler: Any, prompts: Sequence[list[int]]) -> list[tuple[list[int], Any]]:
    from tinker import types

    how = types.SamplingParams(max_tokens=TOKENS, temperature=1.0)
    asked = [sampler.sample(types.ModelInput.from_ints(ids), GROUP, how) for ids in prompts]
    groups = [(ids, future.result().sequences) for ids, future in zip(prompts, asked, strict=True)]
    said = {len(one.tokens) for _, group in groups for one in group}
    if said != {TOKENS}:
        raise BenchmarkError(f"no seconds to report: samples of {sorted(said)} tokens")
    return groups


def _of_group(prompt: list[int], group: Any) -> list[Any]:
    from tinker import types

    rewards = trl_step.reward([one.tokens for one in group])
    mean = sum(rewards) / len(rewards)
    found = []
    for one, reward in zip(group, rewards, strict=True):
        tokens, given = prompt + one.tokens, [0.0] * (len(prompt) - 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": given + one.logprobs,
            "advantages": given + [reward - mean] * len(one.tokens),
        }
        fed = types.ModelInput.from_ints(tokens[:-1])
        found.append(types.Datum(model_input=fed, loss_fn_inputs=inputs))
    return found


def check(metrics: dict[str, float]) -> None:
    """Raises BenchmarkError unless trainer and engine were one policy."""
    coverage = metrics["replay_coverage:mean"]
    apart = metrics["sampled_logprob_diff:max"]
    if coverage != 1 or not apart <= MAX_DIFF:
        raise BenchmarkError(
            f"no seconds to report: replay coverage {coverage}, and logprobs differ by {apart}"
        )


def _sampled(sampler: Any, prompts: Any, count: int) -> Taken:
    """Samples so many prompts, at once."""
    taken = list(islice(prompts, count))
    began = time.perf_counter()
    groups_of(sampler, taken)
    return Taken(count * GROUP, time.perf_counter() - began)


def _learned(client: Any, sampler: Any, prompts: Any, count: int) -> Taken:
    groups = groups_of(sampler, list(islice(prompts, count // GROUP)))
    data = [datum for prompt, group in groups for datum in _of_group(prompt, group)]
    began = time.perf_counter()
    check(client.forward_backward(data, "importance_sampling").result().metrics)
    return Taken(count, time.perf_counter() - began)
