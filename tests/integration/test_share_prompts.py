"""Prompts that are computed once for several samples, on real Megatron-core ranks: logprobs, the
loss and its gradients are those of every sample with a prompt of its own, under every layout."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_families
from cli_run import trained
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.adapters.spec import VALUE_HEAD
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.packing import unpack
from lora_moe_rl.router_replay.table import RouteTable

GROUP, GROUPS = 5, 4
ALONE = 7  # a sample whose prompt took other routes than its group's
RELATIVE = 1e-5
LAYOUTS = {
    "one": {},
    "tp2": {"world_size": 2, "tp": 2},
    "cp2ep2": {"world_size": 2, "cp": 2, "ep": 2},
    "ep2": {"world_size": 2, "ep": 2, "recompute": "full"},
    "pp2vpp2": {"world_size": 2, "pp": 2, "vpp": 2},
}


def make_config(folder, algorithm="grpo", **trainer) -> RunConfig:
    """Micro-batches that no whole group of long samples fits into."""
    return RunConfig.model_validate({
        "model": {"path": str(folder)},
        "adapter": {"rank": 4, "expert_rank": 2},
        "trainer": {"lr": 1e-3, "micro_batch_tokens": 60, **trainer},
        "algorithm": {"name": algorithm, "prompts_per_step": GROUPS},
        "replay": {"audit_samples": GROUP * GROUPS},
    })  # fmt: skip


def grouped(spec, once: bool):
    """Samples whose prompts, and the routes of those, are their group's first one's; but for ALONE,
    which has the prompt and routes of its own. `once`: each prompt is fed once."""
    batch, table = random_batch(spec, samples=GROUP * GROUPS, lengths=(12, 17))
    ids, starts = table.ids.copy(), table.offsets
    first = np.arange(GROUP * GROUPS) // GROUP * GROUP
    rng = np.random.default_rng(3)
    batch.groups, batch.alike = (
        first // GROUP,
        np.where(np.arange(len(first)) == ALONE, ALONE, first),
    )
    of_group = rng.integers(2, 10, GROUPS)
    for sample, leader in enumerate(first):
        length = int(of_group[leader // GROUP])
        batch.prompt_lengths[sample] = length
        batch.token_ids[sample][:length] = batch.token_ids[leader][:length]
        if sample != ALONE:
            rows = starts[sample], starts[leader]
            ids[rows[0] : rows[0] + length] = ids[rows[1] : rows[1] + length]
        rest = len(batch.token_ids[sample]) - length
        batch.logprobs[sample] = rng.normal(-5, 1, rest).astype(np.float32)
        batch.versions[sample] = np.zeros(rest, np.int32)
        batch.weights[sample] = rng.uniform(0.5, 1, rest).astype(np.float32)
        batch.masks[sample] = np.ones(rest, bool)
        batch.advantages[sample] = np.full(rest, rng.normal(), np.float32)
    batch.rewards = rng.normal(0, 1, len(first))
    if not once:
        batch.alike = None
    rows = np.split(ids, starts[1:-1])
    shape = spec.shape
    table = RouteTable.build(
        rows, np.diff(starts), shape.moe_layers, shape.num_experts, shape.top_k
    )
    return batch, table


def computed(worker, spec, once: bool):
    """Loss, norm and gradients; logprobs of this rank's samples, and how many tokens it feeds; and
    the metrics and experts' loads of an audited update."""
    from megatron.core import parallel_state as ps

    engine = worker.engine
    worker.set_adapter(random_adapter(spec))
    batch, table = grouped(spec, once)
    found = worker.gradients(batch, table)
    size, rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
    routes, logprobs = engine.routes(batch, [table]), {}
    with engine.watched_replay(batch, routes):
        works = engine.my_work(batch, np.arange(len(batch)), routes, size, rank)
        engine.forward(works, "old", 0.7)
    for work in works if engine.is_last_stage else ():
        logprobs |= unpack(work.data, work.known["old"].numpy())
    fed = sum(len(work.data.fed) for work in works)
    updated = worker.update(batch, table)
    return found, fed, logprobs, (updated.metrics, updated.expert_loads)


