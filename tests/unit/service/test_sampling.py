"""What is asked of engines for a client: what is refused before, and what is asked again."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Sample, Segment
from lora_moe_rl.data.told import Told, ToldPrompt
from lora_moe_rl.errors import EngineDied, ServiceError
from lora_moe_rl.service.backend import Ask, Facts
from lora_moe_rl.service.sampling import Samplers, seed_of

ASK = Ask([1, 2], 2, 5)


class Engines:
    """Engines that die as often as they are told to, before they answer."""

    spec = SimpleNamespace(shape=SimpleNamespace(vocab_size=50))

    def __init__(self, deaths: int = 0, lost: bool = False):
        self.deaths, self.gone, self.asked = deaths, lost, []

    def lost(self, version: int) -> bool:
        return self.gone

    def _asked(self, *what) -> None:
        self.asked.append(what)
        if self.deaths:
            self.deaths -= 1
            raise EngineDied("vLLM's processes have ended")

    async def sample_each(self, token_ids, version, seeds, manner, top=0):
        self._asked(version, seeds, manner, top)
        segments = (Segment.given("user", token_ids), Segment.sampled([3], np.zeros(1), 0))
        return [(Told(Sample(segments, "stop", ""), None, 7 - i), None) for i in range(len(seeds))]

    async def score_prompt(self, token_ids, version, top=0):
        self._asked(version, top)
        return ToldPrompt(np.zeros(len(token_ids), np.float32), None)


def sampled(engines: Engines, ask: Ask, version: int | None = 4, scores_whole: bool = True):
    facts = Facts("base", "there", 10, 8, scores_whole)
    return asyncio.run(Samplers(engines, RunConfig(), None, facts).sample(version, ask))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": []}, "prompt of 0 tokens"),
        ({"prompt": [1] * 10}, "prompt of 10 tokens leaves no room"),
        ({"max_tokens": 9}, "max_tokens=9 after a prompt of 2 tokens .* ask for 8 at most"),
        ({"prompt": [1, 50]}, "the prompt has the token 50; the model's are 0 to 49"),
        ({"prompt": [-1]}, "the prompt has the token -1"),
        ({"stop_token_ids": (50,)}, "stop has the token 50"),
        ({"stop": ("a", "")}, "empty text"),
        ({"samples": 0}, "samples=0 is not at least 1"),
        ({"max_tokens": 0}, "max_tokens=0 is not at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 is not 0, or at least 0.01"),
        ({"temperature": 0.001}, "temperature=0.001"),
        ({"temperature": math.nan}, "temperature=NaN"),
        ({"temperature": math.inf}, "temperature=Infinity"),
        ({"top_p": 0.0}, "top_p=0.0 is not above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_prompt": 21}, "top_prompt=21 is not from 0 to 20"),
        ({"top_sampled": -1}, "top_sampled=-1"),
    ],
)
def test_what_no_engine_can_be_asked_is_refused_before_one_is(wrong, message):
    engines = Engines()
    with pytest.raises(ServiceError, match=message):
        sampled(engines, replace(ASK, **wrong))
    assert not engines.asked


def test_the_same_is_asked_again_when_an_engine_dies():
    engines = Engines(deaths=2)
    found = sampled(engines, replace(ASK, prompt_logprobs=True))
    assert len(found.samples) == 2 and found.prompt_logprobs is not None and found.cached == 6
    assert len(engines.asked) == 4 and len({str(one) for one in engines.asked}) == 2
    with pytest.raises(EngineDied):
        sampled(Engines(deaths=1, lost=True), ASK)
    assert len(sampled(Engines(deaths=1, lost=True), ASK, version=None).samples) == 2


def test_a_request_has_its_own_seeds_and_manner():
    def asked(**settings):
        engines = Engines()
        sampled(engines, replace(ASK, **settings))
        ((_, seeds, manner, top),) = engines.asked
        return seeds, manner, top

    seeds, manner, top = asked(seed=2**63 - 1, max_tokens=None, top_p=0.5, top_k=-1, top_sampled=3)
    assert seeds == [2**63 - 1, seed_of(2**63 - 1, 1)] and top == 3
    assert (manner.max_tokens, manner.top_p, manner.top_k) == (8, 0.5, 0)
    first, greedy, _ = asked(temperature=0.0, top_p=0.5, top_k=3, stop=("a",))
    assert (greedy.top_p, greedy.top_k, greedy.stop) == (1.0, 0, ("a",))
    assert first == asked()[0] and first[1] == seed_of(first[0], 1)  # by the seed of the config


def test_requests_of_neighbouring_seeds_draw_nothing_twice():
    seeds = [{seed, *(seed_of(seed, i) for i in range(1, 16))} for seed in range(40)]
    assert len(set.union(*seeds)) == 40 * 16
    assert all(0 <= one < 2**63 for one in set.union(*seeds))


def test_a_sequence_of_the_whole_length_is_scored_where_the_model_has_a_place_more():
    """Clients ask for a token after it, as if to sample."""
    whole = replace(ASK, prompt=[1] * 10, max_tokens=1, samples=1, prompt_logprobs=True)
    assert len(sampled(Engines(), whole).prompt_logprobs) == 10
    with pytest.raises(ServiceError, match="a prompt of 10 tokens leaves no room"):
        sampled(Engines(), whole, scores_whole=False)
    for other in ({"max_tokens": 2}, {"prompt_logprobs": False}, {"prompt": [1] * 11}):
        with pytest.raises(ServiceError):
            sampled(Engines(), replace(whole, **other))
