"""A service whose ranks and engines take turns on the same devices is one that has both apart."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fixtures import save_random_model
from service_run import STEP, Server, data_of, learn, logprobs_of, sampled
from tinker import types

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::FutureWarning")]
LATER = types.ModelInput.from_ints([7, 8, 9, 10])


EXACT = 2e-5  # logprobs, float32: how vLLM batches requests is in their last bits


def found_by(service) -> list[np.ndarray]:
    """Tokens and logprobs of a client that samples, learns, scores and does so again."""
    client = service.create_lora_training_client("base", rank=8, seed=3).result()
    found = []
    for _ in range(2):
        sampler = client.save_weights_and_get_sampling_client().result()
        data = data_of(sampled(sampler))
        for name in ("target_tokens", "logprobs"):
            found += [np.array(one.loss_fn_inputs[name].data) for one in data]
        found += logprobs_of(learn(client, data))
        found.append(np.array(sampler.compute_logprobs(LATER).result()[1:]))
        found += logprobs_of(client.forward(data, "importance_sampling").result())
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_random_model("qwen3_moe", folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def server(base, tmp_path_factory):
    made = Server(base, tmp_path_factory.mktemp("shared"), "placement.mode=colocated")
    yield made
    made.run.end()


def test_what_is_found_is_the_same(base, server, tmp_path):
    shared = found_by(server.client())
    apart = Server(base, tmp_path)
    try:
        expected = found_by(apart.client())
    finally:
        apart.run.end()
    for one, other in zip(shared, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=EXACT)


def test_those_who_sample_and_those_who_learn_wait_for_each_other_and_not_for_ever(server):
    """Two models at the same time, each of which has asked for everything before it waits."""
    service = server.client()
    clients = [service.create_lora_training_client("base", rank=8, seed=s).result() for s in (5, 6)]
    samplers = [one.save_weights_and_get_sampling_client().result() for one in clients]
    data = [data_of(sampled(one)) for one in samplers]
    params = types.SamplingParams(max_tokens=7, seed=1)
    waiting = []
    for _ in range(4):
        for client, sampler, mine in zip(clients, samplers, data, strict=True):
            waiting.append(sampler.sample(LATER, 4, params))
            waiting.append(client.forward_backward(mine, "importance_sampling"))
            waiting.append(sampler.sample(LATER, 2, params))
            waiting.append(client.optim_step(STEP))
    for one in waiting:
        one.result(timeout=120)
    assert [one.tokens for one in waiting[0].result().sequences] == [
        one.tokens for one in waiting[-8].result().sequences
    ], "the same sampler says something else"


def test_an_engine_that_is_killed_while_the_ranks_have_the_devices_comes_back(server):
    service = server.client()
    client = service.create_lora_training_client("base", rank=8, seed=8).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    said = sampled(sampler)
    learn(client, data_of(said))  # the ranks have the devices now
    server.run.actor("engine-0", "ray::").kill()
    learn(client, data_of(said))
    assert [one.tokens for _, one in sampled(sampler)] == [one.tokens for _, one in said]
    newer = client.save_weights_and_get_sampling_client().result()
    assert [one.tokens for _, one in sampled(newer)] != [one.tokens for _, one in said]
