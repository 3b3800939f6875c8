"""The real vLLM engine in a Ray actor against Hugging Face's float32 forward, for both shapes."""

import asyncio
import dataclasses

import numpy as np
import pytest
import ray
import torch
from engine_fixtures import EngineUnderTest, hf_name, reference
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from refit_ranks import make_layouts
from written_policy import check_bound

from lora_moe_rl.adapters import peft
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.environments.parts.conversation import Conversation
from lora_moe_rl.errors import RefitError, ReplayError
from lora_moe_rl.ports import Manner
from lora_moe_rl.router_replay.travel import join
from lora_moe_rl.tiny.tokenizer import make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.whole]
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

    assert len(samples) == table.num_samples == 20 and table.layers == engine.spec.shape.moe_layers
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    stops = {*engine.config.rollout.stop_token_ids, engine.model.config.eos_token_id}
    with engine.merged(tensors) as model:
        for i, sample in enumerate(samples):
            assert sample.prompt_ids.tolist() == prompts[i // 5]
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

    def texts(seed: int, first: int, stop: int) -> list[list[int]]:
        samples, _ = engine.generate(prompts[first:stop], 4, version, seed + first)
        return [sample.response_ids.tolist() for sample in samples]

    together = texts(0, 0, 5)
    assert texts(0, 0, 2) + texts(0, 2, 5) == together
    assert texts(7, 0, 5) != together
    assert len({tuple(ids) for ids in together}) == 20  # no two samples share random numbers


def test_samples_of_an_evaluation_are_sampled_in_its_own_manner(engine):
    """The likeliest token, by top_k=1, by a top_p that one token has alone, and at temperature 0;
    longer than samples of training, and shorter."""
    tensors = engine.random_adapter(seed=13)
    version, prompts = engine.new_version(tensors), random_prompts(13, [9, 5, 14, 3, 20])

    def written(prompt: list[int], manner: Manner) -> list[int]:
        asked = engine.actor.sample.remote(prompt, 1, version, 7, None, manner)
        ((sample,), _) = ray.get(asked)
        return sample.response_ids.tolist()

    lengths = []
    for prompt in prompts:
        found = written(prompt, Manner(top_k=1, max_tokens=40))
        assert written(prompt, Manner(top_p=1e-6, max_tokens=40)) == found
        assert written(prompt, Manner(temperature=0.0, max_tokens=3)) == found[:3]
        with engine.merged(tensors) as model, torch.no_grad():
            likeliest = model(torch.tensor([prompt + found])).logits[0].argmax(-1).tolist()
        assert found == likeliest[len(prompt) - 1 : -1]
        lengths.append(len(found))
    assert max(lengths) > engine.config.rollout.max_response_tokens


class OneVersion:
    """The engine as an environment sees it, at one version. Keeps how many rows came of each
    turn."""

    def __init__(self, engine: EngineUnderTest, version: int):
        self.engine, self.version, self.rows = engine, version, []

    async def sample(self, token_ids, n, turn):
        seed = 100 * turn.conversation + turn.number
        answer = await self.engine.actor.sample.remote(token_ids, n, self.version, seed, turn)
        self.rows.append((len(token_ids), len(answer[0][0].response_ids), answer[1].num_rows))
        return answer

    def join(self, samples):
        return join(samples)


def test_several_turns_are_one_uninterrupted_request(engine):
    """Longer than a cache block, with tokens of others between the turns; many at once."""
    version = engine.new_version(engine.random_adapter(seed=16))
    policy, prompts = OneVersion(engine, version), random_prompts(16, [40, 3, 120, 17])
    told = random_prompts(17, [9, 1, 30])

    async def talk(place: int) -> Conversation:
        one = Conversation(policy, place, prompts[place], 256, 120)
        for tokens in [None, *told]:
            if tokens is not None:
                one.tell("tool", tokens, "")
            await one.ask(12)
        return one

    async def together():
        made = await asyncio.gather(*(talk(place) for place in range(len(prompts))))
        return [one.samples() for one in made]

    made = asyncio.run(together())
    samples = [sample for (sample,), _ in made]
    table = join([turns for _, (turns,) in made]).table()
    scores, expected = engine.score([sample.token_ids.tolist() for sample in samples], version)
    for sample, score in zip(samples, scores, strict=True):
        after = score[len(sample.prompt_ids) - 1 :]
        assert sample.mask.sum() == sample.num_sampled < len(sample.response_ids)
        np.testing.assert_allclose(
            sample.logprobs[sample.mask], after[sample.mask], atol=EXACT, rtol=0
        )
    assert table.coverage == 1.0 and table.layers == expected.layers
    np.testing.assert_array_equal(table.offsets, expected.offsets)
    np.testing.assert_array_equal(np.sort(table.ids, axis=-1), np.sort(expected.ids, axis=-1))
    # Only new rows travel: each of them once.
    assert len(policy.rows) == 4 * len(prompts)
    assert sum(rows for *_, rows in policy.rows) == len(table.ids)
    assert sum(length + said - 1 for length, said, _ in policy.rows) > 2 * len(table.ids)


def test_routes_are_bound_to_the_tokens_that_vllm_was_fed(engine):
    from lora_moe_rl.router_replay.routes import Routes

    version = engine.new_version(engine.random_adapter(seed=18))
    sequences = random_prompts(18, [20, 20])
    for samples, sent in ray.get(engine.sample_refs(sequences, 3, version)):
        check_bound(samples, sent)
    _, table = engine.score(sequences, version)
    for order in (1, -1):
        batch = TrainBatch.from_sequences(sequences[::order])
        routes = Routes([table], [table.layers])
        routes.check_samples(batch.lengths())
        if order == 1:
            routes.fetch([0, 1], batch.fed)
            continue
        with pytest.raises(ReplayError, match="sample 0: its routes are those of other tokens"):
            routes.fetch([0, 1], batch.fed)


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


@pytest.mark.parametrize(
    "trainer",
    [
        {"world_size": 2, "tp": 2, "etp": 2},
        {"world_size": 2, "pp": 2},
        {"world_size": 4, "tp": 2, "ep": 4},
    ],
    ids=["tp2etp2", "pp2", "tp2ep4"],
)
def test_parts_of_several_ranks_make_one_version(engine, trainer):
    tensors = engine.random_adapter(seed=7)
    sequences = random_prompts(7, [30])
    expected, _ = engine.score(sequences, engine.new_version(tensors))
    version = next(engine.versions)
    receipt = engine.publish(version, tensors, TrainerConfig(**trainer))
    assert receipt.version == version and receipt.tensors >= len(tensors)
    scores, _ = engine.score(sequences, version)
    np.testing.assert_array_equal(scores[0], expected[0])


def test_a_bad_version_is_refused_and_the_old_one_still_serves(engine):
    version = engine.new_version(engine.random_adapter(seed=8))
    sequences = random_prompts(8, [25])
    before, _ = engine.score(sequences, version)
    two = TrainerConfig(world_size=2, pp=2)
    bad = next(engine.versions)
    senders, sent = engine.send(bad, engine.random_adapter(seed=9), two)
    entry = senders[1].layout.entries[4]
    senders[1].buffer[entry.offset + 2] ^= 1  # in transit
    for parts, message in [
        (sent, f"checksum of {entry.tensor} from trainer rank 1 differs"),
        (sent[:1], "parts of trainer ranks [1] are missing"),
        ([sent[0], dataclasses.replace(sent[1], path="/proc/self/none")], "cannot read an adapter"),
    ]:
        error = our_error(engine.publish_parts, bad, parts)
        assert isinstance(error, RefitError) and message in str(error)
    senders[1].buffer[entry.offset + 2] ^= 1
    for old in (version, version - 1):
        error = our_error(engine.publish_parts, old, sent)
        assert isinstance(error, RefitError) and "versions only grow" in str(error)

    state = ray.get(engine.actor.state.remote())
    assert version in state["versions"] and bad not in state["versions"]
    np.testing.assert_array_equal(engine.score(sequences, version)[0][0], before[0])
    assert engine.publish_parts(bad, sent).version == bad  # the number is not spent


@pytest.mark.parametrize("what", ["rank", "experts"])
def test_an_adapter_of_another_rank_or_expert_count_does_not_fit_the_slots(engine, what):
    with engine.of_form(rank=8) as other:
        (layout,) = make_layouts(other.spec)
    kind, dim = {"rank": ("o_proj.A", -2), "experts": ("experts.down.B", 0)}[what]
    changed, name, now = [], "", ()
    for entry in layout.entries:
        if not name and entry.tensor.endswith(kind):
            name = entry.tensor
            shape = list(entry.box.shape)
            shape[dim] = 9 if what == "rank" else shape[dim] + 1
            now = tuple(shape)
            entry = dataclasses.replace(entry, box=dataclasses.replace(entry.box, shape=now))
        changed.append(entry)
    layouts = [dataclasses.replace(layout, entries=tuple(changed))]
    error = our_error(lambda: ray.get(engine.actor.prepare_refit.remote(layouts)))
    assert isinstance(error, RefitError)
    assert f"{name}: {now} arrives for a slot of" in str(error)
    engine.prepared.clear()


def test_a_slot_that_differs_from_what_was_sent_is_named_and_taken_back(engine):
    old = engine.new_version(engine.random_adapter(seed=13))
    new = next(engine.versions)
    senders, sent = engine.send(new, engine.random_adapter(seed=14))
    engine.publish_parts(new, sent)
    assert ray.get(engine.actor.differing.remote(new, *sent)) == []
    entry = senders[0].layout.entries[7]
    senders[0].buffer[entry.offset + 3] ^= 1
    assert ray.get(engine.actor.differing.remote(new, *sent)) == [entry.tensor]
    ray.get(engine.actor.drop.remote(new))
    assert ray.get(engine.actor.state.remote())["versions"][-1] == old
    engine.score([[20, 21, 22]], old)
    assert "asked for adapter version" in str(our_error(engine.generate, [[20]], 1, new))


def test_the_base_writes_as_it_is_and_changes_no_sample_of_the_policy(engine):
    version = engine.new_version(engine.random_adapter(seed=16))
    prompts = random_prompts(16, [5, 9, 14])
    alone, _ = engine.generate(prompts, 4, version)
    asked = [engine.actor.write.remote(prompt, 12, 0.0, 1) for prompt in prompts]
    beside, _ = engine.generate(prompts, 4, version)
    for one, other in zip(alone, beside, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
    tokenizer, end = make_tokenizer(), engine.model.config.eos_token_id
    for prompt, (text, why, count) in zip(prompts, ray.get(asked), strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and ids[-1] != end:  # Hugging Face's likeliest tokens
            with torch.no_grad():
                ids.append(int(engine.model(torch.tensor([ids])).logits[0, -1].argmax()))
        written = ids[len(prompt) :]
        assert text == tokenizer.decode(written, skip_special_tokens=True)
        assert (why, count) == ("stop" if written[-1] == end else "length", len(written))


def test_a_version_that_was_never_published_is_an_error(engine):
    for call in (
        lambda: engine.generate([[20, 21]], 1, 10_000),
        lambda: engine.score([[20, 21]], 10_000),
    ):
        error = our_error(call)
        assert isinstance(error, RefitError) and "asked for adapter version 10000" in str(error)


def test_a_version_waits_for_the_last_request_of_the_oldest(engine):
    """Two slots: while one version is busy the next is served beside it, the one after waits."""
    tensors = engine.random_adapter(seed=11)
    first, second, third = (next(engine.versions) for _ in range(3))
    engine.publish(first, tensors)
    sent = engine.send(second, tensors)[1], engine.send(third, tensors)[1]
    busy = engine.sample_refs(random_prompts(11, [40] * 32), 8, first)
    ray.get(engine.actor.state.remote())  # asked after them: they run
    engine.publish_parts(second, sent[0])
    ray.get(engine.actor.use_refit.remote(timeout_s=0.0))
    error = our_error(engine.publish_parts, third, sent[1])
    assert isinstance(error, RefitError)
    assert f"version {first} still serves" in str(error) and "refit.slots=2" in str(error)

    ray.get(engine.actor.use_refit.remote(timeout_s=60.0))
    receipt = engine.publish_parts(third, sent[1])
    assert receipt.seconds["slot"] > 0.01  # it waited
    samples = [sample for found, _ in ray.get(busy) for sample in found]
    assert len(samples) == 32 * 8 and all((s.versions == first).all() for s in samples)
    assert ray.get(engine.actor.state.remote())["versions"] == [second, third]
    assert "asked for adapter version" in str(our_error(engine.generate, [[20]], 1, first))


def test_one_slot_is_switched_when_its_requests_have_ended(engine):
    tensors = engine.random_adapter(seed=15)
    ray.get(engine.actor.use_refit.remote(slots=1))
    try:
        first = engine.new_version(tensors)
        second = engine.new_version(tensors)
        assert ray.get(engine.actor.state.remote())["versions"] == [second] and first < second
    finally:
        ray.get(engine.actor.use_refit.remote(slots=2))


def _torch(array: np.ndarray):
    return torch.from_numpy(array)


def test_exported_directory_is_the_same_function_in_vllms_own_loader(engine, tmp_path):
    """Ranks and scales of experts differ here, and vLLM ignores rank_pattern and alpha_pattern."""
    tensors = engine.random_adapter(seed=21)
    sequences = [[40, 41, 42, 43, 44, 45, 46], [90, 17, 33, 65, 71]]
    peft.write(tmp_path / "plain", engine.spec, tensors, engine.config)
    peft.write(tmp_path / "padded", *peft.for_vllm(engine.spec, tensors), engine.config)
    base, _ = engine.score(sequences, None)
    for name in ("plain", "padded"):
        scores, _ = engine.score_directory(sequences, tmp_path / name)
        with engine.merged(tensors) as model:
            for ids, got, plain in zip(sequences, scores, base, strict=True):
                expected, _ = reference(model, engine.spec, ids)
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
                assert np.abs(got - plain).max() > 1e-2
