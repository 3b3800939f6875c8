"""What clients of the service ask for, on the real vLLM engine behind the engines of a run: against
Hugging Face's float32 forward, and against what a run's own samples are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from engine_fixtures import (
    ACTOR,
    EngineUnderTest,
    EngineWithDisk,
    of_folder,
    reference,
    save_random_model,
)
from letters import STOPS, letters_in_pairs

from lora_moe_rl.cluster import engine_actor
from lora_moe_rl.cluster.engines import RolloutEngines
from lora_moe_rl.rollout import outputs
from lora_moe_rl.service.backend import Ask, Facts
from lora_moe_rl.service.routes import RouteStore
from lora_moe_rl.service.sampling import Samplers, seed_of

pytestmark = [pytest.mark.slow, pytest.mark.whole]
EXACT = 1e-5  # logprobs, float32
LONGEST = 24


class Engine(EngineWithDisk):
    def use_stop(self, stop: tuple[str, ...]) -> None:
        """As if the run were configured so."""
        rollout = self.config.rollout.model_copy(update={"stop": stop})
        self.sampling = outputs.sampling_params(
            self.config.model_copy(update={"rollout": rollout}), self.stop_ids
        )


@pytest.fixture(scope="module")
def served(ray_session, tmp_path_factory):
    """The engines of a run, of which there is one, and that one."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    model = save_random_model("qwen3_moe", folder)
    letters_in_pairs().save_pretrained(folder)
    config, spec = of_folder(folder, rollout={"max_response_tokens": LONGEST})
    run_dir = SimpleNamespace(log_path=lambda name: folder / f"{name}.log", tail=lambda name: "")
    placement = SimpleNamespace(engine=lambda index: ACTOR, engines_share=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_actor, "RolloutEngine", Engine)
        engines = RolloutEngines(config, spec, folder, run_dir, placement)  # type: ignore[arg-type]
    engines.start_async()
    try:
        engines.wait_started()
        yield engines, EngineUnderTest(engines.actors[0].handle, config, spec, model)
    finally:
        ray.get(engines.actors[0].handle.shutdown.remote(), timeout=60)
        ray.kill(engines.actors[0].handle)


@pytest.fixture
def samplers(served) -> Samplers:
    engines, engine = served
    config = engine.config
    facts = Facts("base", "there", config.model.max_length, config.adapter.rank, False)
    return Samplers(engines, config, RouteStore(engine.spec.shape, config.trainer), facts)


def asked(samplers: Samplers, version: int | None, *asks: Ask):
    """All at once."""

    async def together():
        return await asyncio.gather(*(samplers.sample(version, ask) for ask in asks))

    return asyncio.run(together())


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 250, length).tolist() for length in lengths]


def whole(ask: Ask, said) -> np.ndarray:
    return np.array([*ask.prompt, *said.token_ids], np.int32)


