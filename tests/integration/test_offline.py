"""Learning from the rows' own answers on real Megatron-core ranks: loss and gradient of sft and dpo
against Hugging Face with PEFT's adapters, under every layout."""

from __future__ import annotations

import asyncio

import linear_loss
import numpy as np
import peft_lora
import pytest
import tiny_families
import torch
import torch.nn.functional as F
from ranks import random_adapter, run_ranks, spec_of

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.config import EvalSetConfig, RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import Answer, Group, Prompt
from lora_moe_rl.evaluation.answers_loss import Judged, set_metrics
from lora_moe_rl.run.offline import RowAnswers

RELATIVE = 1e-5
BETA, SMOOTHING = 0.4, 0.1
ALGORITHMS = {
    "sft": {"name": "sft"},
    "by sample": {"name": "sft", "aggregation": "seq-mean-token-mean"},
    "dpo": {"name": "dpo", "beta": BETA, "label_smoothing": SMOOTHING},
}
LAYOUTS = [
    {"world_size": 2, "ep": 2},
    {"world_size": 2, "cp": 2},
    {"world_size": 4, "tp": 2, "pp": 2},
]


def make_config(folder, algorithm: str = "sft", **trainer) -> RunConfig:
    """Small micro-batches, so that every rank has several of uneven size."""
    trainer = {"lr": 1e-2, "micro_batch_tokens": 40, "steps": 100, **trainer}
    return RunConfig(
        model=str(folder),
        adapter=peft_lora.ADAPTER,
        trainer=trainer,
        algorithm=ALGORITHMS[algorithm],
    )


def groups_of(config: RunConfig) -> list[Group]:
    """Seven rows with one answer each, or two."""
    rng = np.random.default_rng(0)
    number = 2 if config.learns_from == "pairs" else 1

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(0, tiny_families.VOCAB_SIZE, rng.integers(low, high)).tolist()

    prompts = [
        Prompt(row, "", ids(2, 8), answers=tuple(Answer("", ids(1, 12)) for _ in range(number)))
        for row in range(7)
    ]
    return [
        asyncio.run(RowAnswers(RunConfig(), None, None).rollout(prompt, None)) for prompt in prompts
    ]


def batch_of(config: RunConfig) -> TrainBatch:
    """The batch that the loop would make of them."""
    groups = groups_of(config)
    signals = signals_of(algorithms.make(config), groups)
    return TrainBatch.from_groups(groups, signals, mini_batches=1, step=1)


def every_algorithm(worker, spec, configs):
    """Of each: (loss, this rank's part of the gradient, metrics of an update, logprobs of the
    answers, whether to ask for these changes what is trained)."""
    found = {}
    for name, config in configs.items():
        worker.set_adapter(random_adapter(spec))
        worker.engine.config, worker.engine.algorithm = config, algorithms.make(config)
        loss, _, shards = worker.gradients(batch_of(config))
        judged = worker.judge(batch_of(config))
        again, _, others = worker.gradients(batch_of(config))
        same = again == loss and all((a.data == b.data).all() for a, b in zip(shards, others))
        found[name] = loss, shards, worker.update(batch_of(config)).metrics, judged, same
    return found


def found_by(folder, spec, **trainer):
    """Of each algorithm: (loss, whole gradient, metrics, those of the rows as held out)."""
    configs = {name: make_config(folder, name, **trainer) for name in ALGORITHMS}
    everyone = run_ranks(configs["sft"], folder, every_algorithm, configs)
    found = {}
    for name in configs:
        shards = [shard for rank in everyone for shard in rank[name][1]]
        whole = assemble(spec.tensor_shapes, shards)
        loss, _, metrics, judged, _ = everyone[0][name]
        found[name] = loss, whole, metrics, held_out(configs[name], judged)
        assert all(rank[name][4] for rank in everyone), name
    return found


def held_out(config: RunConfig, judged) -> dict[str, float]:
    """As an evaluation tells of a set, where rows of even and of odd number are told apart."""
    number, policy = (2 if config.learns_from == "pairs" else 1), judged["old"]
    rows = []
    for i, group in enumerate(groups_of(config)):
        group.prompt.columns["odd"] = i % 2
        mine, against = slice(i * number, (i + 1) * number), judged.get("reference")
        rows.append(Judged(group, policy[mine], None if against is None else against[mine]))
    settings = EvalSetConfig(path="held.jsonl", group_by="odd")
    return set_metrics("held", settings, algorithms.make(config), rows)


def losses_of(model, batch: TrainBatch) -> list[torch.Tensor]:
    """By Hugging Face: the cross-entropy of each token of each answer."""
    found = []
    for ids, prompt in zip(batch.token_ids, batch.prompt_lengths, strict=True):
        fed = torch.from_numpy(ids.astype(np.int64))
        logits = model(fed[None, :-1]).logits[0, prompt - 1 :]
        found.append(F.cross_entropy(logits, fed[prompt:], reduction="none"))
    return found


