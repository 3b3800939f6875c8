"""What lasts, and what does not: answers that are lost, servers that restart, clients that go."""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from pretended_backend import BASE, PretendedBackend
from served import client, datum, serving, until

from lora_moe_rl.service import app, samplers
from lora_moe_rl.service.sessions import SILENT_S, UNNAMED_KEPT

pytestmark = [
    pytest.mark.seconds,  # imports tinker, and waits for servers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ONE = np.float32([1, 1])


class Lossy:
    """Counts how often each path is asked. Of each the first answer is lost, if `loses`: what the
    app has done stays done."""

    def __init__(self, app: Any, loses: bool = True):
        self.app, self.loses, self.asked = app, loses, Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        self.asked[scope["path"]] += 1
        lost = self.loses and self.asked[scope["path"]] == 1

        async def passed_on(message: Any) -> None:
            if lost and message["type"] == "http.response.start":
                message = {**message, "status": 502}
            await send(message)

        await self.app(scope, receive, passed_on)


@contextmanager
def losing(
    root: Path, loses: bool = True
) -> Iterator[tuple[tinker.ServiceClient, PretendedBackend, Counter]]:
    """And how often each path was asked."""
    backend, between = PretendedBackend(), []
    around = lambda app: between.append(Lossy(app, loses)) or between[0]  # noqa: E731
    with serving(root, backend, around) as served, client(served) as service:
        yield service, backend, between[0].asked


def test_answers_that_are_lost_repeat_nothing(tmp_path):
    with losing(tmp_path) as (service, backend, asked):
        model = service.create_lora_training_client(BASE, rank=8).result()
        passed = model.forward_backward([datum([1, 2], weights=ONE)], "cross_entropy")
        stepped = model.optim_step(tinker.AdamParams(learning_rate=0.5))
        saved = model.save_state("a")
        assert len(passed.result().loss_fn_outputs) == 1
        assert stepped.result().metrics == {"grad_norm": 2.0}
        assert saved.result().path.endswith("/a")
    names = Counter(call[0] for call in backend.calls)
    assert [names[name] for name in ("create", "forward", "step", "save")] == [1] * 4
    paths = ("create_model", "forward_backward", "optim_step", "save_weights", "retrieve_future")
    assert all(asked[f"/api/v1/{path}"] > 1 for path in paths)


def test_answers_about_samplers_and_checkpoints_that_are_lost_repeat_nothing(tmp_path):
    with serving(tmp_path) as served, client(served) as service:
        model = service.create_lora_training_client(BASE, rank=8).result()
        state = model.save_state("state").result().path
    with losing(tmp_path) as (service, backend, asked):
        model = service.create_training_client_from_state(state).result()
        sampler = model.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=2)
        told = sampler.sample(tinker.ModelInput.from_ints([5]), 1, params).result()
        assert told.sequences[0].tokens == [6, 7]
        named = model.save_weights_for_sampler("b").result().path
        service.create_sampling_client(model_path=named).result()
    names = Counter(call[0] for call in backend.calls)
    assert [names[name] for name in ("load", "sample", "save", "publish_saved")] == [1] * 4
    paths = ("load_weights", "save_weights_for_sampler", "asample", "create_sampling_session")
    assert all(asked[f"/api/v1/{path}"] > 1 for path in paths)


def test_a_long_wait_is_several_short_ones(tmp_path, caplog):
    """Of which the client's user is told nothing."""
    with serving(tmp_path, poll_s=0.05) as served, client(served) as service:
        model = service.create_lora_training_client(BASE, rank=8).result()
        hold = served.backend.hold = asyncio.Event()
        passed = model.forward([datum([1, 2])], "cross_entropy")
        with pytest.raises(concurrent.futures.TimeoutError):
            passed.result(timeout=0.5)
        served.call(hold.set)
        assert len(passed.result().loss_fn_outputs) == 1
    assert "try_again" not in caplog.text


