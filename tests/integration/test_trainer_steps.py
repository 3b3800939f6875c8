"""One trainer, one step: replay modes, off-policy updates, NaN, missing routes, resume."""

from __future__ import annotations

import dataclasses
import re

import hf
import numpy as np
import pytest
import torch
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import AdapterError, CheckpointError, ReplayError
from lora_moe_rl.files.trainer_state import Done
from lora_moe_rl.models.directory import resolve_model

MODEL = "qwen3_moe"


def make_config(**trainer) -> RunConfig:
    return RunConfig(model=MODEL, trainer={"lr": 1e-3, "micro_batch_tokens": 60, **trainer})


def run(job, *args, **trainer):
    return run_ranks(make_config(**trainer), resolve_model(MODEL), job, *args)


def with_settings(worker, **sections) -> None:
    """Changes settings that the engine reads at each call."""
    data = make_config().model_dump()
    for section, values in sections.items():
        data[section] |= values
    worker.engine.config = RunConfig.model_validate(data)
    worker.engine.algorithm = algorithms.make(worker.engine.config)


def exercise(worker, spec):
    """Every mode on one rank, each from the same adapter."""
    batch, table = random_batch(spec)
    results = {}

    def update(name, the_batch=batch, the_table=table, **sections):
        worker.set_adapter(random_adapter(spec))
        worker.engine.optimizer.restore(Done(0, 0))
        with_settings(worker, **sections)
        results[name] = worker.update(the_batch, *([the_table] if the_table else []))

    update("r3")
    update("r2", the_table=None, replay={"mode": "r2"})
    update("off", the_table=None, replay={"mode": "off"})
    update("kl", algorithm={"kl_coef": 0.1})
    halves = dataclasses.replace(batch, mini_batch=np.arange(len(batch.token_ids)) % 2)
    update("mini_batches", halves, algorithm={"mini_batches": 2, "prompts_per_step": 2})
    update("epochs", algorithm={"epochs": 2})
    own = worker.score([ids.tolist() for ids in batch.token_ids], None, True)
    results["own_logprobs_after"] = own

    valid = table.valid.copy()
    valid[3, 1] = False
    holes = dataclasses.replace(table, valid=valid)
    for missing in ("mask", "route"):
        update(f"missing_{missing}", the_table=holes, replay={"missing": missing})
    with pytest.raises(ReplayError, match="sample 0 has no routes for token 3, layer 1") as raised:
        update("missing_error", the_table=holes)
    results["missing_error"] = str(raised.value)

    few = dataclasses.replace(batch, weights=[0 * one for one in batch.weights])
    before = worker.export()
    version = worker.version()
    results["nothing"] = worker.update(few, table)
    results["unchanged"] = worker.version() == version and all(
        (a.data == b.data).all() for a, b in zip(before, worker.export(), strict=True)
    )
    return results


@pytest.fixture(scope="module")
def results():
    return run(exercise)[0]


def test_r3_replays_every_route_and_counts_its_own_other_choices(results):
    metrics = results["r3"].metrics
    assert metrics["replay/coverage"] == 1.0
    # Random routes, top 2 of 8: the trainer's own choice is another in about three of four.
    assert 0.5 < metrics["replay/disagreement"] < 1.0


def test_r2_replays_its_own_choice_and_equals_off_on_policy(results):
    r2, off = results["r2"].metrics, results["off"].metrics
    assert r2["replay/coverage"] == 1.0 and r2["replay/disagreement"] == 0.0
    assert off["replay/coverage"] == 0.0
    for name in ("loss/policy", "optim/grad_norm", "mismatch/kl"):
        assert r2[name] == pytest.approx(off[name], rel=1e-5, abs=1e-6), name
    # Other routes, another function: r3 with random routes is not r2.
    assert results["r3"].metrics["mismatch/kl"] != pytest.approx(r2["mismatch/kl"], rel=1e-3)