def by_hugging_face(model, spec, config):
    """(loss, gradient, the loss and rewards that TRL's DPOTrainer would show) in plain torch."""
    batch, shown = batch_of(config), {}
    losses = losses_of(model, batch)
    if config.algorithm.name == "dpo":
        with torch.no_grad(), model.disable_adapter():
            base = -torch.stack([one.sum() for one in losses_of(model, batch)])
        own = -torch.stack([one.sum() for one in losses])
        chosen, rejected = (own - base)[0::2], (own - base)[1::2]
        delta = BETA * (chosen - rejected)
        loss = (-F.logsigmoid(delta) * (1 - SMOOTHING) - F.logsigmoid(-delta) * SMOOTHING).mean()
        shown = {
            "loss/dpo": loss,
            "rewards/chosen": BETA * chosen.mean(),
            "rewards/rejected": BETA * rejected.mean(),
            "rewards/margins": delta.mean(),
            "rewards/accuracies": (delta > 0).float().mean(),
            "logps/chosen": own[0::2].mean(),
        }
    elif config.algorithm.aggregation == "token-mean":
        loss = torch.cat(losses).mean()
    else:
        loss = torch.stack([one.mean() for one in losses]).mean()
    if config.algorithm.name == "sft":
        nll = torch.cat(losses).mean()
        shown = {"loss/nll": nll, "loss/perplexity": nll.exp()}
    model.zero_grad()
    loss.backward()
    gradient = {
        name: value.numpy().copy()
        for name, value in peft_lora.views(model, spec, lambda p: p.grad).items()
    }
    return loss.item(), gradient, {name: value.item() for name, value in shown.items()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    model = tiny_families.save("qwen3_moe", folder)
    spec = spec_of(folder, make_config(folder))
    return peft_lora.wrap(model, spec), folder, spec, found_by(folder, spec)


def test_loss_and_gradient_equal_peft_on_hugging_face(tiny):
    theirs, folder, spec, found = tiny
    peft_lora.load(theirs, spec, random_adapter(spec))
    for name, (loss, gradient, metrics, _) in found.items():
        config = make_config(folder, name)
        expected_loss, expected, shown = by_hugging_face(theirs, spec, config)
        if config.algorithm.name == "sft":  # of dpo the trainer's own is the sum with its gradient
            assert loss == pytest.approx(expected_loss, rel=RELATIVE), name
        difference, tensor = linear_loss.worst(gradient, expected)
        assert difference < RELATIVE, (name, tensor)
        for metric, value in shown.items():
            assert metrics[metric] == pytest.approx(value, rel=RELATIVE, abs=RELATIVE), metric


def test_the_loss_of_held_out_rows_is_that_of_peft_on_hugging_face(tiny):
    """Of all rows, and of those of one value of a column."""
    theirs, folder, spec, found = tiny
    peft_lora.load(theirs, spec, random_adapter(spec))
    for name, (*_, held) in found.items():
        config = make_config(folder, name)
        batch = batch_of(config)
        losses, odd = losses_of(theirs, batch), batch.groups % 2 == 1
        if config.algorithm.name == "sft":
            wanted = {
                "eval/held/nll": torch.cat(losses).mean(),
                "eval/held/perplexity": torch.cat(losses).mean().exp(),
                "eval/held/odd=1/nll": torch.cat([losses[i] for i in np.flatnonzero(odd)]).mean(),
            }
        else:
            with torch.no_grad(), theirs.disable_adapter():
                base = torch.stack([one.sum() for one in losses_of(theirs, batch)])
            gains = BETA * (base - torch.stack([one.sum() for one in losses]))
            margins = gains[0::2] - gains[1::2]
            each = -F.logsigmoid(margins) * (1 - SMOOTHING) - F.logsigmoid(-margins) * SMOOTHING
            wanted = {
                "eval/held/loss": each.mean(),
                "eval/held/margins": margins.mean(),
                "eval/held/accuracies": (margins > 0).float().mean(),
                "eval/held/chosen": gains[0::2].mean(),
                "eval/held/rejected": gains[1::2].mean(),
                "eval/held/odd=1/loss": each[1::2].mean(),
            }
        assert held["eval/held/prompts"] == 7 and held["eval/held/odd=1/prompts"] == 3
        for metric, value in wanted.items():
            near = pytest.approx(value.item(), rel=RELATIVE, abs=RELATIVE)
            assert held[metric] == near, (name, metric)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_layout_changes_them(tiny, layout):
    _, folder, spec, found = tiny
    for name, (loss, gradient, metrics, judged) in found_by(folder, spec, **layout).items():
        alone, whole, wanted, held = found[name]
        assert judged == pytest.approx(held, rel=RELATIVE, abs=RELATIVE), name
        assert loss == pytest.approx(alone, rel=RELATIVE), name
        difference, tensor = linear_loss.worst(gradient, whole)
        assert difference < RELATIVE, (name, tensor)
        assert metrics.keys() == wanted.keys()
        for metric in ("loss/nll", "loss/dpo", "rewards/margins", "policy/entropy"):
            if metric in wanted:
                assert metrics[metric] == pytest.approx(wanted[metric], rel=RELATIVE), metric


def test_what_an_update_records_tells_of_no_rollout(tiny):
    *_, found = tiny
    for _, _, metrics, _ in found.values():
        assert not any(name.startswith(("mismatch/", "replay/")) for name in metrics)
        assert metrics["policy/entropy"] > 1 and metrics["loss/tokens"] > 20
