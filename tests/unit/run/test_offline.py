"""The loop where the rows' own answers are learned from: what the trainer gets, and what is on
record, with nobody who samples, scores or serves."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.data.held_out import held_out_prompts
from lora_moe_rl.data.maker import Wanted
from lora_moe_rl.data.mixture import open_prompts
from lora_moe_rl.data.rows import read_rows
from lora_moe_rl.data.samples import Answer, Group, Prompt
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.errors import NonFiniteError, NothingTrainedError
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run import loop, offline
from lora_moe_rl.run.answers_evaluator import AnswersEvaluator
from lora_moe_rl.run.evaluations import Evaluations
from lora_moe_rl.run.records import Records
from lora_moe_rl.run.schedule import Schedule
from lora_moe_rl.run.tickets import TicketBook
from lora_moe_rl.telemetry import report
from lora_moe_rl.telemetry.metrics import MetricsWriter, read_evaluations, read_metrics
from lora_moe_rl.telemetry.timeline import Timeline
from lora_moe_rl.tiny.tokenizer import make_tokenizer

EOS = 254
METRICS = {
    "sft": {"loss/nll": 0.5, "loss/perplexity": 1.65},
    "dpo": {"loss/dpo": 0.6, "rewards/margins": 0.2, "rewards/accuracies": 1.0},
}


class Trainer:
    """Keeps what it is given; the second update has a NaN, which makes no version."""

    logprob = -1.0

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

    async def judge(self, batch):
        """Of every token -1 less the version, and under the reference -1."""
        self.judged = [*getattr(self, "judged", []), batch]
        sizes = batch.response_sizes().tolist()
        found = {"old": [np.full(n, self.logprob - self.version) for n in sizes]}
        if self.algorithm == "dpo":
            found["reference"] = [np.full(n, -1.0) for n in sizes]
        return found


class Kept(Records):
    """Without checkpoints, which want a model."""

    async def checkpoint(self, step, book, tasks):
        self.books = [*getattr(self, "books", []), book]


def run(folder, name, rows, steps=3, held_out=()):
    """(trainer, publisher, records of metrics, of samples, of the timeline) of a whole run."""
    (folder / "config.json").write_text("{}")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"algorithm={name}", f"data.path={folder}/rows.jsonl", "data.order=sequential"]
    settings += ["algorithm.prompts_per_step=2", f"trainer.steps={steps}"]
    if held_out:
        (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
        settings += [f"eval.sets.held.path={folder}/held.jsonl", "eval.sets.held.group_by=kind"]
        settings += ["eval.every=2"]
    config = override(RunConfig(), [*settings, f"logging.run_dir={folder}/run"])
    wanted = Wanted(config.learns_from, frozenset({EOS}))
    source = open_prompts(config.data, make_tokenizer(), 0, 40, {}, wanted)
    trainer, publisher = Trainer(name), offline.Unserved(0)
    with RunDir(config, resume=False) as run_dir, MetricsWriter(run_dir, config) as metrics:
        records = Kept(config, None, folder, run_dir, trainer, metrics, done=0, dtype="float32")
        timeline = Timeline(config.num_engines, run_dir.write_timeline)
        rows_answers, made = offline.RowAnswers(config, None, None), algorithms.make(config)
        held = {
            which: held_out_prompts(
                which, one, make_tokenizer(), 0, 40, read_rows(one), wanted
            ).prompts
            for which, one in config.eval.sources().items()
        }
        evaluator = AnswersEvaluator(config, held, rows_answers, made, trainer, timeline, metrics)
        ports = loop.Ports(
            config,
            source,
            rows_answers,
            made,
            offline.NoEngines(),
            trainer,
            publisher,
            records,
            timeline,
            Evaluations(config, evaluator, offline.NoEngines(), ()),
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
    assert [step["checkpoint/steps_behind"] for step in metrics] == [1, 2, 3]
    assert "checkpoint/copy_steps_behind" not in metrics[0]
    spans = [span for step in read_jsonl(run_dir.timeline_file) for span in step["spans"]]
    assert {span[0] for span in spans} <= {"feed", "trainer", "publish"}


def test_the_report_of_such_a_run_has_a_loss_and_no_reward(tmp_path, capsys):
    run_dir = run(tmp_path, "sft", ROWS)[-1]
    report.finish(run_dir)
    shown = capsys.readouterr().out
    assert "loss" in shown and "perplexity" in shown and run_dir.curves_file.exists()
    assert not any(word in shown for word in ("reward", "mismatch", "rollout", "refit"))


HELD = [{**row, "kind": "even" if i % 2 == 0 else "odd"} for i, row in enumerate(ROWS + ROWS[:1])]


def test_held_out_rows_are_judged_before_the_first_step_every_so_many_and_at_the_end(
    tmp_path, capsys
):
    """As many at a time as a step has. Their answers have two tokens each."""
    trainer, *_, run_dir = run(tmp_path, "sft", ROWS, held_out=HELD)
    assert [len(batch) for batch in trainer.judged] == [2, 2, 1] * 3
    assert [ids.tolist() for ids in trainer.judged[0].token_ids] == [
        [*b"0+1=1", EOS],
        [*b"1+1=2", EOS],
    ]
    found = read_evaluations(run_dir.metrics_file)
    assert [one["step"] for one in found] == [0, 2, 3]
    assert [one["eval/version"] for one in found] == [0, 1, 2]
    assert [one["eval/held/nll"] for one in found] == [1, 2, 3]
    assert found[1]["eval/held/perplexity"] == pytest.approx(np.exp(2), rel=1e-12)
    assert found[1]["eval/held/prompts"] == 5 and found[1]["eval/held/kind=odd/prompts"] == 2
    assert found[1]["eval/held/kind=even/nll"] == found[1]["eval/held/response_length"] == 2
    shown = capsys.readouterr().out
    assert "eval held after step 2: 5 rows, nll 2, perplexity 7.389, response_length 2, " in shown
    report.finish(run_dir)
    assert run_dir.curves_file.exists()


def test_held_out_pairs_have_the_loss_and_its_margins(tmp_path):
    """d of an answer is -version times its tokens: 2 of the chosen, 3 of the rejected."""
    rows = [
        {"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "no", "kind": "a"} for i in range(4)
    ]
    found = read_evaluations(run(tmp_path, "dpo", rows, held_out=rows)[-1].metrics_file)
    for one, version in zip(found, (0, 1, 2), strict=True):
        margin = 0.1 * version
        assert one["eval/held/loss"] == pytest.approx(np.log1p(np.exp(-margin)), rel=1e-12)
        assert one["eval/held/margins"] == pytest.approx(margin, abs=1e-12)
        assert one["eval/held/chosen"] == pytest.approx(-0.2 * version, abs=1e-12)
        assert one["eval/held/accuracies"] == (version > 0)


def test_a_logprob_that_is_no_number_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "logprob", np.nan)
    with pytest.raises(NonFiniteError, match="after step 0 a logprob of row 0 of eval.sets.held"):
        run(tmp_path, "sft", ROWS, held_out=HELD)


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
    with pytest.raises(
        NothingTrainedError, match="in 1 steps in a row .* no token was in the loss"
    ):
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
