"""What is not done, as a user of the real SDK reads it: at once, by its name, with the way out."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
import tinker
from pretended_backend import BASE, DEADLY
from served import KEY, Served, client, datum, serving, until
from tinker import types
from tinker.proto import tinker_public_pb2

from lora_moe_rl.endpoint.receiving import LONGEST_BODY
from lora_moe_rl.errors import ConfigError, EngineDied
from lora_moe_rl.service.app import Service
from lora_moe_rl.service.folders import Folders

pytestmark = pytest.mark.seconds  # imports tinker, and waits for servers
TEXT = tinker.ModelInput.from_ints([1, 2, 3])
IMAGE = tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=2)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("root")) as served:
        yield served


@pytest.fixture(scope="module")
def service(served):
    with client(served) as made:
        yield made


@pytest.fixture(scope="module")
def model(service) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE, rank=8).result()


@pytest.fixture(scope="module")
def sampler(service) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE).result()


def test_half_a_character_is_told_back_as_it_came(served: Served):
    asked = {"model_id": "\ud800", "seq_id": 1, "path": "tinker://a/weights/b"}
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    at = f"{served.url}/api/v1/load_weights"
    answer = httpx.post(at, content=json.dumps(asked), headers=headers)
    assert answer.status_code == 404 and "session \ud800" in answer.json()["error"]


@pytest.mark.parametrize("key", ["tml-another", KEY[:-1] + "z", KEY + "s"])
def test_another_key(served: Served, key):
    with (
        pytest.raises(tinker.AuthenticationError, match="this is not the key of this service"),
        client(served, key=key) as service,
    ):
        service.create_lora_training_client(BASE)
    bearer = {"Authorization": f"Bearer {KEY}"}
    at = f"{served.url}/api/v1/get_server_capabilities"
    assert httpx.get(at, headers=bearer).status_code == 200
    assert httpx.get(at).status_code == 401
    assert httpx.get(f"{served.url}/api/v1/healthz").json() == {"status": "ok"}


def test_a_key_that_no_client_sends(tmp_path, served):
    with pytest.raises(ConfigError, match="must begin with tml-"):
        Service(served.backend, Folders(tmp_path), "secret")


def test_a_project(served):
    with (
        pytest.raises(tinker.BadRequestError, match="project_id=.*there are no projects here"),
        client(served, project_id="mine") as service,
    ):
        service.create_lora_training_client(BASE)


MODELS = [
    ({"base_model": "other/moe"}, "base_model 'other/moe' is not served here; 'tiny/moe' is"),
    ({"rank": 64}, "rank=64 is not served here: up to rank=32 is"),
    ({"rank": 7}, "rank=7 is odd"),  # the backend's own
    ({"rank": 0}, "lora_config.rank: Input should be greater than or equal to 1"),
    ({"optimizer": types.DimuonOptimizerConfig()}, "optimizer_config: type 'dimuon' is not served"),
    ({"train_mlp": False, "train_attn": False}, "set train_mlp or train_attn"),
    ({"user_metadata": {"a": 1}}, "user_metadata.a: Input should be a valid string"),
]


@pytest.mark.parametrize(("asked", "told"), MODELS, ids=[str(asked) for asked, _ in MODELS])
def test_a_model_that_cannot_be(service, asked, told):
    with pytest.raises(tinker.BadRequestError, match=told):
        service.create_lora_training_client(**{"base_model": BASE, **asked}).result()


def test_a_model_whose_making_fails_is_not_there(served: Served, service):
    made = service.create_lora_training_client(BASE, rank=8, seed=DEADLY)
    with pytest.raises(tinker.RequestFailedError, match="the ranks have ended") as failed:
        made.result()
    assert failed.value.category is types.RequestErrorCategory.Server
    model, _, _ = failed.value.request_id.partition(":request:")
    answer = served.post("get_info", {"model_id": model})
    assert answer.status_code == 404 and f"there is no model {model}" in answer.json()["error"]
    assert not (served.service.folders.root / model).exists()


def test_a_model_that_cannot_be_noted_is_forgotten(served: Served, service, monkeypatch):
    """The disk is full: the ranks do not keep what nobody can ask for."""

    def full(run):
        raise OSError("no space left on device")

    monkeypatch.setattr(served.service.folders, "add", full)
    before = set(served.backend.weights)
    with pytest.raises(tinker.RequestFailedError, match="this server has failed; see its log"):
        service.create_lora_training_client(BASE, rank=8).result()
    until(lambda: set(served.backend.weights) == before)


def test_a_sampler_that_cannot_be_served_can_be_asked_for_again(
    served: Served, service, model, monkeypatch
):
    path = model.save_weights_for_sampler("served-late").result().path
    publish = served.backend.publish_saved

    async def dead(directory, model, sampler):
        raise EngineDied("an engine has ended")

    monkeypatch.setattr(served.backend, "publish_saved", dead)
    asked = {"session_id": service.holder.get_session_id(), "sampling_session_seq_id": 900}
    with pytest.raises(tinker.InternalServerError, match="an engine has ended"):
        service.create_sampling_client(model_path=path).result()
    failed = served.post("create_sampling_session", {**asked, "model_path": path})
    assert failed.status_code == 500 and failed.headers["x-should-retry"] == "false"
    forgotten = (f"{asked['session_id']}:sample:900",)
    until(lambda: forgotten in served.backend.named("forget_sampler"))
    monkeypatch.setattr(served.backend, "publish_saved", publish)
    again = served.post("create_sampling_session", {**asked, "model_path": path})
    assert again.json()["sampling_session_id"].endswith(":sample:900")
    other = served.post("create_sampling_session", {**asked, "base_model": BASE})
    assert other.status_code == 400 and "is there already, of something else" in other.text


def test_a_state_that_cannot_be_served_is_forgotten(served: Served, model, monkeypatch):
    async def dead(model, sampler):
        raise EngineDied("an engine has ended")

    monkeypatch.setattr(served.backend, "publish", dead)
    before = len(served.backend.named("forget_sampler"))
    with pytest.raises(tinker.RequestFailedError, match="an engine has ended"):
        model.save_weights_and_get_sampling_client().result()
    until(lambda: len(served.backend.named("forget_sampler")) == before + 1)


def spans() -> tinker.Datum:
    span = types.PromptProvenanceSpan(sequence_id="s", offset=0, length=3)
    return datum([1, 2, 3]).with_provenance([span], [span])


def targets(values: np.ndarray) -> tinker.Datum:
    return tinker.Datum(TEXT, {"target_tokens": values})


def sparse() -> tinker.Datum:
    rows = types.TensorData([4, 5, 6], "int64", [3, 9], [0, 1, 2, 3], [0, 1, 9])
    return tinker.Datum(TEXT, {"target_tokens": rows})


def widest() -> tinker.Datum:
    """Three numbers and a lot of zeros."""
    rows = types.TensorData([4, 5, 6], "int64", [3, 2**25], [0, 1, 2, 3], [0, 1, 9])
    return tinker.Datum(TEXT, {"target_tokens": rows})


NAN = np.float32([1, np.nan, 1])
DATA = [
    (tinker.Datum(TEXT.append(IMAGE), {"target_tokens": [1] * 5}), r"data\[0\].model_input has a "
     "chunk of kind image; only text is read"),
    (targets(np.ones((3, 2, 1), np.int64)), r"has shape \[3, 2, 1\]; one value for each of the 3 "
     r"tokens of model_input is read, \[3\], or several of each, \[3, K\]"),
    (targets(np.ones((3, 0), np.int64)), r"has shape \[3, 0\]; one value for each"),
    (sparse(), r"is no sparse tensor \(CSR\) of shape \[3, 9\]"),
    (widest(), "takes 805,306,368 bytes"),
    (targets(np.ones(3, np.float32)), "holds float32; token ids are integers"),
    (targets(np.int64([1, -1, 2])), "holds -1, which is no token id"),
    (targets(np.int64([1, 2**31, 2])), "holds 2147483648, which is no token id"),
    (targets(np.int64([1, 2])), r"has shape \[2\]; one value for each of the 3 tokens"),
    (datum([1, 2, 3], weights=NAN), "holds nan: only finite numbers can be learned from"),
    (datum([1, 2, 3], weights=np.int64([1, 2, 2**24 + 1])), "holds an integer that float32 cannot"),
    (tinker.Datum(TEXT, {"weights": [1.0, 1, 1]}), "loss_fn_inputs has no target_tokens"),
    (datum(list(range(65))), r"data\[0\] has 65 tokens; 1 to 64 are served"),
    (datum([], []), r"data\[0\] has 0 tokens"),
    (spans(), "leave with_provenance out"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "told"), DATA, ids=[told[-40:] for _, told in DATA])
def test_data_that_cannot_be_learned_from(model, wrong, told):
    """The request has had its turn: the next one is not kept waiting."""
    with pytest.raises(tinker.RequestFailedError, match=told) as raised:
        model.forward([wrong], "cross_entropy").result()
    assert raised.value.category is types.RequestErrorCategory.User
    model.forward([datum([1, 2])], "cross_entropy").result()


def test_losses_that_are_not_served(model):
    data = [datum([1, 2])]
    for loss, settings, told in (
        ("gspo", None, "loss_fn='gspo' is not served; cross_entropy, importance_sampling are"),
        ("custom", {"loss_id": "7"}, r"loss_fn_config\['loss_id'\]='7' is a text"),
        ("cross_entropy", {"a": float("inf")}, r"loss_fn_config\['a'\]=inf is not a finite number"),
        ("", None, "no loss_fn is named"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=told):
            model.forward(data, loss, settings).result()


def test_no_step_is_made_with_a_part_of_the_gradient(served, model):
    """One part of three fails; the step that is asked for with it must not be made."""
    data = [datum([1, 2], weights=np.float32([1, 1])) for _ in range(2100)]
    data[1500] = datum([1, 2], weights=np.float32([1, np.inf]))
    passed = model.forward_backward(data, "cross_entropy")
    stepped = model.optim_step(tinker.AdamParams())
    with pytest.raises(tinker.RequestFailedError, match=r"data\[476\].* holds inf"):
        passed.result()
    with pytest.raises(tinker.RequestFailedError, match="so the gradient is not whole: no step"):
        stepped.result()
    assert served.backend.gradients[model.model_id] == 0.0
    assert not [call for call in served.backend.named("step") if call[0] == model.model_id]
    model.forward_backward(data[:1], "cross_entropy").result()
    assert model.optim_step(tinker.AdamParams()).result().metrics == {"grad_norm": 2.0}


def test_a_backend_that_fails_is_the_servers_fault(model):
    with pytest.raises(tinker.RequestFailedError, match="the ranks have ended") as raised:
        model.forward([datum([DEADLY, 2])], "cross_entropy").result()
    assert raised.value.category is types.RequestErrorCategory.Server


def test_a_fault_of_ours_tells_nothing_of_itself(served, model, monkeypatch):
    monkeypatch.delitem(served.backend.weights, model.model_id)
    with pytest.raises(tinker.RequestFailedError, match="this server has failed; see its log"):
        model.forward([datum([1, 2])], "cross_entropy").result()


def test_another_optimizer(model):
    with pytest.raises(tinker.RequestFailedError, match="adam_params .AdamParams. are served"):
        model.optim_step(types.DimuonParams(learning_rate=0.1)).result()
    with pytest.raises(tinker.RequestFailedError, match="adam_params.learning_rate"):
        model.optim_step(tinker.AdamParams(learning_rate=-1)).result()
    with pytest.raises(tinker.RequestFailedError, match="learning_rate: .* less than or equal to"):
        model.optim_step(tinker.AdamParams(learning_rate=1e30)).result()
    with pytest.raises(tinker.RequestFailedError, match="weight_decay=30.0 .* past 0"):
        model.optim_step(tinker.AdamParams(learning_rate=0.1, weight_decay=30)).result()
    for eps in (0, 1e-50):  # B begins as zeros, and A without a gradient
        with pytest.raises(tinker.RequestFailedError, match="adam_params.eps"):
            model.optim_step(tinker.AdamParams(learning_rate=0.1, eps=eps)).result()


SAMPLES = [
    ({"stop": []}, {}, "leave stop out, or name what is to end them"),
    ({"stop": ["a", ""]}, {}, "an empty text would end each sample at once"),
    ({"max_tokens": 0}, {}, "sampling_params.max_tokens"),
    ({"temperature": -1}, {}, "sampling_params.temperature"),
    ({}, {"prompt": tinker.ModelInput.empty()}, "the prompt has 0 tokens; 1 to 63 are served"),
    ({}, {"prompt": tinker.ModelInput.from_ints([1] * 64)}, "the prompt has 64 tokens"),
    ({}, {"prompt": TEXT.append(IMAGE)}, "a chunk of kind 'image' is not served here"),
    ({}, {"num_samples": 5000}, "num_samples: Input should be less than or equal to 4096"),
    ({}, {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k=2 is not served here: topk_prompt"),
    ({}, {"target_prompt_logprobs": types.TensorData([1, 2], "int64", [2, 1])},
     "target_prompt_logprobs=.* is not served here: logprobs of the prompt"),
    ({}, {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "of a prompt of 3 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "asked", "told"), SAMPLES, ids=[s[2][:30] for s in SAMPLES])
def test_samples_that_cannot_be(sampler, params, asked, told):
    params = tinker.SamplingParams(**{"max_tokens": 2, **params})
    asked = {"prompt": TEXT, "num_samples": 1, "sampling_params": params, **asked}
    with pytest.raises(tinker.BadRequestError, match=told):
        sampler.sample(**asked).result()


def test_records_of_stability(service):
    sampler = service.create_sampling_client(base_model=BASE, record_stability_info=True).result()
    with pytest.raises(tinker.BadRequestError, match="record_stability_info=true is not served"):
        sampler.sample(TEXT, 1, tinker.SamplingParams(max_tokens=1)).result()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../up", "a/b", ".hidden", "a b", "x" * 129, "a\0"]
)
def test_names_that_lead_elsewhere(served, model, name):
    before = sorted(served.service.folders.root.rglob("*"))
    for save in (model.save_state, model.save_weights_for_sampler, model.save_weights_external):
        with pytest.raises(tinker.RequestFailedError, match="is no name here"):
            save(name).result()
    assert sorted(served.service.folders.root.rglob("*")) == before


def test_checkpoints_that_stay(served, model):
    model.save_state("once").result()
    with pytest.raises(tinker.RequestFailedError, match="overwrite=True replaces it"):
        model.save_state("once").result()
    model.save_state("once", overwrite=True).result()
    model.save_weights_for_sampler("once").result()
    with pytest.raises(tinker.RequestFailedError, match="take another name"):
        model.save_weights_for_sampler("once").result()
    with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients"):
        model.save_weights_external("sealed", age_encryption_recipients=["age1"]).result()
    with pytest.raises(tinker.RequestFailedError, match="kind='inflight' is not served here"):
        model.save_weights_and_get_sampling_client(kind="inflight").result()


def test_checkpoints_that_do_not_fit(service, model, served):
    state = model.save_state("state").result().path
    sampled = model.save_weights_for_sampler("sampled").result().path
    external = model.save_weights_external("external").result().path
    make = service.create_training_client_from_state_with_optimizer
    loading = service.create_training_client_from_state
    for call, told in (
        (lambda: make(sampled), "cannot be loaded so: take a checkpoint of save_state"),
        (lambda: loading(external), "cannot be loaded so"),
        (lambda: loading(state, base_model="other"), "base_model 'other' is not served"),
        (lambda: loading(state, weights_access_token="t"), "weights_access_token"),
        (lambda: loading(state, optimizer=types.DimuonOptimizerConfig()), "type 'dimuon'"),
        (lambda: loading(f"{state}-2"), "there is no checkpoint tinker://.*state-2 here"),
        (lambda: loading("state"), "'state' is not of the form tinker://MODEL/KIND/NAME"),
        (lambda: loading("tinker://../../etc"), "the model '..' is no name here"),
        (lambda: service.create_sampling_client(model_path=external), "cannot be sampled from"),
        (lambda: service.create_sampling_client(model_path=f"{sampled}x"), "there is no"),
        (lambda: service.create_sampling_client(base_model="other"), "'tiny/moe' is"),
    ):  # fmt: skip
        with pytest.raises(tinker.BadRequestError, match=told):
            call().result()
    assert service.create_sampling_client(model_path=state).result().get_base_model() == BASE


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_there_is_nobody_for(service, model):
    rest = service.create_rest_client()
    path = model.save_weights_external("held").result().path
    for call, told in (
        (lambda: rest.publish_checkpoint_from_tinker_path(path), "nobody to publish to"),
        (lambda: rest.unpublish_checkpoint_from_tinker_path(path), "nobody to publish to"),
        (lambda: rest.copy_weights(path, "other"), "there are no projects here"),
        (lambda: rest.assign_session_project("a", "b"), "there are no projects here"),
        (lambda: rest.list_training_runs(project_id="p"), "leave project_id out"),
        (lambda: rest.list_training_runs(limit=0), "limit=0 offset=0: 1 to 1000"),
        (lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 0), "ttl_seconds"),
    ):
        with pytest.raises(tinker.BadRequestError, match=told):
            call().result()
    with pytest.raises(tinker.NotFoundError, match="there is no GET /api/v1/sessions/a/trace_expo"):
        rest.export_session_trace("a").result()


def test_bodies_that_are_none(served: Served, model):
    """What no SDK sends."""
    proto = {"Content-Type": "application/x-protobuf"}
    for path, body, headers, status, told in (
        ("forward_backward", b"\xff", proto, 400, "is not a ForwardBackwardRequest of protobuf"),
        ("forward_backward", b"", proto, 400, "seq_id=0: requests of a model are numbered from 1"),
        ("forward_backward", b"", {**proto, "Content-Encoding": "zstd"}, 415, "zstd is not read"),
        ("forward_backward", b"{}", {"Content-Type": "text/plain"}, 415, "x-protobuf"),
        ("create_session", b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
        ("create_session", b"{", {"Content-Type": "application/json"}, 400, "is not JSON"),
        ("create_session", b"[1]", {"Content-Type": "application/json"}, 400, "not a JSON object"),
        ("optim_step", b"{}", {"Content-Type": "application/json"}, 400, "model_id: Field requi"),
        ("create_custom_loss", b"", {}, 400, "losses of your own run beside you"),
        ("telemetry", b" " * (LONGEST_BODY + 1), {"Content-Type": "application/json"}, 413, "at m"),
    ):  # fmt: skip
        answer = served.post(path, body, **headers)
        assert (answer.status_code, answer.json()["category"]) == (status, "user"), path
        assert told in answer.json()["error"]
    for path, body, told in (
        ("get_info", {"model_id": "a:train:0"}, "there is no session a; this server may have been"),
        ("get_info", {"model_id": f"{model.model_id}7"}, "there is no model"),
        ("asample", {"sampling_session_id": "a:sample:0", "seq_id": 0, "prompt": {"chunks": []},
                     "sampling_params": {}}, "there is no session a"),
        ("nothing", {}, "there is no POST /api/v1/nothing here"),
    ):  # fmt: skip
        answer = served.post(path, body)
        assert answer.status_code == 404 and told in answer.json()["error"]
    asked = {"request_id": f"{model.model_id}:request:99", "allow_metadata_only": True}
    assert served.post("retrieve_future", asked).status_code == 410


def test_a_newer_sdk_that_asks_for_nothing_new_is_served(served: Served, model):
    asked = {"model_id": model.model_id, "new": None, "newer": False, "newest": []}
    assert served.post("get_info", asked).status_code == 200
    answer = served.post("get_info", {**asked, "new": 5})
    assert "new=5 is not served here: it is not known; leave it out" in answer.json()["error"]
    assert served.post("client/config", {"sdk_version": "9", "os": "x"}).status_code == 200


UNKNOWN = b"\x9a\x06\x01x"  # field 99, a text


@pytest.mark.parametrize("where", ["ForwardBackwardRequest", "Datum", "Tensor"])
def test_a_newer_sdk_that_asks_for_something_new_in_protobuf(served: Served, service, where):
    model = service.create_lora_training_client(BASE, rank=8).result()
    asked = tinker_public_pb2.ForwardBackwardRequest(
        model_id=model.model_id, seq_id=1, loss_fn="cross_entropy"
    )
    one = asked.data.add()
    one.model_input.add().encoded_text.tokens = np.int32([1, 2]).tobytes()
    targets = one.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.int64([2, 3]).tobytes(), tinker_public_pb2.DTYPE_INT64
    message = {"ForwardBackwardRequest": asked, "Datum": one, "Tensor": targets}[where]
    message.MergeFromString(UNKNOWN)
    proto = {"Content-Type": "application/x-protobuf"}
    told = served.post("forward_backward", asked.SerializeToString(), **proto).json()
    reply = served.post("retrieve_future", {"request_id": told["request_id"]}).json()
    assert reply["category"] == "user"
    assert f"field 99 of {where} is not known here: leave out" in reply["error"]