def gathered(folder, once: bool, **trainer):
    config = make_config(folder, **trainer)
    spec = spec_of(folder, config)
    ranks = run_ranks(config, folder, computed, once)
    gradients = assemble(spec.tensor_shapes, [s for (_, _, shards), *_ in ranks for s in shards])
    logprobs = {sample: value for _, _, some, _ in ranks for sample, value in some.items()}
    (loss, norm, _), _, _, metrics = ranks[0]
    return loss, norm, gradients, sum(fed for _, fed, *_ in ranks), metrics, logprobs


def far(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference of any tensor, of the largest element of any."""
    scale = max(np.abs(value).max() for value in other.values())
    return max(np.abs(one[name] - other[name]).max() for name in other) / scale


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_a_prompt_that_is_computed_once_is_as_one_of_each_sample(family, tmp_path):
    changes = {"num_hidden_layers": 4}
    if family == "qwen3_next":
        changes["layer_types"] = ["linear_attention", "full_attention"] * 2
    tiny_families.save(family, tmp_path, **changes)
    loss, norm, gradients, fed, (metrics, loads), logprobs = gathered(tmp_path, once=False)
    some = {"deepseek_v3": ("one", "tp2"), "qwen3_next": ("one", "tp2", "cp2ep2")}
    names = some.get(family, tuple(LAYOUTS))
    for name in names:
        ours = gathered(tmp_path, once=True, **LAYOUTS[name])
        assert ours[0] == pytest.approx(loss, rel=RELATIVE), name
        assert ours[1] == pytest.approx(norm, rel=RELATIVE), name
        assert far(ours[2], gradients) < RELATIVE, name
        mine, of_experts = ours[4]
        assert mine["replay/audited"] >= metrics["replay/audited"] > 0, name
        assert mine["mismatch/kl"] == pytest.approx(metrics["mismatch/kl"], rel=RELATIVE)
        np.testing.assert_array_equal(of_experts, loads, err_msg=name)
        assert ours[5].keys() == logprobs.keys() and len(logprobs) == GROUP * GROUPS
        assert far(ours[5], logprobs) < RELATIVE, name
        if name == "one":  # every other sample's prompt, but for those that begin a micro-batch
            assert ours[3] < 0.85 * fed


def values(worker, spec, once: bool):
    head = np.random.default_rng(5).normal(0, 0.2, (1, spec.shape.hidden_size))
    worker.set_adapter(random_adapter(spec))
    critic = random_adapter(spec, seed=2) | {VALUE_HEAD: head.astype(np.float32)}
    worker.engine.critic.adapters.load(critic)
    loss, found, _ = worker.critic_gradients(*grouped(spec, once))
    return loss, found


def test_a_critic_values_every_sample_all_the_same(tmp_path):
    tiny_families.save("qwen3_moe", tmp_path, num_hidden_layers=2)
    config = make_config(tmp_path, "ppo")
    ((loss, plain),) = run_ranks(config, tmp_path, values, False)
    ((again, once),) = run_ranks(config, tmp_path, values, True)
    assert again == pytest.approx(loss, rel=RELATIVE) and len(plain) == GROUP * GROUPS
    for one, other in zip(once, plain, strict=True):
        np.testing.assert_allclose(one, other, atol=RELATIVE)


@pytest.mark.slow
def test_a_run_says_how_much_it_did_not_compute_again(tmp_path):
    """With real engines: samples and rewards of the steps are those of a run that computes each."""
    found = {}
    for share in ("auto", "off"):
        records = trained(
            tmp_path / share,
            "recipes/tiny_arithmetic.py",
            "trainer.steps=2",
            f"trainer.share_prompts={share}",
        )
        found[share] = [record["reward/mean"] for record in records]
        assert len(records) == 2
        for one in records:
            assert one["mismatch/kl"] < 1e-9 and one["replay/coverage"] == 1
            shared = one["trainer/prompts_shared"]
            assert 0.2 < shared < 0.8 if share == "auto" else shared == 0
    assert found["auto"] == found["off"]