def test_checkpoints_outlive_the_server(tmp_path):
    with serving(tmp_path) as served, client(served) as service:
        made = service.create_lora_training_client(BASE, rank=8, user_metadata={"renderer": "r"})
        model = made.result()
        model.forward_backward([datum([1, 2], weights=ONE)], "cross_entropy").result()
        model.optim_step(tinker.AdamParams(learning_rate=0.5)).result()
        state = model.save_state("s", ttl_seconds=3600, user_metadata={"loop": "3"}).result().path
        named = model.save_weights_for_sampler("n").result().path
    with serving(tmp_path) as served, client(served) as service:
        rest = service.create_rest_client()
        run = rest.get_training_run_by_tinker_path(state).result()
        assert (run.training_run_id, run.base_model) == (model.model_id, BASE)
        assert (run.lora_rank, run.user_metadata) == (8, {"renderer": "r"})
        assert (run.last_checkpoint.tinker_path, run.last_sampler_checkpoint.tinker_path) == (
            state, named
        )  # fmt: skip
        listed = rest.list_checkpoints(model.model_id).result().checkpoints
        assert [one.tinker_path for one in listed] == [named, state]
        one = listed[1]
        assert (one.checkpoint_id, one.checkpoint_type) == ("weights/s", "training")
        assert one.size_bytes == (tmp_path / model.model_id / "weights/s/model.json").stat().st_size
        assert one.user_metadata == {"loop": "3"}
        left = one.expires_at - datetime.now(UTC)
        assert timedelta(minutes=55) < left <= timedelta(hours=1)
        info = rest.get_weights_info_by_tinker_path(named).result()
        assert (info.base_model, info.lora_rank, info.train_unembed) == (BASE, 8, False)
        page = rest.list_user_checkpoints(limit=1, offset=1).result()
        assert [one.tinker_path for one in page.checkpoints] == [state]
        assert (page.cursor.offset, page.cursor.limit, page.cursor.total_count) == (1, 1, 2)
        runs = rest.list_training_runs().result()
        assert [one.training_run_id for one in runs.training_runs] == [model.model_id]
        again = service.create_training_client_from_state_with_optimizer(state).result()
        assert served.backend.weights[again.model_id] == 1.0
        sampler = service.create_sampling_client(model_path=named).result()
        assert served.backend.samplers[sampler._sampling_session_id] == 1.0
        rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
        assert rest.list_checkpoints(model.model_id).result().checkpoints[1].expires_at is None
        rest.delete_checkpoint_from_tinker_path(named).result()
        assert not (tmp_path / model.model_id / "sampler_weights/n").exists()
        with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
            rest.delete_checkpoint(model.model_id, "sampler_weights/n").result()
        assert len(rest.list_checkpoints(model.model_id).result().checkpoints) == 1


def test_a_checkpoint_that_is_being_loaded_is_not_deleted(tmp_path, monkeypatch):
    with serving(tmp_path) as served, client(served) as service:
        model = service.create_lora_training_client(BASE, rank=8).result()
        state = model.save_state("s").result().path
        named = model.save_weights_for_sampler("n").result().path
        rest, hold = service.create_rest_client(), asyncio.Event()
        for method, path, make in (
            ("load", state, lambda: service.create_training_client_from_state(state)),
            ("load", state, lambda: model.load_state(state)),
            ("publish_saved", named, lambda: service.create_sampling_client(model_path=named)),
        ):
            waiting, does = asyncio.Event(), getattr(served.backend, method)

            async def late(*asked, waiting=waiting, does=does):
                waiting.set()
                await hold.wait()
                return await does(*asked)

            monkeypatch.setattr(served.backend, method, late)
            made = make()
            until(waiting.is_set)
            with pytest.raises(tinker.BadRequestError, match="is being loaded: delete it when"):
                rest.delete_checkpoint_from_tinker_path(path).result()
            served.call(hold.set)
            made.result()
            served.call(hold.clear)
            monkeypatch.setattr(served.backend, method, does)
        for path in (state, named):
            rest.delete_checkpoint_from_tinker_path(path).result()
        assert not served.service.folders.all()


def test_a_sampler_that_takes_long_is_waited_for_by_what_is_asked_of_it(tmp_path, monkeypatch):
    """Clients give up an answer after a minute, and the ranks may be busy for longer."""
    monkeypatch.setattr(samplers, "READY_S", 0.05)
    with serving(tmp_path) as served, client(served) as service:
        named = trained_path(service)
        hold, publish = asyncio.Event(), served.backend.publish_saved

        async def late(*asked):
            await hold.wait()
            await publish(*asked)

        monkeypatch.setattr(served.backend, "publish_saved", late)
        sampler = service.create_sampling_client(model_path=named).result(10)
        prompt, params = tinker.ModelInput.from_ints([5]), tinker.SamplingParams(max_tokens=1)
        asked = sampler.sample(prompt, 1, params)
        until(lambda: bool(served.service.requests.waiting))
        assert not served.backend.named("sample")
        served.call(hold.set)
        assert asked.result().sequences[0].tokens == [6]


def trained_path(service: tinker.ServiceClient) -> str:
    model = service.create_lora_training_client(BASE, rank=8).result()
    return model.save_weights_for_sampler("n").result().path


