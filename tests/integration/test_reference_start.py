"""algorithm.reference=start on real Megatron-core ranks: KL and dpo against the adapter that a run
starts from equal Hugging Face's model with PEFT's adapters, the start's and then the policy's."""

from __future__ import annotations

import contextlib

import linear_loss
import numpy as np
import peft_lora
import pytest
import tiny_families
import torch
import torch.nn.functional as F
from quantised import make_pair
from ranks import random_adapter, random_batch, run_ranks, spec_of
from test_offline import BETA, batch_of, losses_of

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import AdapterConfig, RunConfig
from lora_moe_rl.errors import FrozenStartError

RELATIVE = 1e-5
COEF, TEMPERATURE = 0.4, 0.7
LAYOUTS = {
    "dp2": {"world_size": 2},
    "ep2": {"world_size": 2, "ep": 2},
    "tp2 pp2": {"world_size": 4, "tp": 2, "pp": 2},
}
KL = {"name": "grpo", "kl_coef": COEF, "reference": "start"}
DPO = {"name": "dpo", "beta": BETA, "reference": "start"}


def make_config(folder, algorithm, **trainer) -> RunConfig:
    """Small micro-batches, so that every rank has several of uneven size."""
    given = {"replay": {"mode": "off"}, "rollout": {"temperature": TEMPERATURE}}
    return RunConfig(
        model=str(folder),
        adapter=peft_lora.ADAPTER,
        trainer={"micro_batch_tokens": 40, "lr": 1e-2, "steps": 100, **trainer},
        algorithm=algorithm,
        **(given if algorithm["name"] != "dpo" else {}),
    )


def start_of(spec):
    return random_adapter(spec, seed=5)


def policy_of(spec):
    return random_adapter(spec)


def every_algorithm(worker, spec, configs):
    """Of each: (loss, this rank's part of the gradient, metrics of an update, bytes of adapters
    without and with the start)."""
    from lora_moe_rl import algorithms

    found = {}
    for name, config in configs.items():
        worker.set_adapter(policy_of(spec))
        worker.engine.reference = None
        without = worker.memory()["adapter"]
        worker.set_reference(start_of(spec))
        worker.engine.config, worker.engine.algorithm = config, algorithms.make(config)
        worker.engine.version = 1
        batch = batch_of(config) if config.offline else random_batch(spec)[0]
        loss, _, shards = worker.gradients(batch)
        memory = without, worker.memory()["adapter"]
        found[name] = loss, shards, worker.update(batch).metrics, memory
    return found


def found_by(folder, spec, **trainer):
    configs = {one["name"]: make_config(folder, one, **trainer) for one in (KL, DPO)}
    everyone = run_ranks(configs["grpo"], folder, every_algorithm, configs)
    found = {}
    for name in configs:
        shards = [shard for rank in everyone for shard in rank[name][1]]
        whole = assemble(spec.tensor_shapes, shards)
        loss, _, metrics, memory = everyone[0][name]
        found[name] = loss, whole, metrics, memory
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    model = tiny_families.save("qwen3_moe", folder)
    spec = spec_of(folder, make_config(folder, KL))
    theirs = peft_lora.wrap(model, spec)
    return theirs, folder, spec, found_by(folder, spec)


def gradient_of(model, spec, loss: torch.Tensor) -> dict[str, np.ndarray]:
    model.zero_grad()
    loss.backward()
    found = peft_lora.views(model, spec, lambda parameter: parameter.grad)
    return {name: value.numpy().copy() for name, value in found.items()}


def logprobs(model, batch) -> list[torch.Tensor]:
    """By Hugging Face: of each response's tokens, at the rollout's temperature."""
    found = []
    for ids, prompt in zip(batch.token_ids, batch.prompt_lengths, strict=True):
        fed = torch.from_numpy(ids.astype(np.int64))
        logits = model(fed[None, :-1]).logits[0, int(prompt) - 1 :] / TEMPERATURE
        found.append(-F.cross_entropy(logits, fed[int(prompt) :], reduction="none"))
    return found


def test_a_kl_to_the_start_is_that_of_peft_on_hugging_face(tiny):
    """Its loss, its gradient and its metrics: the policy's ratio is 1, and the rest is k3."""
    model, _, spec, found = tiny
    batch, _ = random_batch(spec)
    peft_lora.load(model, spec, start_of(spec))
    with torch.no_grad():
        start = torch.cat(logprobs(model, batch))
    peft_lora.load(model, spec, policy_of(spec))
    policy = torch.cat(logprobs(model, batch))
    advantages = torch.from_numpy(np.concatenate(batch.advantages))
    kl = (start - policy).exp() - 1 - (start - policy)
    loss = (-advantages * (policy - policy.detach()).exp() + COEF * kl).mean()
    expected = gradient_of(model, spec, loss)
    ours, gradient, metrics, _ = found["grpo"]
    assert kl.mean() > 0.01
    assert ours == pytest.approx(loss.item(), rel=RELATIVE)
    assert metrics["loss/kl"] == pytest.approx(kl.mean().item(), rel=RELATIVE)
    assert metrics["reference/kl"] == pytest.approx(kl.mean().item(), rel=RELATIVE)
    difference, tensor = linear_loss.worst(gradient, expected)
    assert difference < RELATIVE, tensor