def distributions(model, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Hugging Face's logprobs of all tokens after each, [L, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor(ids)[None].long()).logits[0] / temperature
    return logits.log_softmax(-1).numpy()


def assert_likeliest(top, theirs: np.ndarray) -> None:
    """Theirs: logprobs of all tokens at the same places, [n, vocabulary]."""
    k = top.token_ids.shape[1]
    np.testing.assert_allclose(top.logprobs, -np.sort(-theirs)[:, :k], atol=EXACT, rtol=0)
    own = np.take_along_axis(theirs, top.token_ids.astype(np.int64), axis=1)
    np.testing.assert_allclose(own, top.logprobs, atol=EXACT, rtol=0)
    assert all(len(set(row)) == k for row in top.token_ids.tolist())


def test_a_text_ends_a_sample_of_one_request_as_it_ends_those_of_a_run(served, samplers):
    _, engine = served
    version, prompts = (
        engine.new_version(engine.random_adapter(1)),
        random_prompts(1, [3, 7, 20, 1]),
    )
    ray.get(engine.actor.use_stop.remote(STOPS))
    of_run, _ = engine.generate(prompts, 10, version)
    ray.get(engine.actor.use_stop.remote(()))
    # Half of the prompts are asked for without: each request has its own.
    ends = [STOPS, (), STOPS, ()]
    asks = [
        Ask(prompt, 1, LONGEST, seed=1000 * place + number, stop=stop)
        for place, (prompt, stop) in enumerate(zip(prompts, ends, strict=True))
        for number in range(10)
    ]
    found = [one for sampled in asked(samplers, version, *asks) for one in sampled.samples]
    free, _ = engine.generate(prompts, 10, version)
    cut = 0
    for place, (said, run, other) in enumerate(zip(found, of_run, free, strict=True)):
        wanted = run if ends[place // 10] else other
        assert said.token_ids.tolist() == wanted.response_ids.tolist()
        np.testing.assert_allclose(said.logprobs, wanted.logprobs, atol=EXACT, rtol=0)
        assert said.finish_reason == wanted.finish_reason
        cut += len(run.response_ids) < len(other.response_ids)
    assert cut > 20, "the texts end hardly any sample"


def test_a_prompts_logprobs_are_those_of_the_merged_weights(served, samplers):
    _, engine = served
    tensors = engine.random_adapter(2)
    version, prompts = engine.new_version(tensors), random_prompts(2, [150, 2, 17, 1])
    asks = [Ask(ids, 1, 2, prompt_logprobs=True, top_prompt=5) for ids in prompts]
    for _ in range(2):  # the second time the cache has the prompt
        for of_version in (version, None):
            found = asked(samplers, of_version, *asks)
            with engine.merged(tensors if of_version is not None else None) as model:
                for ids, sampled in zip(prompts, found, strict=True):
                    theirs = distributions(model, np.array(ids))[:-1]
                    own = sampled.prompt_logprobs
                    assert own.dtype == np.float32 and len(own) == len(ids) and np.isnan(own[0])
                    wanted = theirs[range(len(ids) - 1), ids[1:]]
                    np.testing.assert_allclose(own[1:], wanted, atol=EXACT, rtol=0)
                    ids_top, values = sampled.top_prompt.token_ids, sampled.top_prompt.logprobs
                    assert (ids_top[0] == -1).all() and np.isnan(values[0]).all()
                    rest = replace(sampled.top_prompt, token_ids=ids_top[1:], logprobs=values[1:])
                    assert_likeliest(rest, theirs)
    assert found[0].cached > 0
    (plain,) = asked(samplers, version, Ask(prompts[0], 1, 2))
    assert plain.prompt_logprobs is None and plain.top_prompt is None
    (only,) = asked(samplers, version, Ask(prompts[0], 1, 2, top_prompt=2))
    assert only.prompt_logprobs is None and only.top_prompt.token_ids.shape == (150, 2)


def test_requests_that_tell_more_of_each_token_than_others_run_beside_them(served, samplers):
    """Some begin while others are in flight, and end before them."""
    _, engine = served
    tensors = engine.random_adapter(3)
    version, prompts = engine.new_version(tensors), random_prompts(3, [9, 5, 14, 3])
    asks = [
        Ask(prompts[0], 4, 60, seed=1),
        Ask(prompts[1], 2, 5, temperature=0.7, seed=2, top_sampled=4),
        Ask(prompts[2], 2, 30, temperature=1.3, seed=3, top_sampled=20),
        Ask(prompts[3], 2, 12, seed=4, top_k=2, top_sampled=3),
    ]
    found = asked(samplers, version, *asks)
    assert [one.top for one in found[0].samples] == [None] * 4
    with engine.merged(tensors) as model:
        for ask, sampled in zip(asks, found, strict=True):
            for said in sampled.samples:
                ids, first = whole(ask, said), len(ask.prompt) - 1
                theirs = distributions(model, ids[:-1], ask.temperature)[first:]
                if ask.top_k == -1:
                    wanted = theirs[range(len(said.token_ids)), said.token_ids]
                    np.testing.assert_allclose(said.logprobs, wanted, atol=EXACT, rtol=0)
                if ask.top_k > 0:
                    likeliest = -np.sort(-theirs)[:, :2]
                    theirs = likeliest - np.logaddexp(*likeliest.T)[:, None]
                    own = said.top.logprobs[:, :2]
                    np.testing.assert_allclose(own, theirs, atol=EXACT, rtol=0)
                elif said.top is not None:
                    assert_likeliest(said.top, theirs)
            assert all(len(said.token_ids) <= ask.max_tokens for said in sampled.samples)
    for said in found[3].samples:  # of two tokens; no other could be sampled
        assert np.isneginf(said.top.logprobs[:, 2]).all()
        chosen = said.top.token_ids == said.token_ids[:, None]
        assert chosen[:, :2].any(axis=1).all()
        np.testing.assert_array_equal(said.top.logprobs[chosen], said.logprobs)


def test_at_temperature_0_the_likeliest_token_is_said_with_its_logprob_at_1(served, samplers):
    _, engine = served
    tensors = engine.random_adapter(14)
    version, prompts = engine.new_version(tensors), random_prompts(4, [9, 5, 30])
    greedy = [Ask(ids, 2, None, temperature=0.0, top_p=0.3, top_k=2) for ids in prompts]
    found = asked(samplers, version, *greedy, Ask(prompts[0], 4, 20, top_p=0.5))
    with engine.merged(tensors) as model:
        for ask, sampled in zip(greedy, found[:-1], strict=True):
            said, again = sampled.samples
            assert said.token_ids.tolist() == again.token_ids.tolist()
            ids = whole(ask, said)
            theirs = distributions(model, ids[:-1])[len(ask.prompt) - 1 :]
            assert said.token_ids.tolist() == theirs.argmax(-1).tolist()
            np.testing.assert_allclose(said.logprobs, theirs.max(-1), atol=EXACT, rtol=0)
            ended = said.token_ids[-1] == engine.model.config.eos_token_id
            assert ended == (said.finish_reason == "stop")
            assert ended or len(ids) == engine.config.model.max_length


def test_samples_depend_on_their_seed_and_place_alone(served, samplers):
    _, engine = served
    version, (prompt,) = engine.new_version(engine.random_adapter(5)), random_prompts(5, [12])
    together = [one.token_ids.tolist() for one in of_seed(samplers, version, prompt, 7, 4)]
    seeds = [7, *(seed_of(7, number) for number in (1, 2, 3))]
    alone = [of_seed(samplers, version, prompt, seed, 1)[0].token_ids.tolist() for seed in seeds]
    assert together == alone and len(set(map(tuple, alone))) == 4
    (group, _) = engine.generate([prompt], 4, version, seed=0)
    of_run = [of_seed(samplers, version, prompt, i, 1)[0].token_ids.tolist() for i in range(4)]
    assert of_run == [one.response_ids.tolist() for one in group]
    asks = [Ask(prompt, 2, LONGEST)] * 2
    drawn = [one.token_ids.tolist() for s in asked(samplers, version, *asks) for one in s.samples]
    assert len(set(map(tuple, drawn))) == 4


def of_seed(samplers: Samplers, version: int, prompt: list[int], seed: int, n: int):
    return asked(samplers, version, Ask(prompt, n, LONGEST, seed=seed))[0].samples


def test_routes_are_found_by_tokens_as_the_engine_recorded_them(served, samplers):
    """Also those of a prompt that came from the cache, and of the second turn of a conversation,
    which are all of the second request's."""
    _, engine = served
    tensors = engine.random_adapter(6)
    version, (prompt, told) = engine.new_version(tensors), random_prompts(6, [130, 9])
    first = Ask(prompt, 4, LONGEST, seed=1)
    (turns,) = asked(samplers, version, first)
    begun = whole(first, turns.samples[0])
    second = Ask([*begun.tolist(), *told], 2, LONGEST, seed=2)
    (answers,) = asked(samplers, version, second)
    assert answers.cached > 0 and len(samplers.store) == 6
    data = [whole(first, said) for said in turns.samples]
    data += [whole(second, said) for said in answers.samples]
    expected = engine.score([ids.tolist() for ids in data], version)[1]
    with engine.merged(tensors) as model:
        for place, ids in enumerate(data):
            found = samplers.store.find(ids[:-1])
            assert found.recorded == found.routes.num_rows == len(ids) - 1
            table = found.routes.of_sample(0)
            assert table.valid.all()
            own = np.sort(table.ids, axis=-1)
            rows = slice(*expected.offsets[place : place + 2])
            np.testing.assert_array_equal(own, np.sort(expected.ids[rows], axis=-1))
            np.testing.assert_array_equal(own, reference(model, engine.spec, ids.tolist())[1])
    (base,) = asked(samplers, None, first)
    assert len(base.samples) == 4 and len(samplers.store) == 6
    ids = whole(first, base.samples[0])
    with engine.merged(None) as model:
        theirs = reference(model, engine.spec, ids.tolist())[0][len(prompt) - 1 :]
    np.testing.assert_allclose(base.samples[0].logprobs, theirs, atol=EXACT, rtol=0)
