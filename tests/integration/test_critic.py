"""The critic of PPO on real Megatron-core ranks: its values and gradients against Hugging Face with
PEFT's adapters, under every layout; what it leaves alone; its checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import linear_loss
import numpy as np
import peft_lora
import pytest
import tiny_families
import torch
from checkpoints import write_checkpoint
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.adapters.spec import VALUE_HEAD
from lora_moe_rl.cli import main
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import STREAMS
from lora_moe_rl.errors import ActorFailed
from lora_moe_rl.files.checkpoint import newest_valid
from lora_moe_rl.files.trainer_state import CRITIC, file_name
from lora_moe_rl.models.fingerprint import base_record

RELATIVE = 1e-5
CLIP = 0.05
LAYOUTS = {
    "qwen3_moe": {"world_size": 4, "tp": 2, "ep": 2},
    "deepseek_v3": {"world_size": 4, "cp": 2, "pp": 2},
}


def make_config(folder, algorithm=None, **trainer) -> RunConfig:
    """Small micro-batches, so that every rank has several of uneven size."""
    algorithm = {"name": "ppo", "value_clip": CLIP, "lambda_policy": 0.9, **(algorithm or {})}
    trainer = {"lr": 1e-2, "micro_batch_tokens": 40, "steps": 100, **trainer}
    return RunConfig(
        model=str(folder), adapter=peft_lora.ADAPTER, trainer=trainer, algorithm=algorithm
    )


def critic_of(spec) -> dict[str, np.ndarray]:
    """Canonical tensors that are not the policy's, with a value head."""
    head = np.random.default_rng(5).normal(0, 0.2, (1, spec.shape.hidden_size))
    return random_adapter(spec, seed=2) | {VALUE_HEAD: head.astype(np.float32)}


def rewarded(spec):
    batch, table = random_batch(spec)
    rewards = np.random.default_rng(6).normal(0, 1, len(batch.token_ids))
    rewards[2] = np.nan
    batch.rewards = rewards
    batch.weights[2] = 0 * batch.weights[2]
    return batch, table


def prepared(worker, spec):
    worker.set_adapter(random_adapter(spec))
    worker.engine.critic.adapters.load(critic_of(spec))
    return rewarded(spec)


def gradients(worker, spec):
    batch, table = prepared(worker, spec)
    return worker.critic_gradients(batch, table)


def found_by(config, folder, spec):
    """(loss, values, whole gradients)."""
    everyone = run_ranks(config, folder, gradients)
    shapes = spec.tensor_shapes | {VALUE_HEAD: (1, spec.shape.hidden_size)}
    whole = assemble(shapes, [shard for _, _, shards in everyone for shard in shards])
    loss, values, _ = everyone[0]
    assert all(one[0] == loss for one in everyone)
    return loss, values, whole


def by_hugging_face(model, spec, config):
    """The same by PEFT's adapters on Hugging Face's model, and the loss in plain torch."""
    theirs = peft_lora.wrap(model, spec)
    tensors = critic_of(spec)
    peft_lora.load(theirs, spec, tensors)
    head = torch.from_numpy(tensors[VALUE_HEAD]).requires_grad_()
    batch, _ = rewarded(spec)
    values = []
    for ids, weights in zip(batch.token_ids, batch.weights, strict=True):
        fed = torch.from_numpy(ids[:-1].astype(np.int64))[None]
        hidden = theirs.base_model.model.model(fed).last_hidden_state[0]
        values.append((hidden @ head.T)[-len(weights) :, 0])
    total, count = torch.zeros(()), 0
    for value, reward in zip(values, batch.rewards, strict=True):
        if np.isnan(reward):
            continue
        returns, ahead = torch.zeros(len(value)), 0.0
        old = value.detach()
        for t in reversed(range(len(value))):  # generalized advantages by their definition
            last = t == len(value) - 1
            delta = (reward if last else float(old[t + 1])) - float(old[t])
            ahead = delta + config.algorithm.lambda_policy * ahead
            returns[t] = ahead + float(old[t])
        # Values are those of before the update: the clip holds nothing yet.
        total = total + 0.5 * (value - returns).square().sum()
        count += len(value)
    (total / count).backward()
    found = {n: g.numpy() for n, g in peft_lora.views(theirs, spec, lambda p: p.grad).items()}
    return (total / count).item(), values, found | {VALUE_HEAD: head.grad.numpy()}


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_families.save(request.param, folder)
    config = make_config(folder)
    spec = spec_of(folder, config)
    return model, folder, config, spec, found_by(config, folder, spec)


def test_values_and_gradients_equal_peft_on_hugging_face(family):
    model, _, config, spec, (loss, values, ours) = family
    expected_loss, expected_values, expected = by_hugging_face(model, spec, config)
    assert loss == pytest.approx(expected_loss, rel=RELATIVE)
    for ours_here, theirs in zip(values, expected_values, strict=True):
        np.testing.assert_allclose(ours_here, theirs.detach().numpy(), atol=1e-5)
    assert max(np.abs(value).max() for value in values) > 0.1, "the values are all near zero"
    difference, name = linear_loss.worst(ours, expected)
    assert difference < RELATIVE, name


