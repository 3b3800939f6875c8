"""Distillation from a teacher's likeliest tokens on real Megatron-core ranks: loss and gradient
against Hugging Face's models with PEFT's adapters, with micro-batches, masks and layouts."""

from __future__ import annotations

import asyncio

import hf
import linear_loss
import numpy as np
import peft_lora
import pytest
import test_opd
import tiny_families
import torch
from cli_run import RECIPE
from ranks import random_adapter, random_batch, run_ranks, spec_of
from teacher_server import MODEL, teacher_server

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.teacher import TeacherSettings
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.rewards.teacher import Teacher
from lora_moe_rl.tiny.tokenizer import make_tokenizer

RELATIVE = 1e-5
TOP_K = 5
LAYOUTS = {
    "one rank": {},
    "tp2": {"world_size": 2, "tp": 2},
    "cp2": {"world_size": 2, "cp": 2},
    "pp2": {"world_size": 2, "pp": 2},
}
CASES = [
    *(("one rank", beta) for beta in (0.0, 0.3, 1.0)),
    ("cp2", 1.0),
    pytest.param("tp2", 1.0, marks=pytest.mark.slow),
    pytest.param("pp2", 1.0, marks=pytest.mark.slow),
]


def make_config(folder, beta: float, **trainer) -> RunConfig:
    """Small micro-batches, so that every rank has several of uneven size."""
    return RunConfig(
        model=str(folder),
        adapter=peft_lora.ADAPTER,
        trainer={"micro_batch_tokens": 40, **trainer},
        replay={"mode": "off"},
        algorithm={"name": "distillation", "teacher_top_k": TOP_K, "distill_beta": beta},
    )


def sampled(spec) -> Group:
    """Samples of one group, of which one has a tool's tokens, and another has no reward."""
    batch, _ = random_batch(spec)
    samples = []
    for i, (ids, length) in enumerate(zip(batch.token_ids, batch.prompt_lengths, strict=True)):
        segments = [Segment.given("user", ids[:length])]
        half = (length + len(ids)) // 2 if i == 2 else length
        segments += [Segment.given("tool", ids[length:half])] if i == 2 else []
        segments += [Segment.sampled(ids[half:], np.full(len(ids) - half, -2.0), 0)]
        samples.append(Sample(tuple(segments), "stop", ""))
    none = np.full(len(samples), np.nan, np.float32)
    return Group(Prompt(0, "", []), samples, None, none)


def with_rest(shares: torch.Tensor) -> torch.Tensor:
    return torch.cat([shares, 1 - shares.sum(-1, keepdim=True)], -1)


def by_formula(student, teacher, group, beta: float) -> torch.Tensor:
    """The mean over the policy's tokens of beta KL(teacher || m) + (1 - beta) KL(policy || m), or
    the KL itself, of the teacher's likeliest tokens and all others together."""
    total, count = torch.zeros(()), 0
    for sample in group.samples[:-1]:  # the last one has failed
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        inside = torch.from_numpy(sample.mask)
        own, theirs = (
            model(ids).logits[0, :-1].softmax(-1)[-len(sample.mask) :][inside]
            for model in (student, teacher)
        )
        likeliest = theirs.detach().topk(TOP_K)
        p, q = with_rest(likeliest.values), with_rest(own.gather(1, likeliest.indices))
        if beta == 0:
            each = p * (p / q).log()
        elif beta == 1:
            each = q * (q / p).log()
        else:
            mixed = beta * p + (1 - beta) * q
            each = beta * p * (p / mixed).log() + (1 - beta) * q * (q / mixed).log()
        total, count = total + each.sum(), count + int(inside.sum())
    return total / count


def says(teacher, top_k: int = TOP_K):
    """What a server of a model says of tokens: their logprobs, and the likeliest in their place."""

    @torch.no_grad()
    def likeliest(ids: list[int]) -> list[dict[int, float]]:
        found = teacher(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).topk(top_k)
        return [
            dict(zip(i.tolist(), v.tolist(), strict=True))
            for i, v in zip(found.indices, found.values, strict=True)
        ]

    return {"score": lambda ids: hf.logprobs(teacher, ids), "likeliest": likeliest}


def scored(group: Group, teacher) -> Group:
    """By a server that gives what vLLM's gives. It answers all but the last sample."""
    with teacher_server(**says(teacher)) as server:
        settings = TeacherSettings(teacher_url=server.url, teacher_model=MODEL, teacher_retries=0)
        server.failing = group.samples[-1].token_ids.tolist()
        asyncio.run(Teacher(settings, alone=True, top_k=TOP_K).score(group))
    assert len(group.failures) == 1 and np.isnan(group.rewards[-1])
    return group


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder, its spec, a student with an adapter, and the group that a teacher has scored."""
    folder = tmp_path_factory.mktemp("model")
    base = tiny_families.save("qwen3_moe", folder)
    spec = spec_of(folder, make_config(folder, 1.0))
    teacher = hf.load(folder)
    hf.merge(teacher, spec, random_adapter(spec, seed=7))
    student = peft_lora.wrap(base, spec)
    peft_lora.load(student, spec, random_adapter(spec))
    return folder, spec, student, teacher, scored(sampled(spec), teacher)


@pytest.mark.parametrize(("layout", "beta"), CASES)
def test_loss_and_gradient_are_those_of_hugging_faces_models(models, layout, beta):
    folder, spec, student, teacher, group = models
    student.zero_grad()
    loss = by_formula(student, teacher, group, beta)
    loss.backward()
    wanted = {n: g.numpy() for n, g in peft_lora.views(student, spec, lambda p: p.grad).items()}
    ranks = run_ranks(
        make_config(folder, beta, **LAYOUTS[layout]), folder, test_opd.gradients, group
    )
    ours = assemble(spec.tensor_shapes, [shard for _, _, shards in ranks for shard in shards])
    assert loss > 0.005
    for found, _, _ in ranks:
        assert found == pytest.approx(loss.item(), rel=RELATIVE)
    difference, name = linear_loss.worst(ours, wanted)
    print(f"loss {loss.item():.6f}, off by {abs(ranks[0][0] - loss.item()):.1e}; {difference:.1e}")
    assert difference < RELATIVE, name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_divergence_falls_in_a_run(tmp_path):
    """Without a reward function, of two samples of a step's prompts, an update each."""
    tokenizer, run = make_tokenizer(), tmp_path / "run"
    model = test_opd.tutored()
    with teacher_server(**says(model, 20), decode=lambda i: tokenizer.decode([i])) as server:
        settings = [
            *("algorithm=distillation", f"algorithm.teacher_url={server.url}"),
            *(f"algorithm.teacher_model={MODEL}", "reward.function=null", "trainer.steps=12"),
            *("algorithm.prompts_per_step=8", "algorithm.group_size=4", "algorithm.mini_batches=2"),
            *("trainer.lr=3e-3", f"logging.run_dir={run}"),
        ]
        test_opd.train(run, RECIPE, *settings)
    records = test_opd.read_jsonl_of(run, "metrics")
    found = [record["loss/divergence"] for record in records]
    print("divergence by step:", " ".join(f"{one:.3f}" for one in found))
    assert len(found) == 12 and np.mean(found[-3:]) < 0.6 * np.mean(found[:3])
    assert all(0.99 < record["teacher/top_k_mass"] <= 1 for record in records)
    assert all(record["replay/coverage"] == 1 for record in records)
