"""Samples that go on under a newer version, with real engines and the real trainer: every token is
of the version it carries, on that version's routes; and what joins and splits them cost."""

from __future__ import annotations

import dataclasses
import time

import host_cuda
import numpy as np
import pytest
import ray
from engine_fixtures import EngineUnderTest, EngineWithDisk, save_random_model, start_engine
from ranks import random_adapter, random_batch, run_ranks

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import NOT_SAMPLED, Sample
from lora_moe_rl.router_replay.table import RouteTable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
EXACT = 1e-5  # logprobs, float32
LONG, SAMPLES, MAX_LENGTH = (40, 2, 120) if host_cuda.here() else (160, 8, 400)
# Tokens of a block of vLLM's cache: what is shared is whole blocks.
PAGE = 16 if host_cuda.here() else 128


class Continuing(EngineWithDisk):
    """Records the routes of continued samples for either way of training them."""

    def use_split(self, split: bool) -> None:
        self.in_flight.split = split

    def use_one_name(self) -> None:
        """A planted fault: vLLM's prefix cache goes by the adapter's name."""
        named = self._lora_request

        def one_name(version: int):
            request = named(version)
            request.lora_name = "one for all"
            return request

        self._lora_request = one_name


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return save_random_model("qwen3_moe", folder), folder


@pytest.fixture(scope="module")
def engine(ray_session, model):
    rollout = {"max_response_tokens": LONG}
    with start_engine(*model, Continuing, MAX_LENGTH, rollout=rollout) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(ray_session, model):
    """Serves one version at a time, and is only asked when no other thing goes on."""
    # On GPUs vLLM records routes with it alone.
    rollout = {"max_response_tokens": LONG, "prefix_caching": host_cuda.here()}
    with start_engine(
        *model, Continuing, MAX_LENGTH, rollout=rollout, refit={"slots": 1}
    ) as running:
        yield running


def prompts_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(16, 250, length).tolist()


def continued(engine: EngineUnderTest, split: bool) -> tuple[list[Sample], RouteTable, list[dict]]:
    """Samples in flight while another version is published, those that were continued, and their
    routes; and the adapters of both versions."""
    ray.get(engine.actor.use_split.remote(split))
    for attempt in range(6):
        adapters = [engine.random_adapter(seed=attempt), engine.random_adapter(seed=attempt + 50)]
        old = engine.new_version(adapters[0])
        new = next(engine.versions)
        _, parts = engine.send(new, adapters[1])
        asked = engine.actor.sample.remote(prompts_of(attempt, 9), SAMPLES, old, 7 + attempt)
        time.sleep(0.4 * (attempt + 1))
        engine.publish_parts(new, parts)
        ray.get(engine.actor.move_on.remote(new))
        samples, sent = ray.get(asked)
        both = [i for i, sample in enumerate(samples) if len(set(sample.versions.tolist())) == 2]
        if both:
            assert {*samples[both[0]].versions.tolist()} == {old, new}
            table = sent.table()
            rows = [slice(*table.offsets[i : i + 2]) for i in both]
            kept = RouteTable.build(
                [table.ids[one] for one in rows],
                [one.stop - one.start for one in rows],
                table.layers,
                table.num_experts,
                table.ids.shape[2],
            )
            return [samples[i] for i in both], kept, adapters
    pytest.fail("no request was in flight when a version was published, six times")


def ends_of(sample: Sample) -> tuple[int, int]:
    """Tokens of the sample when it was continued, and at its end."""
    first = len(sample.prompt_ids)
    return first + int((sample.versions == sample.versions[0]).sum()), len(sample.token_ids)


def scored_apart(undisturbed: EngineUnderTest, samples, adapters):
    """By version: logprobs of all tokens after the first, and routes, of an engine that serves no
    other version."""
    sequences = [sample.token_ids.tolist() for sample in samples]
    return [undisturbed.score(sequences, undisturbed.new_version(one)) for one in adapters]


def rows_of(table: RouteTable, number: int) -> np.ndarray:
    """Sorted routes of one sample."""
    return np.sort(table.ids[slice(*table.offsets[number : number + 2])], axis=-1)