def test_no_layout_changes_them(family, request):
    _, folder, _, spec, (loss, values, gradient) = family
    config = make_config(folder, **LAYOUTS[request.node.callspec.params["family"]])
    here_loss, here_values, here = found_by(config, folder, spec)
    assert here_loss == pytest.approx(loss, rel=RELATIVE)
    for one, other in zip(here_values, values, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    difference, name = linear_loss.worst(here, gradient)
    assert difference < RELATIVE, name


def standing(worker, spec):
    """Loss and gradient of the critic with samples that stand several times or not at all, of the
    same batch in which they really do, and of all once."""
    batch, _ = prepared(worker, spec)
    copies = np.array([0, 2, 1, 3, 0, 1, 1, 0, 1, 2, 0])
    weighed = dataclasses.replace(batch, copies=copies)
    chosen = np.repeat(np.arange(len(copies)), copies)
    # Returns are made of all samples before any is drawn: the same for a sample wherever it is.
    really = dataclasses.replace(
        batch,
        **{name: [getattr(batch, name)[i] for i in chosen] for name in STREAMS},
        **{name: getattr(batch, name)[chosen] for name in (*OF_SAMPLES, "rewards")},
    )
    return [worker.critic_gradients(one) for one in (weighed, really, batch)]


OF_SAMPLES = ("prompt_lengths", "mini_batch", "groups", "copies")


def test_a_sample_that_stands_several_times_weighs_as_one_that_is_there_so_often(tmp_path):
    tiny_families.save("qwen3_moe", tmp_path)
    config = make_config(tmp_path, world_size=2)
    found = run_ranks(config, tmp_path, standing)
    spec = spec_of(tmp_path, config)
    shapes = spec.tensor_shapes | {VALUE_HEAD: (1, spec.shape.hidden_size)}
    (weighed, really, once) = (
        (found[0][i][0], assemble(shapes, [s for rank in found for s in rank[i][2]]))
        for i in range(3)
    )
    assert weighed[0] == pytest.approx(really[0], rel=RELATIVE)
    assert abs(weighed[0] - once[0]) > 1e-3 * once[0]
    difference, name = linear_loss.worst(weighed[1], really[1])
    assert difference < RELATIVE, name


def all_numbers(adapters) -> np.ndarray:
    return np.concatenate([shard.data.ravel() for shard in adapters.export()])


def steps(worker, spec):
    """What each of some updates on one batch left behind, the first two in the warm-up."""
    batch, table = prepared(worker, spec)
    engine = worker.engine
    sequences = [ids.tolist() for ids in batch.token_ids]
    with_critic = worker.score(sequences, table, True)
    found = []
    for step in range(1, 25):
        both = engine.adapters, engine.critic.adapters
        before = [all_numbers(one) for one in both]
        result = worker.update(dataclasses.replace(batch, step=step), table)
        after = [all_numbers(one) for one in both]
        moved = [bool((a != b).any()) for a, b in zip(before, after, strict=True)]
        found.append((result, moved))
    return with_critic, found


def score_alone(worker, spec):
    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec)
    return worker.score([ids.tolist() for ids in batch.token_ids], table, True)


def test_it_learns_alone_at_first_and_leaves_the_policy_as_it_is(tmp_path):
    tiny_families.save("qwen3_moe", tmp_path)
    warm = make_config(tmp_path, {"critic_warmup": 2, "value_clip": None})
    ((scores, found),) = run_ranks(warm, tmp_path, steps)
    results = [result for result, _ in found]
    assert [moved for _, moved in found[:3]] == [[False, True], [False, True], [True, True]]
    assert [result.version for result in results[:4]] == [0, 0, 1, 2]
    assert all(result.skipped == 0 for result in results)
    assert [result.metrics["optim/lr"] > 0 for result in results[:3]] == [False, False, True]
    explained = [result.metrics["critic/explained_variance"] for result in results]
    assert explained[0] < 0.2 and explained[-1] > 0.7, explained
    assert results[-1].metrics["critic/loss"] < 0.3 * results[0].metrics["critic/loss"]
    # What the policy gives is what it gives without a critic on the model.
    (plain,) = run_ranks(_without_critic(tmp_path), tmp_path, score_alone)
    for one, other in zip(scores, plain, strict=True):
        np.testing.assert_array_equal(one, other)


def _without_critic(folder) -> RunConfig:
    return RunConfig(
        model=str(folder),
        adapter=peft_lora.ADAPTER,
        trainer={"lr": 1e-2, "micro_batch_tokens": 40, "steps": 100},
    )


def test_advantages_are_those_of_the_values(tmp_path):
    """Of a critic that says 0, GAE's with lambda 1 are the reward, whitened over the tokens."""
    tiny_families.save("qwen3_moe", tmp_path)
    config = make_config(tmp_path, {"lambda_policy": 1.0})
    (result,) = run_ranks(config, tmp_path, first_update)
    spec = spec_of(tmp_path, config)
    batch, _ = rewarded(spec)
    lengths = [len(w) for w in batch.weights]
    every = np.repeat(batch.rewards, lengths)
    given = every[~np.isnan(every)]
    for i, reward in enumerate(batch.rewards):
        if not np.isnan(reward):
            wanted = (reward - given.mean()) / given.std(ddof=1)
            np.testing.assert_allclose(result.advantages[i], wanted, rtol=1e-5)


