"""`lora-moe-rl tinker` with real ranks and a real engine, asked by Tinker's own SDK; what it trains
is compared with Hugging Face's forward and PEFT's adapter."""

from __future__ import annotations

import hf
import numpy as np
import pytest
import tinker
import torch
from engine_fixtures import save_random_model
from service_run import STEP, Server, data_of, learn, logprobs_of, sampled
from tinker import types

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def base(folder):
    return save_random_model("qwen3_moe", folder / "model"), folder / "model"


@pytest.fixture(scope="module")
def server(base, folder):
    made = Server(base[1], folder)
    yield made
    made.run.end()


@pytest.fixture(scope="module")
def service(server):
    return server.client()


@pytest.fixture(scope="module")
def trained(service):
    """(client, what the first pass found, its data) of a model of half the service's rank that has
    learned from what it sampled, three times over."""
    client = service.create_lora_training_client("base", rank=4, seed=3).result()
    first = None
    for _ in range(3):
        data = data_of(sampled(client.save_weights_and_get_sampling_client().result()))
        output = learn(client, data)
        first = first or output
    return client, output, data


def test_what_was_sampled_is_trained_on_its_routes(trained):
    """By now the adapter has changed what the base says."""
    _, output, data = trained
    metrics = output.metrics
    assert metrics["replay_coverage:mean"] == 1.0
    assert metrics["sampled_logprob_diff:max"] < 1e-4
    assert abs(metrics["sampled_kl:mean"]) < 1e-5
    expected = -sum(
        float(np.exp(ours - np.array(d.loss_fn_inputs["logprobs"].data))
              @ np.array(d.loss_fn_inputs["advantages"].data))
        for ours, d in zip(logprobs_of(output), data, strict=True)
    )  # fmt: skip
    assert metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_data_that_nobody_sampled_are_routed_by_the_trainer(trained):
    client, _, _ = trained
    fed = [9, 8, 7, 6, 5, 4]
    weights = {"target_tokens": [8, 7, 6, 5, 4, 3], "weights": [1.0] * 6}
    datum = types.Datum(model_input=types.ModelInput.from_ints(fed), loss_fn_inputs=weights)
    assert client.forward([datum], "cross_entropy").result().metrics["replay_coverage:mean"] == 0.0


def test_an_exported_adapter_is_what_was_trained(trained, base, server):
    """PEFT's adapter on Hugging Face's model, whose routers choose for themselves."""
    import peft

    client, _, _ = trained
    fed = [list(range(start, start + 9)) for start in (3, 20, 40)]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids),
            loss_fn_inputs={"target_tokens": [*ids[1:], 2], "weights": [1.0] * 9},
        )
        for ids in fed
    ]
    ours = logprobs_of(client.forward(data, "cross_entropy").result())
    path = client.save_weights_external("exported").result().path
    directory = server.kept / path.removeprefix("tinker://")
    model = hf.load(base[1])
    bare = [hf.logprobs(model, [*ids, 2]) for ids in fed]
    loaded = peft.PeftModel.from_pretrained(model, directory).eval()
    assert loaded.peft_config["default"].r == 4
    theirs = [hf.logprobs(loaded, [*ids, 2]) for ids in fed]
    for one, other, without in zip(ours, theirs, bare, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=0)
        assert np.abs(one - without).max() > 0.01, "the adapter changes nothing"


def test_a_sampler_that_has_lost_its_slot_is_served_again(service):
    """Of two slots, three samplers and one that is saved under a name."""
    client = service.create_lora_training_client("base", rank=8, seed=4).result()
    samplers = []
    for _ in range(3):
        samplers.append(client.save_weights_and_get_sampling_client().result())
        learn(client, data_of(sampled(samplers[-1])))
    path = client.save_weights_for_sampler("named").result().path
    samplers.append(service.create_sampling_client(model_path=path).result())
    samplers.append(client.save_weights_and_get_sampling_client().result())
    said = [[one.tokens for _, one in sampled(sampler)] for sampler in samplers]
    again = [[one.tokens for _, one in sampled(sampler)] for sampler in samplers[::-1]][::-1]
    assert said == again
    assert said[3] == said[4] != said[0], "what is saved is not what is served"


def test_a_prompts_logprobs_are_the_trainers(trained, service):
    client, _, _ = trained
    ids = [3, 30, 60, 90, 120, 33]
    sampler = client.save_weights_and_get_sampling_client().result()
    told = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [0.0] * 5},
    )
    (ours,) = logprobs_of(client.forward([datum], "cross_entropy").result())
    assert told[0] is None
    np.testing.assert_allclose(told[1:], ours, atol=2e-5, rtol=0)
    bare = service.create_sampling_client(base_model="base").result()
    of_base = bare.compute_logprobs(types.ModelInput.from_ints(ids)).result()
    assert np.abs(np.array(of_base[1:]) - ours).max() > 0.01
    whole = types.ModelInput.from_ints([*range(3, 67)])  # model.max_length
    assert np.isfinite(sampler.compute_logprobs(whole).result()[1:]).all()


