"""The loop where the rows' own answers are learned from: what the trainer gets, and what is on
record, with nobody who samples, scores or serves."""

from __future__ import annotations

import asyncio
import json
from typing import cast

import numpy as np
import pytest

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.data.maker import Wanted
from lora_moe_rl.data.mixture import open_prompts
from lora_moe_rl.data.samples import Answer, Group, Prompt, UpdateResult
from lora_moe_rl.errors import NothingTrainedError
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run import loop, offline
from lora_moe_rl.run.evaluations import Evaluates, Evaluations
from lora_moe_rl.run.records import Records
from lora_moe_rl.run.schedule import Schedule
from lora_moe_rl.run.tickets import TicketBook
from lora_moe_rl.telemetry import report
from lora_moe_rl.telemetry.metrics import MetricsWriter, read_metrics
from lora_moe_rl.telemetry.timeline import Timeline
from lora_moe_rl.tiny.tokenizer import make_tokenizer

EOS = 254
METRICS = {
    "sft": {"loss/nll": 0.5, "loss/perplexity": 1.65},
    "dpo": {"loss/dpo": 0.6, "rewards/margins": 0.2, "rewards/accuracies": 1.0},
}


class Trainer:
    """Keeps what it is given; the second update has a NaN, which makes no version."""

    def __init__(self, algorithm):
        self.algorithm, self.batches, self.version = algorithm, [], 0

    async def update(self, batch, routes):
        assert routes == [None] * len(routes)
        self.batches.append(batch)
        skipped = len(self.batches) == 2
        self.version += not skipped
        metrics = {"loss/rejected_tokens": 0.0, "optim/grad_norm": 1.0, "policy/entropy": 0.1}
        metrics |= METRICS[self.algorithm]
        advantages = [np.ones(len(one), np.float32) for one in batch.weights]
        changed = advantages if self.algorithm == "dpo" else None
        return UpdateResult(self.version, metrics, skipped, skipped, 1.0, changed), []


class Kept(Records):
    """Without checkpoints, which want a model."""

    async def checkpoint(self, step, book, tasks):
        self.books = [*getattr(self, "books", []), book]


def run(folder, name, rows, steps=3):
    """(trainer, publisher, records of metrics, of samples, of the timeline) of a whole run."""
    (folder / "config.json").write_text("{}")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"algorithm={name}", f"data.path={folder}/rows.jsonl", "data.order=sequential"]
    settings += ["algorithm.prompts_per_step=2", f"trainer.steps={steps}"]
    config = override(RunConfig(), [*settings, f"logging.run_dir={folder}/run"])
    wanted = Wanted(config.learns_from, frozenset({EOS}))
    source = open_prompts(config.data, make_tokenizer(), 0, 40, {}, wanted)
    trainer, publisher = Trainer(name), offline.Unserved(0)
    with RunDir(config, resume=False) as run_dir, MetricsWriter(run_dir, config) as metrics:
        records = Kept(config, None, folder, run_dir, trainer, metrics, done=0, dtype="float32")
        ports = loop.Ports(
            config,
            source,
            offline.RowAnswers(config, None, None),
            algorithms.make(config),
            offline.NoEngines(),
            trainer,
            publisher,
            records,
            Timeline(config.num_engines, run_dir.write_timeline),
            Evaluations(config, cast(Evaluates, None), offline.NoEngines(), ()),
        )
        asyncio.run(loop.run(ports, TicketBook(Schedule(2)), 1))
        assert records.books[-1]["data"]["drawn"] == 2 * steps
        files = [read_metrics(run_dir), *map(read_jsonl, (run_dir.samples_file,))]
        return trainer, publisher, files[0], list(files[1]), run_dir


ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(4)]


