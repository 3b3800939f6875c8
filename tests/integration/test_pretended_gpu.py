"""The trainer with every tensor on a GPU that is pretended: what a GPU refuses for being on another
device is refused, and in float32 the numbers are the CPU's. tests/gpu asks a GPU itself."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
from pretended_ranks import run_pretended
from ranks import FileJob, random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.models.directory import resolve_model

pytestmark = [pytest.mark.slow]
# Sums in another order: attention and adapters are computed by other means.
RELATIVE = {"float32": 1e-5, "bfloat16": 0.1}
CASES = {
    "grpo": {},
    "corrected": {"correction": "tis", "rejection": "tokens", "rejection_max": 20.0}
    | {"kl_coef": 0.1, "entropy_coef": 0.1},
    "means": {"correction": "decoupled_seq_is", "correction_normalize": True},
    "rewards": {"name": "rloo", "kl_coef": 0.1},
    "ppo": {"name": "ppo", "value_clip": 0.05},
    "dpo": {"name": "dpo"},
    "sft": {"name": "sft"},
}


def make_config(model: str, dtype: str, device: str = "cuda", **trainer) -> RunConfig:
    kernel = {"lora_kernel": "torch"} if device == "cuda" else {}
    settings = {"micro_batch_tokens": 60, "dtype": dtype, "device": device, **kernel, **trainer}
    return RunConfig(model=model, trainer=settings)


def batch_of(spec, samples: int = 6):
    batch, table = random_batch(spec, samples)
    batch.groups = np.arange(samples) // 2
    batch.rewards = np.random.default_rng(3).uniform(0, 1, samples)
    return batch, table


def step(worker, spec):
    """A step as a run makes it: scores, an audited update, the adapter and its state."""
    from megatron.core.transformer.moe.router import TopKRouter

    assert not hasattr(TopKRouter._apply_expert_bias, "_torchdynamo_orig_callable")
    worker.set_adapter(random_adapter(spec))
    batch, table = batch_of(spec)
    sequences = [ids.tolist() for ids in batch.token_ids]
    worker.score_ahead(sequences)
    scores = worker.score(sequences, table, True), worker.score(sequences, None, False)
    result = worker.update(batch, table)
    if worker.config.trainer.world_size == 1:  # else each would want the others' files
        with tempfile.TemporaryDirectory() as folder:
            worker.load(Path(folder), worker.save(Path(folder)).meta)
        worker.load_copy(worker.copy()[1])
    worker.memory()
    return scores, result, worker.export()


def every_case(worker, spec):
    """Losses, and gradients' norms, of an algorithm of each kind, without an audit."""
    from lora_moe_rl.trainer.critic import Critic

    engine, found = worker.engine, {}
    for name, section in CASES.items():
        config = with_settings(RunConfig(), {"algorithm": section})
        unaudited = config.replay.model_copy(update={"audit": 0})
        config = config.model_copy(update={"trainer": engine.config.trainer, "replay": unaudited})
        worker.set_adapter(random_adapter(spec))
        engine.config, engine.algorithm = config, algorithms.make(config)
        settings = engine.algorithm.critic
        engine.critic = None if settings is None else Critic(engine, settings)
        batch, table = batch_of(spec)
        batch.logprobs = near_rollout(worker, batch, table)
        parts = () if config.offline else (table,)
        metrics = worker.update(batch, *parts).metrics
        found[name] = {key: metrics[key] for key in ("optim/grad_norm", "policy/entropy")}
        if settings is not None:
            found[name]["critic/loss"] = metrics["critic/loss"]
    return found


def near_rollout(worker, batch, table):
    """Logprobs as an engine might have sampled with, so that nothing is far from them."""
    sequences, noise = [ids.tolist() for ids in batch.token_ids], np.random.default_rng(4)
    own = worker.score(sequences, table, True)
    pairs = zip(own, batch.weights, strict=True)
    return [(o[-len(w) :] + noise.uniform(-1, 1, len(w))).astype(np.float32) for o, w in pairs]


def packed(worker, spec):
    """Checksums of a version that is packed for the host, and for the GPU."""
    import torch

    from lora_moe_rl.refit import copies
    from lora_moe_rl.refit.parts import part_layouts
    from lora_moe_rl.refit.plan import EngineLayout, make_plan
    from lora_moe_rl.refit.sender import Sender, held_by
    from lora_moe_rl.refit.transports import cuda_ipc
    from lora_moe_rl.refit.transports.shm import SHARED_MEMORY
    from lora_moe_rl.rollout.facts import slot_rank

    class Unlocked(copies.Cuda):
        def lock(self, memory):
            pass

        unlock = lock

    class Untold:
        def empty(self, nbytes):
            return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

        def share(self, memory):
            return {}

    copies.Cuda = Unlocked
    worker.set_adapter(random_adapter(spec))
    plan = make_plan(spec, worker.config.trainer, EngineLayout(slot_rank(spec)), 4)
    (layout,) = part_layouts(plan, spec, "float32")
    scales = {site.name: site.scale for site in spec}
    held = held_by(worker.engine.adapters.served())
    found = []
    for outgoing in (SHARED_MEMORY.outgoing(layout, ""), cuda_ipc.Outgoing(Untold())):
        sender = Sender(layout, held, scales, outgoing)
        found.append((sender.staged, sender.send(1).checksums, bytes(sender.buffer[:64])))
    return found


def near(found, expected, relative: float) -> bool:
    return abs(found - expected) <= relative * max(1.0, abs(expected))