def trainer_scores(worker, spec, batches, adapters):
    """`[version][batch]`: logprobs of the response tokens, with the routes that come with each."""
    found = []
    for tensors in adapters:
        worker.set_adapter(tensors)
        found.append([worker.engine.score(*one) for one in batches])
    return found


def worst(samples, by_version) -> list[float]:
    """The largest distance of engine and trainer, of the tokens of the older version and of the
    newer, each by the trainer at that version."""
    found = [0.0, 0.0]
    for number, sample in enumerate(samples):
        for which, version in enumerate(np.unique(sample.versions)):
            mine = sample.versions == version
            apart = np.abs(sample.logprobs - by_version[which][number])[mine]
            found[which] = max(found[which], float(apart.max()))
    return found


def test_a_sample_that_goes_on_under_a_newer_version_is_exact_when_it_is_split(
    engine, undisturbed, model
):
    samples, table, adapters = continued(engine, split=True)
    apart = scored_apart(undisturbed, samples, adapters)
    joined_rows, taken_wrong = [], []
    for number, sample in enumerate(samples):
        cut, end = ends_of(sample)
        assert sample.splits == (cut,) and len(rows_of(table, number)) == cut - 1 + end - 1
        older, newer = np.split(rows_of(table, number), [cut - 1])
        (old_scores, old_routes), (new_scores, new_routes) = apart
        first = len(sample.prompt_ids)
        theirs = np.concatenate(
            [old_scores[number][first - 1 : cut - 1], new_scores[number][cut - 1 :]]
        )
        np.testing.assert_allclose(sample.logprobs, theirs, atol=EXACT, rtol=0)
        np.testing.assert_array_equal(older, rows_of(old_routes, number)[: cut - 1])
        np.testing.assert_array_equal(newer, rows_of(new_routes, number))
        raw = table.ids[slice(*table.offsets[number : number + 2])]
        joined_rows.append(np.concatenate([raw[: cut - 1], raw[cut - 1 :][cut - 1 :]]))
        taken_wrong.append(np.concatenate([raw[: cut - 1], raw[: cut - 1], raw[2 * cut - 2 :]]))
    whole = [dataclasses.replace(sample, splits=()) for sample in samples]
    batches = [
        (batch_of(samples), table),
        (batch_of(whole), table_of(joined_rows, table)),
        (batch_of(samples), table_of(taken_wrong, table)),
    ]
    (scores,) = run_ranks(engine.config, model[1], trainer_scores, batches, adapters)
    split, join, wrong = (worst(samples, [one[i] for one in scores]) for i in range(3))
    print(
        f"continued {len(samples)}: split {split}, join {join}, routes of another version {wrong}"
    )
    assert max(split) <= EXACT
    assert join[0] <= EXACT < 1e-4 < join[1]  # the prefix of the newer is on the older's routes
    assert wrong[0] <= EXACT < 1e-4 < wrong[1]


def batch_of(samples) -> TrainBatch:
    zeros = [np.zeros(len(sample.mask), np.float32) for sample in samples]
    return TrainBatch.from_samples(samples, zeros, [one + 1 for one in zeros], step=0)


def table_of(rows, like: RouteTable) -> RouteTable:
    lengths = [len(one) for one in rows]
    return RouteTable.build(rows, lengths, like.layers, like.num_experts, like.ids.shape[2])


def test_a_joined_sample_has_for_each_token_the_routes_of_its_own_version(engine, undisturbed):
    samples, table, adapters = continued(engine, split=False)
    (_, old_routes), (_, new_routes) = scored_apart(undisturbed, samples, adapters)
    for number, sample in enumerate(samples):
        cut, end = ends_of(sample)
        found = rows_of(table, number)
        assert sample.splits == () and len(found) == end - 1
        np.testing.assert_array_equal(found[: cut - 1], rows_of(old_routes, number)[: cut - 1])
        np.testing.assert_array_equal(found[cut - 1 :], rows_of(new_routes, number)[cut - 1 :])