def test_kl_to_the_base_is_positive_and_changes_the_gradient(results):
    kl, plain = results["kl"].metrics, results["r3"].metrics
    assert kl["loss/kl"] > 1e-4 and plain["loss/kl"] == 0
    assert kl["loss/policy"] == pytest.approx(plain["loss/policy"], abs=1e-6)
    assert kl["optim/grad_norm"] != pytest.approx(plain["optim/grad_norm"], rel=1e-4)


def test_off_policy_updates_make_one_version_each_and_a_ratio_that_moves(results):
    first = results["r3"].version
    assert first == 1
    versions = [results[k].version for k in ("r3", "r2", "off", "kl", "mini_batches", "epochs")]
    assert versions == [1, 2, 3, 4, 6, 8]
    assert results["r3"].metrics["loss/ratio"] == pytest.approx(1, abs=1e-6)
    assert abs(results["epochs"].metrics["loss/ratio"] - 1) > 1e-5
    counted = {results[k].metrics["loss/tokens"] for k in ("r3", "mini_batches", "epochs")}
    assert len(counted) == 1  # each token once, however many passes


def test_missing_routes(results):
    everything, masked = results["r3"].metrics, results["missing_mask"].metrics
    routed = results["missing_route"].metrics
    assert masked["loss/tokens"] == everything["loss/tokens"] - 1
    assert routed["loss/tokens"] == everything["loss/tokens"]
    assert masked["replay/coverage"] < 1
    assert re.search(r"replay\.missing=mask", results["missing_error"])


def test_a_step_without_tokens_in_the_loss_changes_nothing(results):
    assert results["nothing"].skipped == 1 and results["nothing"].nonfinite == 0
    assert results["unchanged"]


def at_half_the_temperature(worker, spec, batch):
    """Two passes, with every forward there is: old, reference, with gradient. B is zero, and
    stays so."""
    algorithm = {"epochs": 2, "kl_coef": 0.1}
    with_settings(worker, rollout={"temperature": 0.5}, replay={"mode": "off"}, algorithm=algorithm)
    return worker.update(batch).metrics


def test_every_forward_is_at_the_rollouts_temperature():
    """The rollout's logprobs and the entropy are those of Hugging Face."""
    model_dir = resolve_model(MODEL)
    batch, _ = random_batch(spec_of(model_dir, make_config()))
    model, entropies = hf.load(model_dir), []
    for i, ids in enumerate(batch.token_ids):
        ids = torch.from_numpy(ids).long()
        with torch.no_grad():
            logprobs = (model(ids[None]).logits[0, :-1].float() / 0.5).log_softmax(-1)
        first = batch.prompt_lengths[i]
        batch.logprobs[i] = logprobs.gather(1, ids[1:, None])[first - 1 :, 0].numpy()
        entropies.append(-(logprobs.exp() * logprobs).sum(-1)[first - 1 :])
    (metrics,) = run(at_half_the_temperature, batch, lr=1e-12)
    assert metrics["mismatch/max_abs_logprob_diff"] < 1e-4  # old
    assert metrics["loss/ratio"] == pytest.approx(1, abs=1e-4)  # with gradient
    assert abs(metrics["loss/kl"]) < 1e-7  # reference
    # Of both passes over the same tokens.
    entropy = torch.cat(entropies).mean().item()
    assert metrics["policy/entropy"] == pytest.approx(entropy, rel=1e-4)


def nan_on_one_rank(worker, spec):
    batch, table = random_batch(spec)
    worker.set_adapter(random_adapter(spec))
    before = worker.export()
    advantages = [np.full_like(batch.advantages[0], np.inf), *batch.advantages[1:]]
    skipped = worker.update(dataclasses.replace(batch, advantages=advantages), table)
    same = all((a.data == b.data).all() for a, b in zip(before, worker.export(), strict=True))
    return skipped, same, worker.update(batch, table)


def test_nan_on_one_rank_skips_the_step_on_all(results):
    for skipped, same, after in run(nan_on_one_rank, world_size=2, ep=2):
        assert (skipped.skipped, skipped.nonfinite, skipped.version) == (1, 1, 0)
        assert same
        assert (after.skipped, after.version) == (0, 1)


