"""The real vLLM engine in a Ray actor against Hugging Face's float32 forward, for both shapes."""

import numpy as np
import pytest
import ray
from engine_fixtures import EngineUnderTest, hf_name, reference, shards
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.shards import Shard
from lora_moe_rl.errors import AdapterError, RefitError

pytestmark = pytest.mark.slow
EXACT = 1e-5  # logprobs, float32


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(16, 250, length).tolist() for length in lengths]


def our_error(call, *args):
    """The error that the actor raised, not Ray's wrapper of it."""
    with pytest.raises(ray.exceptions.RayTaskError) as info:
        call(*args)
    return info.value.cause


def assert_scores_equal(engine: EngineUnderTest, model, sequences, scores, table) -> None:
    for i, (token_ids, ours) in enumerate(zip(sequences, scores, strict=True)):
        logprobs, routes = reference(model, engine.spec, token_ids)
        np.testing.assert_allclose(ours, logprobs, atol=EXACT, rtol=0)
        rows = slice(table.offsets[i], table.offsets[i + 1])
        np.testing.assert_array_equal(np.sort(table.ids[rows], axis=-1), routes)
    assert table.coverage == 1.0


def test_samples_are_those_of_the_merged_weights(engine):
    tensors = engine.random_adapter(seed=1)
    version = engine.new_version(tensors)
    prompts = random_prompts(1, [3, 7, 20, 1])
    samples, table = engine.generate(prompts, 5, version)

    assert [s.group for s in samples] == [g for g in range(4) for _ in range(5)]
    assert table.num_samples == 20 and table.layers == engine.spec.shape.moe_layers
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    stops = {*engine.config.rollout.stop_token_ids, engine.model.config.eos_token_id}
    with engine.merged(tensors) as model:
        for i, sample in enumerate(samples):
            assert sample.prompt_ids.tolist() == prompts[sample.group]
            assert (sample.versions == version).all()
            assert len(sample.versions) == len(sample.logprobs) == len(sample.response_ids)
            ended = sample.response_ids[-1] in stops
            assert ended == (sample.finish_reason == "stop")
            assert ended or len(sample.response_ids) == 24
            assert not stops & set(sample.response_ids[:-1].tolist())

            logprobs, routes = reference(model, engine.spec, sample.token_ids.tolist())
            theirs = logprobs[len(sample.prompt_ids) - 1 :]
            np.testing.assert_allclose(sample.logprobs, theirs, atol=EXACT, rtol=0)
            rows = slice(table.offsets[i], table.offsets[i + 1])
            np.testing.assert_array_equal(np.sort(table.ids[rows], axis=-1), routes)


@pytest.mark.parametrize(
    "form",
    [
        {
            "rank": 6, "alpha": 12, "expert_layout": "shared_outer",
            "rank_pattern": {"k*_proj": 3, "*.up": 2, "*.down": 7, "layers.2.*": 8},
            "alpha_pattern": {"experts.up": 3},
        },
        {"rank": 4, "alpha": 8, "rslora": True, "init": "olora", "rank_pattern": {"*.gate": 3}},
    ],
    ids=["shared_outer", "olora"],
)  # fmt: skip
def test_every_form_of_adapter_is_the_merged_weights(engine, form):
    """Ranks differ within what vLLM fuses; OLoRA's halves nearly cancel."""
    with engine.of_form(**form) as other:
        tensors = other.random_adapter(seed=31)
        for name, whole in tensors.items():
            axis = -2 if name.endswith("A") else -1
            trained, frozen = np.array_split(np.moveaxis(whole, axis, 0), 2)
            if other.spec.by_name[name[:-2]].frozen_rank:
                frozen[...] = 0.3 * frozen + (trained if axis == -2 else -trained)
        version = other.new_version(tensors)
        sequences = random_prompts(31, [30, 12])
        scores, table = other.score(sequences, version)
        base, _ = other.score(sequences, None)
        with other.merged(tensors) as model:
            assert_scores_equal(other, model, sequences, scores, table)
        assert all(np.abs(s - b).max() > 1e-2 for s, b in zip(scores, base, strict=True))


