"""The whole life of a model, asked by the real SDK: what comes back is what the backend has found,
to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
import torch
from pretended_backend import BASE, PretendedBackend, logprobs_of
from served import Served, client, datum, serving, until

from lora_moe_rl.service.backend import Adam, Lora

pytestmark = pytest.mark.seconds  # imports tinker, and waits for servers


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("root")) as served:
        yield served


@pytest.fixture
def service(served):
    with client(served) as made:
        yield made


def model_of(service: tinker.ServiceClient, **settings) -> tinker.TrainingClient:
    settings = {"base_model": BASE, "rank": 8, "seed": 5, **settings}
    return service.create_lora_training_client(**settings).result()


def ints(tokens: list[int]) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(tokens)


def weights(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n).astype(np.float32)


def test_a_model_is_made_as_it_was_asked_for(served: Served, service):
    model = model_of(service, train_mlp=False)
    (_, lora) = served.backend.named("create")[-1]
    assert lora == Lora(8, 5, attention=True, mlp=False)
    info = model.get_info()
    assert (info.lora_rank, info.is_lora, info.model_id) == (8, True, model.model_id)
    assert info.model_data.model_name == BASE and info.model_data.tokenizer_id == "tiny/tokenizer"
    assert model.model_id == f"{service.holder.get_session_id()}:train:0"
    (found,) = service.get_server_capabilities().supported_models
    assert (found.model_name, found.max_context_length, found.trainable) == (BASE, 64, True)


def test_floats_come_through_the_wire_as_they_are(served, service):
    model = model_of(service)
    rng = np.random.default_rng(0)
    odd = np.float32([0.1, -0.0, 1e-42, 3.4e38, 1 / 3])
    data = [
        datum([1, 2, 3, 4, 5], weights=odd),
        datum([2**31 - 1, 7], [9, 2**31 - 1], weights=weights(rng, 2), advantages=weights(rng, 2)),
    ]
    asked = {"clip_low_threshold": 0.1, "clip_high_threshold": 5}
    found = model.forward(data, "importance_sampling", asked).result()
    _, sent, loss, backward = served.backend.named("forward")[-1]
    assert (loss.name, loss.settings, backward) == ("importance_sampling", asked, False)
    for one, given in zip(sent, data, strict=True):
        assert one.tokens.dtype == one.targets.dtype == np.int32
        assert one.tokens.tolist() == given.model_input.to_ints()
        assert one.targets.tolist() == given.loss_fn_inputs["target_tokens"].data
        assert {*one.inputs, "target_tokens"} == set(given.loss_fn_inputs)
        for name, values in one.inputs.items():
            wanted = given.loss_fn_inputs[name].to_numpy()
            assert values.tobytes() == wanted.tobytes(), name  # -0.0 and what is smallest too
    for one, told in zip(sent, found.loss_fn_outputs, strict=True):
        wanted = logprobs_of(one.tokens, one.targets, 0.0)
        assert told["logprobs"].dtype == "float32" and told["logprobs"].shape == [len(wanted)]
        assert told["logprobs"].to_numpy().tobytes() == wanted.tobytes()
    assert set(found.metrics) == {"loss:sum", "tokens:mean"}
    total = -sum((logprobs_of(d.tokens, d.targets, 0.0) * d.inputs["weights"]).sum() for d in sent)
    np.testing.assert_allclose(found.metrics["loss:sum"], total, rtol=1e-6)


def test_parts_of_one_pass_are_learned_from_in_order_and_put_together(served, service):
    """1024 data are one request: the second is sent first, and waits for the first."""
    model = model_of(service)
    data = [datum([i % 50, 1, 2], weights=np.float32([1, 0, 0.5])) for i in range(2100)]
    passed = model.forward_backward(data, "cross_entropy")
    stepped = model.optim_step(tinker.AdamParams(learning_rate=0.5, grad_clip_norm=0.25))
    assert len(passed.result().loss_fn_outputs) == 2100
    for one, given in zip(passed.result().loss_fn_outputs, data, strict=True):
        tokens = given.model_input.to_ints()
        wanted = logprobs_of(tokens, given.loss_fn_inputs["target_tokens"].data, 0.0)
        assert one["logprobs"].to_numpy().tobytes() == wanted.tobytes()
    calls = [c for c in served.backend.calls if c[0] in ("forward", "step")]
    assert [len(c[2]) for c in calls[-4:-1]] == [1024, 1024, 52]
    firsts = [int(c[2][0].tokens[0]) for c in calls[-4:-1]]
    assert firsts == [0, 1024 % 50, 2048 % 50]
    assert calls[-1][2] == Adam(0.5, 0.9, 0.95, 1e-12, 0.0, 0.25)
    assert stepped.result().metrics == {"grad_norm": 2100 * 1.5}
    assert served.backend.weights[model.model_id] == 0.5 * 2100 * 1.5


def test_a_large_reply_is_told_by_its_size_first(served, service, monkeypatch):
    model = model_of(service)
    data = [datum(list(range(60))) for _ in range(1000)]
    seen = []
    holder = service.holder._inflight_response_bytes_semaphore
    acquire = holder.acquire
    monkeypatch.setattr(holder, "acquire", lambda size: seen.append(size) or acquire(size))
    model.forward(data, "cross_entropy").result()
    assert len(seen) == 1 and seen[0] > 60 * 1000 * 4


def test_a_sampler_is_the_model_of_its_moment(served, service):
    model = model_of(service)
    before = model.save_weights_and_get_sampling_client()
    before = before.result()
    model.forward_backward([datum([3, 4], weights=np.float32([1, 1]))], "cross_entropy").result()
    model.optim_step(tinker.AdamParams(learning_rate=0.25)).result()
    after = model.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints([5, 6, 7])
    params = tinker.SamplingParams(max_tokens=3, temperature=0.7, top_k=4, seed=9, stop=[8])
    for sampler, weight in ((before, 0.0), (after, 0.5)):
        told = sampler.sample(prompt, 2, params, topk_sample_logprobs=2).result()
        assert [one.tokens for one in told.sequences] == [[8, 9, 10], [9, 10, 11]]
        assert [one.stop_reason for one in told.sequences] == ["stop", "length"]
        for one in told.sequences:
            ids = one.tokens
            wanted = logprobs_of([i - 1 for i in ids], ids, weight)
            assert np.float32(one.logprobs).tobytes() == wanted.tobytes()
            assert one.topk_logprobs[1] == [
                (2, float(np.float32(-2) / 13)),
                (3, np.float32(-3) / 13),
            ]
        assert len({one.sequence_id for one in told.sequences}) == 2
        assert told.prompt_cache_hit_tokens == 1 and told.prompt_logprobs is None
    ask = served.backend.named("sample")[-1][1]
    assert (ask.temperature, ask.top_k, ask.top_p, ask.seed) == (0.7, 4, 1.0, 9)
    assert (ask.stop_token_ids, ask.stop, ask.samples, ask.max_tokens) == ((8,), (), 2, 3)


def test_prompts_are_scored(served, service):
    sampler = service.create_sampling_client(base_model=BASE).result()
    assert sampler.get_base_model() == BASE
    tokens = [4, 1, 30, 2]
    prompt = tinker.ModelInput(chunks=[
        tinker.EncodedTextChunk(tokens=tokens[:3]), tinker.EncodedTextChunk(tokens=tokens[3:])
    ])  # fmt: skip
    wanted = logprobs_of(tokens[:-1], tokens[1:], 0.0)
    found = sampler.compute_logprobs(prompt).result()
    assert found[0] is None and np.float32(found[1:]).tobytes() == wanted.tobytes()
    last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result()
    assert last[:2] == [None, None] and last[2:] == found[2:]
    params = tinker.SamplingParams(max_tokens=1, stop=["\n", "User:"])
    told = sampler.sample(prompt, 1, params, True, topk_prompt_logprobs=3).result()
    assert told.topk_prompt_logprobs[0] is None
    assert [token for token, _ in told.topk_prompt_logprobs[1]] == [3, 4, 5]
    sampled, ask = served.backend.named("sample")[-1]
    assert sampled is None and ask.stop == ("\n", "User:") and list(ask.prompt) == tokens


def trained(model: tinker.TrainingClient) -> tinker.TrainingClient:
    model.forward_backward([datum([3, 4], weights=np.float32([1, 2]))], "cross_entropy").result()
    model.optim_step(tinker.AdamParams(learning_rate=0.5)).result()
    return model


def test_a_prompt_of_the_whole_length_is_scored(served, service):
    whole = ints([1] * served.backend.facts.max_length)
    sampler = model_of(service).save_weights_and_get_sampling_client().result()
    assert len(sampler.compute_logprobs(whole).result()) == whole.length
    with pytest.raises(tinker.TinkerError, match="1 to 63 are served"):
        sampler.sample(whole, 1, tinker.SamplingParams(max_tokens=1)).result()


def test_training_goes_on_from_a_state(served, service):
    model = trained(model_of(service))
    path = model.save_state("step-1", user_metadata={"loop": "1"}).result().path
    assert path == f"tinker://{model.model_id}/weights/step-1"
    again = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path, user_metadata={"a": "b"}).result()
    assert again.get_info().lora_rank == 8 and again.model_id != model.model_id
    backend = served.backend
    assert backend.weights[again.model_id] == backend.weights[fresh.model_id] == 1.5
    assert (backend.moments[again.model_id], backend.moments[fresh.model_id]) == (3.0, 0.0)
    trained(again)
    assert backend.weights[again.model_id] == 1.5 + 0.5 * (0.9 * 3 + 3)
    again.load_state(path).result()
    assert backend.weights[again.model_id] == 1.5 and backend.moments[again.model_id] == 0.0
    rest = service.create_rest_client()
    assert rest.get_training_run(fresh.model_id).result().user_metadata == {"a": "b"}


def test_weights_for_a_sampler_have_a_name(served, service):
    model = trained(model_of(service))
    path = model.save_weights_for_sampler("final").result().path
    assert path == f"tinker://{model.model_id}/sampler_weights/final"
    sampler = service.create_sampling_client(model_path=path).result()
    found = sampler.compute_logprobs(tinker.ModelInput.from_ints([1, 2])).result()
    assert np.float32(found[1:]).tobytes() == logprobs_of([1], [2], 1.5).tobytes()
    assert sampler.get_base_model() == BASE
    told = service.create_rest_client().get_sampler(sampler._sampling_session_id).result()
    assert (told.base_model, told.model_path) == (BASE, path)
    external = model.save_weights_external("peft").result().path
    assert external == f"tinker://{model.model_id}/external_weights/peft"


def test_a_loss_of_the_clients_own_runs_beside_it(served, service):
    model = model_of(service)
    data = [datum([1, 2, 3]), datum([4, 5])]

    def squares(_, logprobs):
        loss = sum((one**2).sum() for one in logprobs)
        return loss, {"squares": float(loss)}

    found = model.forward_backward_custom(data, squares).result()
    forward, backward = served.backend.named("forward")[-2:]
    assert (forward[3], backward[3]) == (False, True)
    for one in backward[1]:
        wanted = -2 * logprobs_of(one.tokens, one.targets, 0.0)
        np.testing.assert_allclose(one.inputs["weights"], wanted, rtol=1e-6)
    assert found.metrics["squares"] > 0
    model.optim_step(tinker.AdamParams(learning_rate=0.1)).result()


def test_several_targets_at_a_place(served, service):
    """Sent as the SDK sends tensors: with few entries sparse, else dense."""
    model = model_of(service)
    rng = np.random.default_rng(1)
    few = torch.zeros(5, 9)
    few[2:4, :3] = torch.randn(2, 3)
    few_ids = torch.where(few != 0, torch.randint(1, 50, few.shape), 0)
    many = rng.standard_normal((3, 2)).astype(np.float32)
    plain = datum([1, 2], weights=weights(rng, 2))
    ids = rng.integers(1, 50, (3, 2))
    data = [
        tinker.Datum(ints([1, 2, 3, 4, 5]), {"target_tokens": few_ids, "weights": few}),
        tinker.Datum(ints([6, 7, 8]), {"target_tokens": ids, "weights": many}),
        plain,
        tinker.Datum(ints([9, 7, 8]), {"target_tokens": ids, "weights": many}),
    ]
    assert data[0].loss_fn_inputs["weights"].sparse_crow_indices is not None
    found = model.forward_backward(data, "cross_entropy").result()
    sent = served.backend.named("forward")[-1][1]
    wanted = [(few_ids.numpy(), few.numpy()), (ids, many)]
    for one, (targets, of_them) in zip(sent, wanted, strict=False):
        np.testing.assert_array_equal(one.targets, targets)
        assert one.inputs["weights"].tobytes() == of_them.tobytes()
    for one, told in zip(sent, found.loss_fn_outputs, strict=True):
        expected = logprobs_of(one.tokens, one.targets, 0.0)
        assert told["logprobs"].shape == [*expected.shape]
        assert told["logprobs"].to_numpy().tobytes() == expected.tobytes()

    def distilled(data, logprobs):
        assert [one.shape for one in logprobs] == [(5, 9), (3, 2), (2,), (3, 2)]
        return sum((one**2).sum() for one in logprobs), {}

    model.forward_backward_custom(data, distilled).result()
    for one in served.backend.named("forward")[-1][1]:
        expected = -2 * logprobs_of(one.tokens, one.targets, 0.0)
        np.testing.assert_allclose(one.inputs["weights"], expected, rtol=1e-6)


def test_a_sampling_client_goes_to_another_process(served, service):
    """As its handle; each copy counts for itself."""
    sampler = model_of(service).save_weights_and_get_sampling_client().result()
    copy = tinker.SamplingClient.from_sampler_handle(
        sampler.get_sampler_handle(), api_key="tml-of-these-tests"
    )
    prompt, params = tinker.ModelInput.from_ints([5, 6]), tinker.SamplingParams(max_tokens=2)
    try:
        told = [one.sample(prompt, 1, params).result() for one in (sampler, copy, copy)]
    finally:
        copy.holder.close()
    assert [one.sequences[0].tokens for one in told] == [[7, 8]] * 3
    assert len({one.sequences[0].sequence_id for one in told}) == 3


def test_what_a_client_leaves_behind_is_forgotten(tmp_path):
    backend = PretendedBackend()
    with serving(tmp_path, backend) as served:
        with client(served, user_metadata={"who": "me"}, display_name="mine") as service:
            model = trained(model_of(service))
            sampler = model.save_weights_and_get_sampling_client().result()._sampling_session_id
            path = model.save_state("kept").result().path
            session = service.holder.get_session_id()
            rest = service.create_rest_client()
            told = rest.get_session(session).result()
            assert (told.training_run_ids, told.sampler_ids) == ([model.model_id], [sampler])
            assert told.user_metadata == {"who": "me"} and told.display_name == "mine"
            assert rest.list_sessions().result().sessions == [session]
        until(lambda: bool(backend.named("forget")))
        assert backend.named("forget") == [(model.model_id,)]
        assert backend.named("forget_sampler") == [(sampler,)]
        gone = served.post("session_heartbeat", {"session_id": session})
        assert gone.status_code == 410 and "its client said success" in gone.text
        with client(served) as service:  # what has a name stays
            again = service.create_training_client_from_state(path).result()
            assert backend.weights[again.model_id] == 1.5