def test_a_text_is_never_routed_as_an_older_state_would(service):
    """A client scores texts by one state, learns, and asks for their probability again: it is that
    of the new state, which an engine is asked for after it. So of texts and of what was sampled."""
    client = service.create_lora_training_client("base", rank=8, seed=6).result()
    old = client.save_weights_and_get_sampling_client().result()
    texts = [[*range(start, start + 12)] for start in (3, 20, 40)]
    texts += [[*prompt, *one.tokens] for prompt, one in sampled(old)]
    for ids in texts:
        old.compute_logprobs(types.ModelInput.from_ints(ids)).result()
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
        )
        for ids in texts
    ]
    assert client.forward(data, "cross_entropy").result().metrics["replay_coverage:mean"] == 1.0
    before = logprobs_of(client.forward(data, "cross_entropy").result())
    for _ in range(4):
        client.forward_backward(data[:3], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.03)).result()
    asked = client.forward(data, "cross_entropy").result()
    assert asked.metrics["replay_coverage:mean"] == 0.0
    new = client.save_weights_and_get_sampling_client().result()
    for ids, ours, then in zip(texts, logprobs_of(asked), before, strict=True):
        served = new.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:]
        np.testing.assert_allclose(ours, served, atol=1e-4, rtol=0)
        assert np.abs(ours - then).max() > 0.05
    again = client.forward(data, "cross_entropy").result()
    assert again.metrics["replay_coverage:mean"] == 1.0


def test_a_loss_of_the_clients_own_is_learned_as_one_of_the_services(service):
    clients = [service.create_lora_training_client("base", rank=8, seed=9).result() for _ in "ab"]
    data = data_of(sampled(clients[0].save_weights_and_get_sampling_client().result()))

    def own(data, logprobs):
        total = 0.0
        for datum, one in zip(data, logprobs, strict=True):
            inputs = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
            total = total - (torch.exp(one - inputs["logprobs"]) * inputs["advantages"]).sum()
        return total, {"mine": 1.0}

    theirs = clients[0].forward_backward(data, "importance_sampling").result()
    mine = clients[1].forward_backward_custom(data, own).result()
    assert mine.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-4, abs=1e-4)
    norms = [client.optim_step(STEP).result().metrics["grad_norm"] for client in clients]
    # The other model has sampled nothing: its routers choose, as the engine's did.
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_an_engine_that_is_killed_comes_back_and_is_proven(service, server):
    """It has the newest version alone; the older one is served again."""
    client = service.create_lora_training_client("base", rank=8, seed=8).result()
    older = client.save_weights_and_get_sampling_client().result()
    learn(client, data_of(sampled(older)))
    newer = client.save_weights_and_get_sampling_client().result()
    said = [[one.tokens for _, one in sampled(one)] for one in (older, newer)]
    learn(client, data_of(sampled(older)))  # the ranks hold something else than is served
    server.run.actor("engine-0", "ray::").kill()
    assert [[one.tokens for _, one in sampled(one)] for one in (older, newer)] == said
    assert "engine-0 is back and serves version" in server.log("controller")


@pytest.mark.minute
def test_a_model_goes_on_from_what_was_saved_also_after_a_restart(service, server, base, folder):
    """Bit for bit, with Adam's moments; and not without them."""
    other, client = (
        service.create_lora_training_client("base", rank=8, seed=seed).result() for seed in (6, 5)
    )
    # What another has sampled: nobody has its routes.
    data = data_of(sampled(other.save_weights_and_get_sampling_client().result()))
    assert learn(client, data).metrics["replay_coverage:mean"] == 0.0
    path = client.save_state("here").result().path
    with_moments = service.create_training_client_from_state_with_optimizer(path).result()
    without = service.create_training_client_from_state(path).result()
    found = []
    for one in (client, with_moments, without):
        learn(one, data)
        found.append(np.concatenate(logprobs_of(one.forward(data, "importance_sampling").result())))
    np.testing.assert_array_equal(found[1], found[0])
    assert np.abs(found[2] - found[0]).max() > 1e-3, "the moments change nothing"
    server.ends()
    again = Server(base[1], folder)
    try:
        later = again.client().create_training_client_from_state_with_optimizer(path).result()
        learn(later, data)
        output = later.forward(data, "importance_sampling").result()
        np.testing.assert_array_equal(np.concatenate(logprobs_of(output)), found[1])
        again.run.actor("trainer-1", "ray::").kill()
        with pytest.raises(tinker.TinkerError):
            later.forward(data, "importance_sampling").result()
        assert again.run.finish(120) != 0
        assert "error: actor trainer-1 failed" in again.run.output
        assert not again.run.leftovers()
    finally:
        again.run.end()