def test_samples_depend_on_the_seed_alone(engine):
    version = engine.new_version(engine.random_adapter(seed=12))
    prompts = random_prompts(12, [12, 30, 5, 9, 40])

    def texts(seed: int, groups: list[int]) -> list[list[int]]:
        call = engine.actor.generate.options(num_returns=2)
        part = [prompts[group] for group in groups]
        samples, _ = ray.get(call.remote(part, groups, 4, version, seed))
        return [sample.response_ids.tolist() for sample in samples]

    together = texts(0, [0, 1, 2, 3, 4])
    assert texts(0, [0, 1]) + texts(0, [2, 3, 4]) == together
    assert texts(1, [0, 1, 2, 3, 4]) != together
    assert len({tuple(ids) for ids in together}) == 20  # no two samples share random numbers


def test_dense_sites_equal_the_peft_library(engine):
    """Real PEFT on the attention sites; hand-merged weights cover the experts."""
    modules = tuple(
        name for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj")
        if any(site.module == name for site in engine.spec)
    )  # fmt: skip
    sites = [site for site in engine.spec if site.module in modules]
    tensors = engine.random_adapter(seed=2, modules=modules)
    version = engine.new_version(tensors)
    sequences = random_prompts(2, [30, 12])
    scores, table = engine.score(sequences, version)

    paths = {site: hf_name(engine.spec.shape, site) for site in sites}
    names = {path.rpartition(".")[2] for path in paths.values()}
    adapter = engine.config.adapter
    peft_config = LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, target_modules=sorted(names), lora_dropout=0.0
    )
    with engine.merged(None) as model:
        peft_model = get_peft_model(model, peft_config)
        state = {
            f"base_model.model.{path}.lora_{m}.weight": _torch(tensors[f"{site.name}.{m}"])
            for site, path in paths.items()
            for m in "AB"
        }
        loaded = set_peft_model_state_dict(peft_model, state)
        assert not loaded.unexpected_keys
        try:
            assert_scores_equal(engine, peft_model.get_base_model(), sequences, scores, table)
        finally:
            peft_model.unload()


def test_the_base_and_two_versions_answer_at_the_same_time(engine):
    """One batch mixes slots and tokens without an adapter; each gets its own function."""
    adapters = [None, engine.random_adapter(3), engine.random_adapter(4)]
    versions = [None, engine.new_version(adapters[1]), engine.new_version(adapters[2])]
    sequences = random_prompts(3, [40, 9, 17])
    call = engine.actor.score.options(num_returns=2)
    answers = [call.remote(sequences, version) for version in versions]
    for tensors, refs in zip(adapters, answers, strict=True):
        with engine.merged(tensors) as model:
            assert_scores_equal(engine, model, sequences, *ray.get(refs))


def test_a_new_version_does_not_reuse_the_old_ones_prefix_cache(engine):
    """The prompt is longer than a cache block: under another version its keys are others."""
    prompt = random_prompts(5, [200])
    for seed in (5, 6):
        tensors = engine.random_adapter(seed)
        version = engine.new_version(tensors)
        for _ in range(2):  # the second time the prefix may come from the cache
            samples, table = engine.generate(prompt, 2, version)
            with engine.merged(tensors) as model:
                for i, sample in enumerate(samples):
                    logprobs, routes = reference(model, engine.spec, sample.token_ids.tolist())
                    np.testing.assert_allclose(sample.logprobs, logprobs[199:], atol=EXACT, rtol=0)
                    rows = slice(table.offsets[i], table.offsets[i + 1])
                    np.testing.assert_array_equal(np.sort(table.ids[rows], axis=-1), routes)


def test_shards_of_several_ranks_make_one_version(engine):
    tensors = engine.random_adapter(seed=7)
    halves: tuple[list[Shard], list[Shard]] = ([], [])
    for name, value in tensors.items():
        cut = value.shape[0] // 2  # experts, rank or output rows
        rest = (0,) * (value.ndim - 1)
        halves[0].append(Shard(name, (0, *rest), value[:cut]))
        halves[1].append(Shard(name, (cut, *rest), value[cut:]))
    version = next(engine.versions)
    receipt = engine.publish(version, *halves)
    assert receipt.version == version and receipt.tensors == len(tensors)
    again = engine.publish(next(engine.versions), shards(tensors))
    assert again.checksum == receipt.checksum and again.bytes == receipt.bytes


