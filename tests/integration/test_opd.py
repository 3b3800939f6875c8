"""On-policy distillation: loss and gradient against its formula on Hugging Face's models, logprobs
of a real vLLM server, and whole runs in which the reverse KL to a teacher falls."""

from __future__ import annotations

import asyncio
import math
import os
import random
import subprocess
from contextlib import contextmanager
from pathlib import Path

import hf
import linear_loss
import numpy as np
import peft_lora
import pytest
import tiny_families
import torch
from cli_run import RECIPE, CliRun
from ranks import random_adapter, random_batch, run_ranks, spec_of
from teacher_server import MODEL, teacher_server

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.teacher import TeacherSettings
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.rewards.teacher import Teacher
from lora_moe_rl.rollout.serve_command import serve_command
from lora_moe_rl.tiny import pretrain
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from lora_moe_rl.verify import serving

RELATIVE = 1e-5
CUT = 1.2  # algorithm.ratio_max: within what the ratios of the test are


def teacher_at(url: str, model: str = MODEL, top_k: int = 0) -> Teacher:
    return Teacher(TeacherSettings(teacher_url=url, teacher_model=model), alone=True, top_k=top_k)


def sampled(spec, student) -> Group:
    """Samples of one group, with logprobs of an engine that is a little off the student."""
    batch, _ = random_batch(spec)
    rng = np.random.default_rng(2)
    samples = []
    for ids, length in zip(batch.token_ids, batch.prompt_lengths, strict=True):
        own = hf.logprobs(student, ids)[length - 1 :]
        said = own + rng.uniform(-0.5, 0.5, len(own))
        prompt = Segment.given("user", ids[:length])
        samples.append(Sample((prompt, Segment.sampled(ids[length:], said, 0)), "stop", ""))
    none = np.full(len(samples), np.nan, np.float32)
    return Group(Prompt(0, "", []), samples, None, none)


def gradients(worker, spec, group):
    worker.set_adapter(random_adapter(spec))
    signals = signals_of(worker.engine.algorithm, [group])
    return worker.gradients(TrainBatch.from_groups([group], signals, 1, 1))


def by_formula(student, teacher, group) -> torch.Tensor:
    """-mean of min(ratio to the engine, CUT) x (log teacher - log engine) x log student."""
    total, count = torch.zeros(()), 0
    for sample in group.samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        own, theirs = (
            model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            for model in (student, teacher)
        )
        own, theirs = (one[-len(sample.mask) :] for one in (own, theirs))
        engine = torch.from_numpy(sample.logprobs)
        weight = (own - engine).exp().clamp(max=CUT).detach()
        total = total - (weight * (theirs.detach() - engine) * own).sum()
        count += len(engine)
    return total / count


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_loss_and_gradient_equal_the_formula_on_hugging_faces_models(family, tmp_path):
    base = tiny_families.save(family, tmp_path)
    algorithm = {"name": "opd", "ratio_max": CUT}
    config = RunConfig(
        model=str(tmp_path),
        adapter=peft_lora.ADAPTER,
        algorithm=algorithm,
        replay={"mode": "off"},
        trainer={"micro_batch_tokens": 40},
    )
    spec = spec_of(tmp_path, config)
    teacher = hf.load(tmp_path)
    hf.merge(teacher, spec, random_adapter(spec, seed=7))
    student = peft_lora.wrap(base, spec)
    peft_lora.load(student, spec, random_adapter(spec))
    group = sampled(spec, student)
    with teacher_server(lambda ids: hf.logprobs(teacher, ids)) as server:
        asyncio.run(teacher_at(server.url).score(group))
    loss = by_formula(student, teacher, group)
    loss.backward()
    wanted = {n: g.numpy() for n, g in peft_lora.views(student, spec, lambda p: p.grad).items()}

    ((found, _, shards),) = run_ranks(config, tmp_path, gradients, group)

    ours = assemble(spec.tensor_shapes, shards)
    assert found == pytest.approx(loss.item(), rel=RELATIVE)
    difference, name = linear_loss.worst(ours, wanted)
    print(f"loss {found:.6f}, off by {abs(found - loss.item()):.1e}; {difference:.1e} ({name})")
    assert difference < RELATIVE, name
    # A teacher's logprobs that stand one token off make another gradient, far outside.
    group.teacher = [np.roll(one, 1) for one in group.teacher]
    ((_, _, shards),) = run_ranks(config, tmp_path, gradients, group)
    difference, _ = linear_loss.worst(assemble(spec.tensor_shapes, shards), wanted)
    assert difference > 1000 * RELATIVE