def test_no_version_sees_keys_and_values_of_another(engine, undisturbed):
    """A long prompt that all versions have in their prefix cache, and samples that are continued
    on it: each version's own samples are those of an engine that has seen nothing before."""
    prompt = prompts_of(3, PAGE + 50)

    def answers(running: EngineUnderTest, version: int):
        (sample,), _ = running.generate([prompt], 1, version, seed=5)
        return sample

    for turn in range(5):
        adapter = engine.random_adapter(seed=100 + turn)
        version = engine.new_version(adapter)
        ray.get(engine.actor.move_on.remote(version))
        first, again = answers(engine, version), answers(engine, version)
        other = answers(undisturbed, undisturbed.new_version(adapter))
        for found in (first, again):
            assert found.response_ids.tolist() == other.response_ids.tolist(), f"version {turn}"
            np.testing.assert_allclose(found.logprobs, other.logprobs, atol=EXACT, rtol=0)


def test_a_cache_that_goes_by_one_name_is_noticed(engine):
    """The fault that the test before this one is there for."""
    prompt = prompts_of(4, PAGE + 50)
    ray.get(engine.actor.use_one_name.remote())
    found = []
    for turn in range(2):
        version = engine.new_version(engine.random_adapter(seed=200 + turn))
        ray.get(engine.actor.move_on.remote(version))
        (sample,), _ = engine.generate([prompt], 1, version, seed=5)
        scores, _ = engine.score([sample.token_ids.tolist()], version)
        apart = np.abs(scores[0][len(prompt) - 1 :] - sample.logprobs).max()
        found.append(float(apart))
    assert found[0] <= EXACT < 1e-4 < found[1]


def whole_and_in_parts(worker, spec):
    """(loss, norm, shards), metrics of an update, of samples as they are and cut anywhere; the
    routes of all parts are the same."""
    batch, table = random_batch(spec)
    draw = np.random.default_rng(2)
    splits, rows = {}, []
    for i, ids in enumerate(batch.token_ids):
        inside = np.arange(int(batch.prompt_lengths[i]) + 1, len(ids))
        count = min(len(inside), int(draw.integers(0, 3)))
        cut = sorted(draw.choice(inside, count, replace=False).tolist())
        splits[i] = tuple(cut)
        own = table.ids[slice(*table.offsets[i : i + 2])]
        rows.append(np.concatenate([own[: stop - 1] for stop in (*cut, len(ids))]))
    assert {len(one) for one in splits.values()} == {0, 1, 2}
    later = [np.where(one == NOT_SAMPLED, one, one + 1) for one in batch.versions]
    parts = dataclasses.replace(batch, splits=splits, versions=later)  # of the second update's
    many = RouteTable.build(
        rows, [len(one) for one in rows], table.layers, table.num_experts, table.ids.shape[2]
    )
    found = []
    for one, routes in ((batch, table), (parts, many)):
        worker.set_adapter(random_adapter(spec))
        loss, norm, shards = worker.gradients(one, routes)
        metrics = worker.update(one, routes).metrics
        found.append((loss, norm, [shard.data for shard in shards], metrics))
    return found


@pytest.mark.parametrize(
    "layout",
    [{}, {"world_size": 2, "ep": 2}, {"world_size": 2, "tp": 2}, {"world_size": 2, "cp": 2}],
)
@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
def test_cut_into_parts_a_step_is_the_same(model, layout, algorithm):
    """Of one version all parts have the same routes: losses, counts and gradients do not change,
    those of a loss by sequence neither; and the audit sees every row."""
    config = RunConfig(
        model=str(model[1]),
        adapter={"rank": 5, "expert_rank": 3},
        trainer={"micro_batch_tokens": 60, **layout},
        replay={"audit": 1, "audit_samples": 10**6},
        algorithm={"name": algorithm, "kl_coef": 0.1, "aggregation": "seq-mean-token-mean"},
    )
    for whole, parts in run_ranks(config, model[1], whole_and_in_parts):
        assert parts[:2] == pytest.approx(whole[:2], rel=1e-5)
        for one, other in zip(whole[2], parts[2], strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
        assert parts[3]["replay/audited"] > whole[3]["replay/audited"]
        left_out = ("replay/audited", "replay/bytes", "optim/lr")
        for name in set(whole[3]) - {*left_out} - {n for n in whole[3] if "disagreement" in n}:
            assert parts[3][name] == pytest.approx(whole[3][name], rel=1e-4, abs=1e-5), name