def test_a_bad_version_is_refused_and_the_old_one_still_serves(engine):
    tensors = engine.random_adapter(seed=8)
    version = engine.new_version(tensors)
    sequences = random_prompts(8, [25])
    before, _ = engine.score(sequences, version)
    good = shards(engine.random_adapter(seed=9))
    nan = shards({name: value.copy() for name, value in engine.random_adapter(seed=9).items()})
    nan[3].data.flat[5] = np.nan

    bad = next(engine.versions)
    for shard_list, message in [
        (nan, f"{nan[3].name} holds NaN"),
        (good[1:], f"{good[0].name}: {good[0].data.size} elements missing"),
        ([*good, good[4]], "sent more than once"),
    ]:
        error = our_error(engine.publish, bad, shard_list)
        assert isinstance(error, AdapterError) and message in str(error)
    for old in (version, version - 1):
        error = our_error(engine.publish, old, good)
        assert isinstance(error, RefitError) and "versions only grow" in str(error)

    state = ray.get(engine.actor.state.remote())
    assert version in state["versions"] and bad not in state["versions"]
    np.testing.assert_array_equal(engine.score(sequences, version)[0][0], before[0])
    assert engine.publish(bad, good).version == bad  # the number is not spent


def test_a_version_that_overflows_its_dtype_is_refused_by_the_worker(engine):
    tensors = engine.random_adapter(seed=10)
    site = engine.spec.sites[0]
    tensors[f"{site.name}.B"] = np.full(site.shape_B, 3e38, dtype=np.float32)  # times scale 2: inf
    versions = ray.get(engine.actor.state.remote())["versions"]
    error = our_error(engine.publish, next(engine.versions), shards(tensors))
    assert isinstance(error, RefitError) and "infinite" in str(error)
    assert ray.get(engine.actor.state.remote())["versions"] == versions


def test_a_version_that_was_never_published_is_an_error(engine):
    for call in (
        lambda: engine.generate([[20, 21]], 1, 10_000),
        lambda: engine.score([[20, 21]], 10_000),
    ):
        error = our_error(call)
        assert isinstance(error, RefitError) and "asked for adapter version 10000" in str(error)


def test_the_oldest_version_makes_room_unless_it_is_busy(engine):
    tensors = shards(engine.random_adapter(seed=11))
    first, second, third = (next(engine.versions) for _ in range(3))
    engine.publish(first, tensors)
    call = engine.actor.generate.options(num_returns=2)
    busy = call.remote(random_prompts(11, [40] * 32), list(range(32)), 8, first, 0)
    engine.publish(second, tensors)
    error = our_error(engine.publish, third, tensors)
    assert isinstance(error, RefitError)
    assert f"version {first} still serves" in str(error) and "refit.slots=2" in str(error)
    ray.get(busy)

    engine.publish(third, tensors)
    assert ray.get(engine.actor.state.remote())["versions"] == [second, third]
    assert "asked for adapter version" in str(our_error(engine.generate, [[20]], 1, first))


def _torch(array: np.ndarray):
    import torch

    return torch.from_numpy(array)


def test_exported_directory_is_the_same_function_in_vllms_own_loader(engine, tmp_path):
    """Ranks and scales of experts differ here, and vLLM ignores rank_pattern and alpha_pattern."""
    tensors = engine.random_adapter(seed=21)
    sequences = [[40, 41, 42, 43, 44, 45, 46], [90, 17, 33, 65, 71]]
    peft.write(tmp_path / "adapter", engine.spec, tensors, engine.config)
    scores, _ = engine.score_directory(sequences, tmp_path / "adapter")
    base, _ = engine.score(sequences, None)
    with engine.merged(tensors) as model:
        for ids, got, plain in zip(sequences, scores, base, strict=True):
            expected, _ = reference(model, engine.spec, ids)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
            assert np.abs(got - plain).max() > 1e-2