def test_the_trainer_gets_the_answers_with_their_ends_and_nothing_else_in_the_loss(tmp_path):
    trainer, publisher, metrics, samples, _ = run(tmp_path, "sft", ROWS)
    first = trainer.batches[0]
    assert [ids.tolist() for ids in first.token_ids] == [[*b"0+1=1", EOS], [*b"1+1=2", EOS]]
    assert first.prompt_lengths.tolist() == [4, 4] and len(first.token_ids) == 2
    assert [one.tolist() for one in first.weights] == [[1, 1], [1, 1]]
    assert [one.tolist() for one in first.masks] == [[True, True]] * 2
    assert len(trainer.batches) == 3 and publisher.version == 2
    assert [record["adapter/version"] for record in metrics] == [0, 1, 1]
    assert [sample["response"] for sample in samples] == ["1", "2", "3", "4", "1", "2"]
    assert all("reward" not in sample and sample["versions"] == [] for sample in samples)


def test_what_is_on_record_tells_of_no_engine(tmp_path):
    _, _, metrics, _, run_dir = run(tmp_path, "sft", ROWS)
    rooms = {name.partition("/")[0] for name in metrics[0]}
    assert not rooms & {"reward", "rollout", "mismatch", "replay", "refit"}
    assert metrics[0]["data/tokens"] == 12 and metrics[0]["data/answer_length"] == 2
    assert {name for name in metrics[0] if name.startswith(("time/", "idle/"))} == {
        "time/train",
        "time/records",
        "time/step",
        "idle/trainer",
    }
    assert metrics[1]["optim/skipped"] == 1
    spans = [span for step in read_jsonl(run_dir.timeline_file) for span in step["spans"]]
    assert {span[0] for span in spans} <= {"feed", "trainer", "publish"}


def test_the_report_of_such_a_run_has_a_loss_and_no_reward(tmp_path, capsys):
    run_dir = run(tmp_path, "sft", ROWS)[-1]
    report.finish(run_dir)
    shown = capsys.readouterr().out
    assert "loss" in shown and "perplexity" in shown and run_dir.curves_file.exists()
    assert not any(word in shown for word in ("reward", "mismatch", "rollout", "refit"))


def test_a_pair_is_a_group_whose_first_sample_is_the_chosen_one(tmp_path):
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "no"} for i in range(4)]
    trainer, _, metrics, samples, _ = run(tmp_path, "dpo", rows)
    first = trainer.batches[0]
    assert [ids.tolist() for ids in first.token_ids[:2]] == [[*b"0+1=1", EOS], [*b"0+1=no", EOS]]
    assert first.groups.tolist() == [0, 0, 1, 1] and first.rewards.tolist() == [1, 0, 1, 0]
    assert [sample["reward"] for sample in samples[:2]] == [1.0, 0.0]
    assert samples[0]["advantage"] == 1.0  # as the trainer revised it
    assert metrics[0]["loss/dpo"] == 0.6


def test_steps_in_which_nothing_is_trained_stop_the_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = override(RunConfig(), ["algorithm=sft", "trainer.max_skipped_steps=1"])
    records = Records(config, None, tmp_path, None, None, None, done=0, dtype="float32")
    result = UpdateResult(0, {"loss/rejected_tokens": 0.0}, 1, 0, 1.0)
    with pytest.raises(NothingTrainedError, match="no token was in the loss in 1 steps in a row"):
        records.check_update(1, [], [], result)


def test_nobody_can_be_asked_for_a_sample():
    policy = offline.NoEngines().policy(0, 0, lambda index: None)
    with pytest.raises(AssertionError, match="nothing is sampled"):
        asyncio.run(policy.sample([1], 1))
    with pytest.raises(AssertionError, match="no engine to take them"):
        asyncio.run(offline.Unserved(0).publish(1, ["parts"], []))


def test_rewards_fall_from_the_first_answer_to_the_last():
    answers = tuple(Answer(str(i), [i, EOS]) for i in range(3))
    prompt = Prompt(0, "", [5], answers=answers)
    group: Group = asyncio.run(offline.RowAnswers(RunConfig(), None, None).rollout(prompt, None))
    assert group.rewards.tolist() == [2, 1, 0] and group.routes is None