def train_and_save(worker, spec, directory):
    """Two steps, a checkpoint, two more steps."""
    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec)
    for _ in range(2):
        worker.update(batch, table)
    meta = worker.save(directory).meta
    rest = [worker.update(batch, table).metrics for _ in range(2)]
    return meta, rest, worker.export()


def load_and_train(worker, spec, directory, meta):
    worker.load(directory, meta)
    batch, table = random_batch(spec)
    rest = [worker.update(batch, table).metrics for _ in range(2)]
    return worker.version(), rest, worker.export()


def test_resume_is_bitwise_on_one_layout_and_close_on_another(tmp_path):
    ((meta, expected, shards),) = run(train_and_save, tmp_path)
    steps = {"optimizer_steps": 2, "scheduled_steps": 2, "updates_per_step": 1}
    assert meta == {"version": 2, **steps}
    ((version, got, resumed),) = run(load_and_train, tmp_path, meta)
    assert version == 4
    assert got == expected  # every figure, to the last bit
    for a, b in zip(shards, resumed, strict=True):
        assert a.name == b.name and np.array_equal(a.data, b.data), a.name
    other = run(load_and_train, tmp_path, meta, world_size=2, tp=2)
    for name in ("loss/policy", "optim/grad_norm", "mismatch/kl"):
        assert other[0][1][0][name] == pytest.approx(expected[0][name], rel=1e-5, abs=1e-6), name
    spec = spec_of(resolve_model(MODEL), make_config())
    whole = assemble(spec.tensor_shapes, [s for result in other for s in result[2]])
    reference = assemble(spec.tensor_shapes, shards)
    for name, tensor in whole.items():
        assert np.isclose(tensor, reference[name], rtol=0, atol=1e-5).mean() > 0.999, name


def half_without_a_token(worker, spec):
    """Of two mini-batches the second has no token in the loss."""
    batch, table = random_batch(spec)
    halves = np.arange(len(batch.token_ids)) % 2
    weights = [w * (half == 0) for w, half in zip(batch.weights, halves, strict=True)]
    batch = dataclasses.replace(batch, mini_batch=halves, weights=weights)
    two = {"mini_batches": 2, "prompts_per_step": 2}
    data = worker.engine.config.model_dump()
    worker.engine.config = RunConfig.model_validate(data | {"algorithm": data["algorithm"] | two})
    result = worker.update(batch, table)
    optimizer = worker.engine.optimizer
    return result.version, result.skipped, optimizer.steps, optimizer.scheduled


def test_a_step_of_which_an_update_is_passed_over_is_one_step_all_the_same():
    """Ages in versions are ages in steps, and the learning rate goes on."""
    ((version, skipped, steps, scheduled),) = run(half_without_a_token)
    assert (version, skipped, steps, scheduled) == (2, 1, 1, 2)


def load_with_more_updates(worker, spec, directory, meta):
    worker.load(directory, meta)
    batch, table = random_batch(spec)
    metrics = worker.update(batch, table).metrics
    return metrics["optim/lr"], worker.save(directory / "again").meta


def test_a_schedule_goes_on_at_its_share_of_the_run_whatever_a_step_makes(tmp_path):
    """8 of 16 steps that made 4 updates each are half of 16 that make one."""
    ((meta, _, _),) = run(train_and_save, tmp_path)
    meta |= {"optimizer_steps": 32, "scheduled_steps": 32, "updates_per_step": 4}
    (tmp_path / "again").mkdir()
    falling = {"lr_schedule": "linear", "warmup_steps": 0, "steps": 16}
    ((rate, after),) = run(load_with_more_updates, tmp_path, meta, **falling)
    assert rate == pytest.approx(1e-3 * 8 / 16)
    assert after["optimizer_steps"] == 33 and after["scheduled_steps"] == 9
    assert after["updates_per_step"] == 1