@pytest.mark.parametrize(
    ("model", "dtype", "trainer"),
    [
        pytest.param("qwen3_moe", "float32", {}, marks=pytest.mark.whole),
        ("qwen3_moe", "bfloat16", {"offload": "both"}),
        ("deepseek_v3", "float32", {"recompute": "full"}),
        ("deepseek_v3", "bfloat16", {}),
    ],
    ids=str,
)
def test_a_step_is_the_cpus(model, dtype, trainer):
    directory, relative = resolve_model(model), RELATIVE[dtype]
    job = FileJob(__file__, "step")
    ((scores, result, shards),) = run_pretended(
        make_config(model, dtype, **trainer), directory, job
    )
    on_cpu = make_config(model, "float32", "cpu")
    ((expected_scores, expected, expected_shards),) = run_ranks(on_cpu, directory, step)
    for ours, theirs in zip(scores, expected_scores, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=relative * 20)
    assert result.metrics["replay/coverage"] == 1.0 and result.metrics["replay/audited"] > 0
    for name in ("loss/policy", "optim/grad_norm"):
        assert near(result.metrics[name], expected.metrics[name], relative), name
    spec = spec_of(directory, on_cpu)
    whole = assemble(spec.tensor_shapes, shards)
    for name, values in assemble(spec.tensor_shapes, expected_shards).items():
        close = np.isclose(whole[name], values, rtol=0, atol=on_cpu.trainer.lr / 2).mean()
        assert close > (0.999 if dtype == "float32" else 0.9), name


def update(worker, spec):
    worker.set_adapter(random_adapter(spec))
    return worker.update(*batch_of(spec, 3)).metrics


def test_adapters_of_experts_are_tritons():
    """In its interpreter, which takes its time."""
    directory, big = resolve_model("qwen3_moe"), {"micro_batch_tokens": 1000}
    config = make_config("qwen3_moe", "float32", lora_kernel="auto", **big)
    (found,) = run_pretended(config, directory, FileJob(__file__, "update"))
    (expected,) = run_ranks(make_config("qwen3_moe", "float32", "cpu", **big), directory, update)
    for name in ("loss/policy", "optim/grad_norm"):
        assert near(found[name], expected[name], 1e-5), name


@pytest.mark.parametrize(
    ("model", "dtype"), [("qwen3_moe", "bfloat16"), ("deepseek_v3", "float32")], ids=str
)
def test_every_kind_of_algorithm_is_the_cpus(model, dtype):
    directory = resolve_model(model)
    job = FileJob(__file__, "every_case")
    (found,) = run_pretended(make_config(model, dtype), directory, job)
    (expected,) = run_ranks(make_config(model, "float32", "cpu"), directory, every_case)
    # Exponentials of differences make much of bfloat16's eight bits.
    relative = 1e-5 if dtype == "float32" else 0.5
    for case, values in expected.items():
        for name, value in values.items():
            assert near(found[case][name], value, relative), (case, name)


def test_a_version_is_packed_on_the_gpu():
    directory = resolve_model("qwen3_moe")
    config = make_config("qwen3_moe", "float32")
    (((staged, sums, first), (there, sums_there, first_there)),) = run_pretended(
        config, directory, FileJob(__file__, "packed")
    )
    assert (staged, there) == (True, False)
    assert first == first_there and len(sums) == len(sums_there) > 0


@pytest.mark.parametrize(
    "layout", [{"tp": 2, "ep": 2}, {"pp": 2, "vpp": 2}, {"ep": 2, "recompute": "full"}], ids=str
)
def test_ranks_exchange_what_is_on_their_gpus(layout):
    directory = resolve_model("qwen3_moe")
    config = make_config("qwen3_moe", "float32", world_size=2, **layout)
    (_, result, _), *_ = run_pretended(config, directory, FileJob(__file__, "step"))
    ((_, expected, _),) = run_ranks(make_config("qwen3_moe", "float32", "cpu"), directory, step)
    for name in ("loss/policy", "optim/grad_norm"):
        assert near(result.metrics[name], expected.metrics[name], 1e-5), name


def planted(worker, spec):
    """What is said to an update with something in its loss that a GPU refuses."""
    import torch
    import torch.distributed as dist

    stock, said = worker.engine.algorithm.loss, {}

    def of_the_host(tokens):
        found = stock(tokens)
        return dataclasses.replace(found, values=found.values * torch.ones(len(tokens.logprobs)))

    def index(tokens):
        torch.zeros(len(tokens.logprobs))[tokens.samples]
        return stock(tokens)

    def numpy(tokens):
        np.asarray(tokens.logprobs.detach())
        return stock(tokens)

    def collective(tokens):
        dist.all_reduce(torch.zeros(3))
        return stock(tokens)

    for loss in (of_the_host, index, numpy, collective):
        worker.set_adapter(random_adapter(spec))
        worker.engine.algorithm.loss = loss
        try:
            worker.update(*batch_of(spec))
        except RuntimeError as error:
            said[loss.__name__] = str(error)
    return said


def test_what_a_gpu_refuses_is_found():
    directory, job = resolve_model("qwen3_moe"), FileJob(__file__, "planted")
    (said,) = run_pretended(make_config("qwen3_moe", "float32"), directory, job)
    assert said.keys() == {"of_the_host", "index", "numpy", "collective"}
    assert "tensors of both devices" in said["of_the_host"]
    assert "of a tensor of the host, with a device's tensor" in said["index"]
    assert "has to be copied to the host first" in said["numpy"]
    assert "NCCL takes no tensors of the host" in said["collective"]