@contextmanager
def vllm_server(model: Path, folder: Path):
    """`vllm serve` with its tokenizer, by the command that `export` prints."""
    port = serving._free_port()
    more = ["--host", serving.HOST, "--max-model-len", "512", "--port", str(port)]
    command = serve_command(str(model), None, 1, False, more)
    log = folder / "vllm.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            serving._found(command.words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | command.variables,
            start_new_session=True,
        )
    server = serving.Server(process, port, log, str(command))
    try:
        server.wait(600)
        yield f"http://{serving.HOST}:{port}/v1"
    finally:
        server.end()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_vllm_server_is_a_teacher(tmp_path):
    tiny_families.save("qwen3_moe", tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    reference = hf.load(tmp_path)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, tiny_families.VOCAB_SIZE, n).tolist() for n in (2, 9, 30)]

    async def ask(url):
        teacher = teacher_at(url, str(tmp_path), top_k=20)
        try:
            return [await teacher._steps(ids) for ids in sequences]
        finally:
            await teacher.close()

    async def probe(url, tokenizer, longest):
        return await teacher_at(url, str(tmp_path)).probe(tokenizer, longest)

    with vllm_server(tmp_path, tmp_path) as url:
        for ids, found in zip(sequences, asyncio.run(ask(url)), strict=True):
            own = [step.own["logprob"] for step in found]
            np.testing.assert_allclose(own, hf.logprobs(reference, ids), atol=2e-5)
            with torch.no_grad():
                every = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            likeliest = [step.logprobs for step in found]
            np.testing.assert_allclose(likeliest, every.topk(20).values, atol=2e-5)
            theirs = every.gather(1, torch.tensor([step.ids for step in found]))
            np.testing.assert_allclose(likeliest, theirs, atol=2e-5)
        tokenizer = Shortened(make_tokenizer())
        assert "token ids mean the same to it" in asyncio.run(probe(url, tokenizer, 511))
        tokenizer.shift = 1
        with pytest.raises(ConfigError, match="another vocabulary"):
            asyncio.run(probe(url, tokenizer, 511))
        with pytest.raises(ConfigError, match="takes 512 tokens"):
            asyncio.run(probe(url, tokenizer, 512))


class Shortened:
    """The tiny tokenizer with as many ids as the test's models, which have fewer than it; `shift`:
    how far each id stands for another's text."""

    def __init__(self, tokenizer):
        self.tokenizer, self.shift = tokenizer, 0

    def __len__(self) -> int:
        return 120

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode([ids[0] + self.shift])


def tutored(steps: int = 40):
    """The tiny Qwen3-MoE after some steps on right answers: it no longer slips."""
    model = hf.load(resolve_model("qwen3_moe"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    rng = random.Random(5)
    for _ in range(steps):
        ids, labels = pretrain.draw_batch(rng, 64)
        logits = model(input_ids=ids, use_cache=False).logits
        pretrain.imitation_loss(logits, labels, 0.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def train(folder: Path, *arguments: object, exit_code: int = 0) -> str:
    run = CliRun("train", *arguments, output=folder.with_suffix(".out"))
    try:
        assert run.finish(1200) == exit_code, run.output
        return run.output
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_reverse_kl_falls_also_when_the_teacher_was_gone_for_a_while(tmp_path):
    """Without a reward function. In the sixth step the teacher fails; the run stops with the
    samples kept, and goes on when it is back."""
    model, tokenizer = tutored(), make_tokenizer()
    steps, samples = 12, 32

    def score(ids):
        if len(server.asked) > 5 * samples + 8 and server.fault is None and not gone:
            server.fault = "500"
            gone.append(len(server.asked))
        return hf.logprobs(model, ids)

    gone: list[int] = []
    run = tmp_path / "run"
    with teacher_server(score, lambda i: tokenizer.decode([i])) as server:
        settings = [
            *("algorithm=opd", f"algorithm.teacher_url={server.url}"),
            *(f"algorithm.teacher_model={MODEL}", "algorithm.teacher_retries=1"),
            *("reward.function=null", "algorithm.prompts_per_step=8", "algorithm.group_size=4"),
            *(f"trainer.steps={steps}", "trainer.lr=3e-3", f"logging.run_dir={run}"),
        ]
        output = train(run, RECIPE, *settings, exit_code=1)
        assert "rewards failed" in output and f"the teacher at {server.url} gave no" in output
        failed = len(read_jsonl_of(run, "metrics")) + 1
        assert failed == 6
        kept = [one for one in read_jsonl_of(run, "samples") if one["step"] == failed]
        assert len(kept) == samples
        server.fault = None
        train(run, run / "config.yaml", "--resume")
    records = read_jsonl_of(run, "metrics")
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    kl = [record["teacher/reverse_kl"] for record in records]
    print("reverse KL by step:", " ".join(f"{one:.3f}" for one in kl))
    # Without a reward function a sample's reward is minus its own mean.
    assert records[0]["reward/mean"] == pytest.approx(-kl[0], rel=0.5)
    assert np.mean(kl[-3:]) < 0.7 * np.mean(kl[:3]) and all(map(math.isfinite, kl))


def read_jsonl_of(run: Path, name: str) -> list[dict]:
    return list(read_jsonl(run / f"{name}.jsonl"))