def test_an_exported_adapter_is_downloaded(tmp_path):
    """As tinker-cookbook does it: without the key."""
    with serving(tmp_path) as served, client(served) as service:
        model = service.create_lora_training_client(BASE, rank=8).result()
        model.forward_backward([datum([1, 2], weights=ONE)], "cross_entropy").result()
        model.optim_step(tinker.AdamParams(learning_rate=0.5)).result()
        path = model.save_weights_external("peft").result().path
        told = service.create_rest_client().get_external_weights_urls(path).result()
        left = told.expires - datetime.now(UTC)
        assert timedelta(minutes=55) < left <= timedelta(hours=1)
        assert [*told.urls] == ["adapter_model.json", "more/of it.txt"]
        assert [httpx.get(url).text for url in told.urls.values()] == ["1.0", "more"]
        (url, other) = told.urls.values()
        (until,) = re.findall(r"/downloads/(\d+)/", url)
        later = url.replace(until, str(int(until) + 1))
        for wrong in (
            later,
            url.replace("adapter_model", "other"),
            url.replace("/peft/", "/p/"),
            url.replace("adapter_model.json", "..%2F..%2Frun.json"),
            url.replace(re.findall(r"/([0-9a-f]{64})/", url)[0], "0" * 64),
        ):
            assert httpx.get(wrong).status_code == 403, wrong
        clock = served.service.folders.clock
        served.service.folders.clock = lambda: clock() + 3601
        assert "this URL has ended" in httpx.get(url).json()["error"]
        served.service.folders.clock = clock
        service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
        assert "there is no checkpoint" in httpx.get(other).json()["error"]
        state = model.save_state("state").result().path
        answer = served.get(f"training_runs/{model.model_id}/checkpoints/weights/state/archive")
        assert answer.status_code == 400 and "not sent as archives" in answer.json()["error"]
        urls = f"training_runs/{model.model_id}/checkpoints/weights/state/external_weights_urls"
        assert f"{state} is not of external_weights" in served.get(urls).json()["error"]


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (lambda it: it.sessions.alive.clear(), "this server may have been started anew"),
        (
            lambda it: [it.sessions.end(one, "it was") for one in [*it.sessions.alive.values()]],
            "has ended: it was",
        ),
    ],
    ids=["started anew", "ended"],
)
def test_whoever_waits_for_what_is_gone_is_told_why(tmp_path, ends, told):
    with serving(tmp_path, poll_s=0.05) as served, client(served) as service:
        model = service.create_lora_training_client(BASE, rank=8).result()
        hold = served.backend.hold = asyncio.Event()
        passed = model.forward([datum([1, 2])], "cross_entropy")
        until(lambda: bool(served.backend.named("forward")))
        sessions = dict(served.service.sessions.alive)
        served.call(lambda: (served.service.requests.known.clear(), ends(served.service)))
        with pytest.raises(ValueError, match=told):
            passed.result(timeout=30)
        served.call(hold.set)
        served.call(served.service.sessions.alive.update, sessions)


def test_a_disk_that_is_away_ends_no_watch(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "SWEEP_S", 0.01)
    with serving(tmp_path) as served, client(served) as service:
        broken = tmp_path / "other" / "run.json"
        broken.mkdir(parents=True)
        model = service.create_lora_training_client(BASE, rank=8).result()
        (session,) = served.service.sessions.alive.values()
        session.heard -= SILENT_S + 5
        until(lambda: bool(served.backend.named("forget")))
        assert served.backend.named("forget") == [(model.model_id,)]


def test_a_session_that_is_silent_ends(tmp_path):
    with serving(tmp_path) as served, client(served) as service:
        model = service.create_lora_training_client(BASE, rank=8).result()
        (session,) = served.service.sessions.alive.values()
        session.heard -= SILENT_S - 5
        served.call(served.service.sessions.sweep)
        assert served.service.sessions.alive
        session.heard -= 10
        served.call(served.service.sessions.sweep)
        until(lambda: bool(served.backend.named("forget")))
        assert served.backend.named("forget") == [(model.model_id,)]
        with pytest.raises(tinker.APIStatusError, match="nothing was heard of it for 3600") as gone:
            model.optim_step(tinker.AdamParams()).result()
        assert gone.value.status_code == 410


def test_a_sample_that_nobody_waits_for_is_given_up(tmp_path):
    with losing(tmp_path, loses=False) as (service, backend, asked):
        sampler = service.create_sampling_client(base_model=BASE).result()
        endless = tinker.SamplingParams()
        sample = sampler.sample(tinker.ModelInput.from_ints([1]), 1, endless)
        until(lambda: asked["/api/v1/retrieve_future"] > 0)  # the client knows whom to give up
        sample.future().cancel()
        until(lambda: backend.given_up == 1)
        sampler.sample(tinker.ModelInput.from_ints([1]), 1, endless)
        until(lambda: len(backend.named("sample")) == 2)
    assert backend.given_up == 2  # its session has ended


def test_of_states_without_a_name_the_one_that_is_not_asked_for_goes(tmp_path):
    prompt, params = tinker.ModelInput.from_ints([5]), tinker.SamplingParams(max_tokens=1)
    with serving(tmp_path) as served, client(served) as service:
        model = service.create_lora_training_client(BASE, rank=8).result()
        base = service.create_sampling_client(base_model=BASE).result()
        made = []
        for _ in range(UNNAMED_KEPT + 2):
            made.append(model.save_weights_and_get_sampling_client().result())
            made[0].sample(prompt, 1, params).result()
        gone = [(one._sampling_session_id,) for one in made[1:3]]
        until(lambda: len(served.backend.named("forget_sampler")) == 2)
        assert served.backend.named("forget_sampler") == gone
        for one in (base, made[0], *made[3:]):
            one.sample(prompt, 1, params).result()
        with pytest.raises(tinker.NotFoundError, match="without a name 8 are kept"):
            made[1].sample(prompt, 1, params).result()