def first_update(worker, spec):
    worker.set_adapter(random_adapter(spec))
    return worker.update(*rewarded(spec))


def trained_then_saved(worker, spec, folder):
    batch, table = prepared(worker, spec)
    for step in (1, 2):
        worker.update(dataclasses.replace(batch, step=step), table)
    saved = worker.save(Path(folder))
    return saved, worker.update(dataclasses.replace(batch, step=3), table).metrics


def loaded_then_trained(worker, spec, folder, meta):
    worker.load(Path(folder), meta)
    batch, table = rewarded(spec)
    return worker.update(dataclasses.replace(batch, step=3), table).metrics


def test_a_checkpoint_holds_the_critic_for_every_layout(tmp_path):
    model, state = tmp_path / "model", tmp_path / "state"
    model.mkdir(), state.mkdir()
    tiny_families.save("qwen3_moe", model)
    ((saved, expected),) = run_ranks(make_config(model), model, trained_then_saved, str(state))
    meta = saved.meta
    assert sorted(path.name for path in state.iterdir()) == [
        "critic_00000.safetensors",
        "trainer_00000.safetensors",
    ]
    (same,) = run_ranks(make_config(model), model, loaded_then_trained, str(state), meta)
    assert same == expected
    config = make_config(model, world_size=2, tp=2)
    for other in run_ranks(config, model, loaded_then_trained, str(state), meta):
        assert other == pytest.approx(expected, rel=1e-4, abs=1e-5)
    (state / "critic_00000.safetensors").unlink()
    with pytest.raises(ActorFailed, match="no state of a critic"):
        run_ranks(make_config(model), model, loaded_then_trained, str(state), meta)


def trained_saved_and_valued(worker, spec, folder):
    saved, _ = trained_then_saved(worker, spec, folder)
    worker.load(Path(folder), saved.meta)
    batch, table = rewarded(spec)
    return saved, worker.critic_gradients(batch, table)[1]


@pytest.mark.parametrize("form", ["2d", "3d"])
def test_an_exported_critic_has_the_same_values_in_peft(tmp_path, form, capsys):
    """Read as TRL's PPO reads a value model: the layer `score` of the backbone's hidden states."""
    import peft  # not in trainer ranks, where a stub stands for Transformer Engine
    import transformers

    model, out = tmp_path / "model", tmp_path / "critic"
    model.mkdir()
    tiny_families.save("qwen3_moe", model)
    config = make_config(model)
    metadata = {"adapter": config.adapter.model_dump(mode="json")}
    metadata |= {"step": 2, "base": base_record(str(model), model)}
    written = {}
    with write_checkpoint(tmp_path / "checkpoints", 2, 2, metadata, written) as folder:
        ((saved, values),) = run_ranks(config, model, trained_saved_and_valued, str(folder))
        assert set(saved.files) == {file_name(0), file_name(0, CRITIC)}
        metadata["trainer"] = saved.meta
        written |= saved.files
    newest_valid(tmp_path / "checkpoints")  # reads all again, and sums it up itself
    words = ["--to", "peft", "--critic", "--form", form, "--out", str(out)]
    assert main(["export", str(tmp_path), *words]) == 0
    assert "AutoModelForSequenceClassification" in capsys.readouterr().out

    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype=torch.float32
    )
    whole = peft.PeftModel.from_pretrained(base, out).base_model.model.eval()
    batch, _ = rewarded(spec_of(model, config))
    worst = 0.0
    for ids, ours in zip(batch.token_ids, values, strict=True):
        with torch.no_grad():
            hidden = whole.model(torch.from_numpy(ids[:-1].astype(np.int64))[None])
            theirs = whole.score(hidden.last_hidden_state)[0, -len(ours) :, 0].numpy()
        worst = max(worst, float(np.abs(theirs - ours).max()))
    assert worst < 1e-5 and max(np.abs(one).max() for one in values) > 0.1
    print(f"{form}: values off by {worst:.1e}")


def with_routes(worker, spec):
    batch, table = prepared(worker, spec)
    _, values, _ = worker.critic_gradients(batch, table)
    return np.concatenate(values), worker.update(batch, table).metrics


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_its_routes_are_its_own_or_the_rollouts(tmp_path, recompute):
    tiny_families.save("qwen3_moe", tmp_path)
    found = {}
    for routes in ("free", "rollout"):
        config = make_config(tmp_path, {"critic_routes": routes}, recompute=recompute)
        ((found[routes], metrics),) = run_ranks(config, tmp_path, with_routes)
        # The policy alone is asked whether it would have chosen otherwise.
        assert 0 < metrics["replay/disagreement"] <= 1
    assert np.abs(found["free"] - found["rollout"]).max() > 1e-3
