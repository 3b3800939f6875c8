"""One evaluation over fake engines: which seeds, what is kept, and what ends it."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.recipes import resolve
from lora_moe_rl.data.held_out import seed_of_prompt
from lora_moe_rl.data.samples import Prompt, Sample, Segment
from lora_moe_rl.data.scores import Details, Scores
from lora_moe_rl.environments.single_turn import SingleTurn
from lora_moe_rl.errors import EngineDied, RewardError
from lora_moe_rl.files import eval_files
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.ports import Manner
from lora_moe_rl.run.evaluator import Evaluator
from lora_moe_rl.telemetry import metrics
from lora_moe_rl.telemetry.metrics import MetricsWriter, read_evaluations, read_metrics
from lora_moe_rl.telemetry.timeline import Timeline


class Engines:
    """A sample is a number of its seed and version alone. `deaths`: so many requests die first.
    `gone`: no engine serves the version any more."""

    def __init__(self, deaths=0, gone=False):
        self.deaths, self.gone, self.asked, self.at_once, self.most = deaths, gone, [], 0, 0

    def lost(self, version):
        return self.gone

    def policy(self, version, seed, watch, manner=None):
        return Policy(self, version, seed, watch, manner)


class Policy:
    def __init__(self, engines, version, seed, watch, manner):
        self.engines, self.version, self.seed = engines, version, seed
        self.watch, self.manner = watch, manner

    async def sample(self, token_ids, n, turn=None):
        engines = self.engines
        engines.at_once += 1
        engines.most = max(engines.most, engines.at_once)
        with self.watch(0):
            for _ in range(random.randrange(5)):  # whatever the order in which they come
                await asyncio.sleep(0)
        engines.at_once -= 1
        if engines.deaths:
            engines.deaths -= 1
            raise EngineDied("vLLM's processes of engine 0 have ended")
        engines.asked.append((self.seed, n, self.version, self.manner))
        texts = [str((self.seed + i + self.version) % 3) for i in range(n)]
        start = Segment.given("user", token_ids)
        made = [Segment.sampled([int(text)], np.zeros(1), self.version) for text in texts]
        return [Sample((start, one), "stop", text) for one, text in zip(made, texts)], "routes"


class Rewards:
    """1 for "1". `failing`: prompts whose rewards fail."""

    def __init__(self, failing=()):
        self.failing = failing

    async def score(self, prompt, samples):
        if prompt.number in self.failing:
            return Scores(
                np.full(len(samples), np.nan, np.float32), ["no"] * len(samples), Details()
            )
        rewards = [float(sample.text == "1") for sample in samples]
        return Scores(np.array(rewards, np.float32), [], Details())


HELD_OUT = {
    f"eval/{name}": [Prompt(i, f"{i}+1=", [5, 6], {}, f"eval/{name}") for i in range(count)]
    for name, count in (("sums", 10), ("more", 4))
}


def evaluated(folder, engines, *settings, failing=(), steps=((3, 7),)) -> RunDir:
    """Evaluations of `steps`, each after a step and of a version."""
    sets = ("eval.sets.sums.path=s", "eval.sets.sums.samples=4", "eval.sets.more.path=m")
    config = resolve(override(RunConfig(), [f"logging.run_dir={folder}", *sets, *settings]))
    with RunDir(config, False) as run_dir, MetricsWriter(run_dir, config) as writer:
        environment = SingleTurn(config, Rewards(failing), None)
        timeline = Timeline(1, lambda record: None)
        evaluator = Evaluator(config, HELD_OUT, environment, engines, timeline, run_dir, writer)
        for step, version in steps:
            asyncio.run(evaluator.evaluate(step, version))
    return run_dir


def samples_of(run_dir: RunDir, step=3) -> str:
    return eval_files.path_of(run_dir.path, step).read_text()


def test_every_prompt_is_asked_once_with_its_own_seed_and_the_sets_settings(tmp_path):
    engines = Engines()
    sums = [f"eval.sets.sums.{one}" for one in ("top_p=0.9", "top_k=7", "max_response_tokens=9")]
    own = [*sums, "eval.sets.more.temperature=0", "rollout.temperature=0.8", "eval.seed=5"]
    evaluated(tmp_path / "run", engines, *own)
    manner = Manner(temperature=0.8, top_p=0.9, top_k=7, max_tokens=9)
    expected = {(seed_of_prompt(5, "eval/sums", i), 4, 7, manner) for i in range(10)}
    greedy = Manner(temperature=0.0)
    expected |= {(seed_of_prompt(5, "eval/more", i), 1, 7, greedy) for i in range(4)}
    assert set(engines.asked) == expected and len(engines.asked) == 14


def test_two_evaluations_are_equal_whatever_dies_and_however_many_are_asked_at_once(tmp_path):
    first = samples_of(evaluated(tmp_path / "a", Engines()))
    engines = Engines(deaths=5)
    again = samples_of(evaluated(tmp_path / "b", engines, "eval.prompts_at_once=3", "seed=9"))
    assert again == first and engines.most == 3
    assert len(first.splitlines()) == 44
    other = samples_of(evaluated(tmp_path / "c", Engines(), steps=[(3, 8)]))
    assert other != first  # of another version
    assert samples_of(evaluated(tmp_path / "d", Engines(), "eval.seed=1")) != first


def test_metrics_are_those_of_the_samples_that_are_kept(tmp_path):
    run_dir = evaluated(tmp_path / "run", Engines())
    (record,) = read_evaluations(run_dir.metrics_file)
    assert (record["step"], record["eval/step"], record["eval/version"]) == (3, 3, 7)
    kept = list(read_jsonl(eval_files.path_of(run_dir.path, 3)))
    right = [line["reward"] for line in kept if line["set"] == "sums"]
    assert record["eval/sums/avg"] == pytest.approx(np.mean(right), abs=1e-12)
    assert record["eval/more/prompts"] == 4 and "eval/sums/pass@4" in record
    assert read_metrics(run_dir) == []  # no step was done


def test_evaluations_stand_beside_the_steps_and_in_their_order(tmp_path):
    run_dir = evaluated(tmp_path / "run", Engines(), steps=[(4, 8), (2, 7)])
    with open(run_dir.metrics_file, "a") as file:
        file.write(json.dumps({"step": 5}) + "\n")
    assert [record["step"] for record in read_evaluations(run_dir.metrics_file)] == [2, 4]
    assert [record["step"] for record in read_metrics(run_dir)] == [5]


def test_a_version_that_is_lost_leaves_nothing_on_record(tmp_path):
    with pytest.raises(EngineDied):
        evaluated(tmp_path / "run", Engines(deaths=1, gone=True))
    assert not eval_files.path_of(tmp_path / "run", 3).exists()
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_an_evaluation_goes_on_where_the_disk_refuses_its_samples(tmp_path, monkeypatch):
    async def full(self, token_ids, n, turn=None):
        (tmp_path / "run/eval").touch()  # where the directory would be
        return await sample(self, token_ids, n, turn)

    sample = Policy.sample
    monkeypatch.setattr(Policy, "sample", full)
    run_dir = evaluated(tmp_path / "run", Engines())
    (record,) = read_evaluations(run_dir.metrics_file)
    assert record["eval/sums/prompts"] == 10


def test_some_failed_rewards_are_counted_and_too_many_end_the_run(tmp_path):
    run_dir = evaluated(tmp_path / "run", Engines(), failing=(1, 2))
    (record,) = read_evaluations(run_dir.metrics_file)
    assert record["eval/sums/failed"] == 8 and record["eval/more/failed"] == 2
    with pytest.raises(RewardError, match="24 of 40 rewards of eval.sets.sums failed, more than"):
        evaluated(tmp_path / "none", Engines(), failing=range(6))
    samples = list(read_jsonl(eval_files.path_of(tmp_path / "none", 3)))
    failed = [one["row"] for one in samples if one["reward"] is None]
    assert len(samples) == 44 and len(failed) == 28 and set(failed) == set(range(6))
    assert not (tmp_path / "none/metrics.jsonl").exists()


def test_the_console_tells_of_each_set(tmp_path, capsys):
    evaluated(tmp_path / "run", Engines(), "eval.sets.sums.answer=number", failing=(1,))
    sums, more = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval")]
    assert sums.startswith("eval sums after step 3: avg 0.")
    for what in (" ±0.", "pass@1 ", "pass@2 ", "pass@4 ", "maj@4 ", "length 1.0", "failed 4"):
        assert what in sums
    assert "pass@2" not in more and "maj@" not in more


class Tracker:
    steps: list[int] = []  # noqa: RUF012

    def __init__(self, *_): ...

    def write(self, step, metrics):
        self.steps.append(step)

    def close(self, failed): ...


def test_trackers_have_an_evaluation_at_its_own_step(tmp_path, monkeypatch):
    """With sampling ahead it ends after later ones."""
    monkeypatch.setattr(metrics, "TRACKERS", SimpleNamespace(chosen=lambda name: [Tracker]))
    Tracker.steps.clear()
    evaluated(tmp_path / "run", Engines(), steps=[(4, 8), (2, 7)])
    assert Tracker.steps == [4, 2]