def test_dpo_against_the_start_is_that_of_peft_on_hugging_face(tiny):
    model, folder, spec, found = tiny
    batch = batch_of(make_config(folder, DPO))
    peft_lora.load(model, spec, start_of(spec))
    with torch.no_grad():
        start = -torch.stack([one.sum() for one in losses_of(model, batch)])
    peft_lora.load(model, spec, policy_of(spec))
    own = -torch.stack([one.sum() for one in losses_of(model, batch)])
    chosen, rejected = BETA * (own - start)[0::2], BETA * (own - start)[1::2]
    loss = -F.logsigmoid(chosen - rejected).mean()
    expected = gradient_of(model, spec, loss)
    _, gradient, metrics, _ = found["dpo"]
    shown = {
        "loss/dpo": loss,
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
    }
    for name, value in shown.items():
        wanted = pytest.approx(value.item(), rel=RELATIVE, abs=RELATIVE)
        assert metrics[name] == wanted, name
    difference, tensor = linear_loss.worst(gradient, expected)
    assert difference < RELATIVE, tensor


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_them(tiny, layout):
    _, folder, spec, found = tiny
    for name, (loss, gradient, metrics, _) in found_by(folder, spec, **LAYOUTS[layout]).items():
        alone, whole, wanted, _ = found[name]
        assert loss == pytest.approx(alone, rel=RELATIVE), name
        difference, tensor = linear_loss.worst(gradient, whole)
        assert difference < RELATIVE, (name, tensor)
        for metric in ("loss/kl", "loss/dpo", "reference/kl", "reference/moved"):
            if metric in wanted:
                assert metrics[metric] == pytest.approx(wanted[metric], rel=RELATIVE), metric


def test_how_far_the_adapter_has_moved_and_what_the_start_takes(tiny):
    """One adapter more on the rank, float32."""
    _, _, spec, found = tiny
    ours, start = policy_of(spec), start_of(spec)
    away = sum(float(np.square(ours[n] - start[n], dtype=np.float64).sum()) for n in ours)
    size = sum(float(np.square(start[n], dtype=np.float64).sum()) for n in ours)
    for _, _, metrics, (without, with_start) in found.values():
        assert metrics["reference/moved"] == pytest.approx((away / size) ** 0.5, rel=1e-6)
        assert with_start - without == sum(one.nbytes for one in ours.values())


def first_steps(worker, spec):
    """(reference/kl, reference/moved, loss/kl) of two steps from the start."""
    worker.set_adapter(start_of(spec))
    worker.set_reference(start_of(spec))
    batch, _ = random_batch(spec)
    steps = [worker.update(batch).metrics for _ in range(2)]
    return [[one[n] for n in ("reference/kl", "reference/moved", "loss/kl")] for one in steps]


def test_the_kl_to_the_start_is_0_in_the_first_step_and_not_in_the_second(tiny):
    _, folder, *_ = tiny
    config = make_config(folder, KL, world_size=2, ep=2, recompute="full")
    for first, second in run_ranks(config, folder, first_steps):
        assert first == [0, 0, 0]
        assert all(value > 1e-6 for value in second), second


@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_so_it_is_on_a_quantised_base(tmp_path, form):
    """In bfloat16, on the CPU too to the last bit."""
    folder, _ = make_pair("qwen3_moe", tmp_path, form)
    config = make_config(folder, KL, dtype="bfloat16")
    config = config.model_copy(update={"adapter": AdapterConfig(rank=4)})
    ((first, second),) = run_ranks(config, folder, first_steps)
    assert first == [0, 0, 0] and all(value > 0 for value in second), (first, second)


def what_is_noticed(worker, spec):
    """By planted bug, what an update says."""
    batch, _ = random_batch(spec)

    def told(plant, version=1) -> str:
        worker.set_adapter(policy_of(spec))
        worker.set_reference(start_of(spec))
        worker.engine.version = version
        undo = plant()
        try:
            worker.update(batch)
        except FrozenStartError as error:
            return str(error)
        finally:
            if undo:
                undo()
        return ""

    def of_the_policy():
        worker.engine.reference.on = contextlib.nullcontext

    def of_the_base():
        worker.set_adapter(start_of(spec))
        worker.engine.reference.on = worker.engine.adapters.off

    def trained_too():
        worker.engine.reference.values[3].mul_(1.001)

    def missing():
        worker.engine.reference = None

    return {
        "nothing": told(lambda: None),
        "of the policy": told(of_the_policy),
        "of the base": told(of_the_base),
        "another start": told(lambda: None, version=0),
        "trained too": told(trained_too),
        "missing": told(missing),
    }


def test_a_reference_that_is_not_the_start_stops_the_run(tiny):
    _, folder, *_ = tiny
    (found,) = run_ranks(make_config(folder, KL), folder, what_is_noticed)
    assert found["nothing"] == ""
    assert "every logprob is the same under both" in found["of the policy"]
    assert "their KL should be 0, and is " in found["of the base"]
    assert "before its first update the policy is not the adapter" in found["another start"]
    assert "has been written to since it was loaded" in found["trained too"]
    assert "was not given the adapter that the run starts from" in found["missing"]