def first_moves(worker, spec, directory, meta):
    """{site: how far its B goes in the first step after the checkpoint, in learning rates}."""
    worker.load(directory, meta)
    before = {shard.name: shard.data.copy() for shard in worker.export()}
    batch, table = random_batch(spec)
    worker.update(batch, table)
    moves = {}
    for shard in worker.export():
        site, _, matrix = shard.name.rpartition(".")
        far = np.abs(shard.data - before[shard.name])
        if matrix == "B":
            moves[site] = float(np.median(far[far > 0])) / 1e-3 if far.any() else 0.0
    return moves


def test_adam_begins_with_adapters_that_are_trained_from_now_on(tmp_path):
    """Its first step is of the learning rate, whatever the gradient. k_proj shares a tensor with
    q_proj and v_proj; o_proj has its own, and the experts were trained all along."""
    usual = {"weight_decay": 0.0, "warmup_steps": 0, "clip_grad": 0.0}
    frozen = {"k_proj": 0.0, "o_proj": 0.0}
    ((meta, _, _),) = run(train_and_save, tmp_path, lr_pattern=frozen, **usual)
    (moves,) = run(first_moves, tmp_path, meta, **usual)
    for module in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert moves[f"layers.1.{module}"] == pytest.approx(1, abs=1e-3), module
    experts = [far for site, far in moves.items() if "experts" in site]
    assert experts and all(far < 0.999 for far in experts)
    (same,) = run(first_moves, tmp_path, meta, lr_pattern=frozen, **usual)
    assert same["layers.1.k_proj"] == same["layers.1.o_proj"] == 0
    assert 0 < same["layers.1.q_proj"] < 0.999  # Adam goes on


def load_incomplete(worker, spec, directory, meta):
    with pytest.raises(CheckpointError, match="elements are in the checkpoint"):
        worker.load(directory, meta)


@pytest.mark.slow
def test_a_missing_rank_file_is_refused(tmp_path):
    metas = run(train_and_save, tmp_path, world_size=2, ep=2)
    (tmp_path / "trainer_00001.safetensors").unlink()
    run(load_incomplete, tmp_path, metas[0][0])


def change_one_copy(worker, spec):
    """What is said of each change to rank 1's copy of B of a row-parallel linear."""
    gradients = worker.engine.adapters.gradients
    parameter = gradients.parameters["row", "B"][0].detach().view(-1)
    parameter.copy_(torch.arange(1.0, len(parameter) + 1))
    gradients.check_copies()
    said = []
    for change in ({3: -4.0}, {3: 9.0, 8: 4.0}, {3: 4.0 + 2**-21}):
        before = parameter.clone()
        if worker.rank == 1:
            for place, value in change.items():
                parameter[place] = value
        try:
            gradients.check_copies()
            said.append("")
        except AdapterError as error:
            said.append(str(error))
        parameter.copy_(before)
    return said


def test_a_sign_a_swap_and_a_last_bit_that_differ_on_one_copy_are_found():
    for said in run(change_one_copy, world_size=2, tp=2):
        assert all("the ranks of tp hold different copies of row.B" in text for text in said), said


def one_far_off(worker, spec):
    """An update with a token of the third sample that the engine thought all but impossible."""
    batch, table = random_batch(spec)
    batch.logprobs[2][1] = -60.0
    worker.set_adapter(random_adapter(spec))
    return worker.update(batch, table).metrics, int(batch.prompt_lengths[2])


def test_every_rank_knows_the_token_where_rollout_and_trainer_are_furthest_apart():
    for metrics, prompt_length in run(one_far_off, world_size=2):
        assert metrics["mismatch/worst_sample"] == 2
        assert metrics["mismatch/worst_token"] == prompt_length + 1
        assert metrics["mismatch/worst_rollout_logprob"] == -60.0
        trainer = metrics["mismatch/worst_trainer_logprob"]
        assert -20 < trainer < 0
        assert metrics["mismatch/max_abs_logprob_diff"] == pytest.approx(trainer + 60, abs=1e-5)
