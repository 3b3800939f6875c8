"""What docs/adding shows is taken out of its pages, and used as a run does."""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_tokens import tokens_of
from torch.testing import assert_close
from written_policy import END
from written_policy import WrittenPolicy as SeveralTurns

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.plugins import ENVIRONMENTS
from lora_moe_rl.config.recipes import load_config, resolve
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import Details, Scores
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import load_function
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.telemetry.metrics import MetricsWriter
from tests.helpers.reward_calls import runner_of

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs/adding"
NAN = float("nan")


def toy(page: str | Path, folder: Path, place: int = 0) -> str:
    """A Python block of a page, the first one by default, written to a file."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (PAGES / page).read_text(), re.M | re.S)
    assert blocks, f"{page} shows no Python"
    path = folder / "my.py"
    path.write_text(blocks[place])
    return str(path)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/running.md"])
def test_a_recipe_of_the_docs_resolves_and_its_reward_is_found(tmp_path, page):
    config = resolve(load_config(toy(page, tmp_path)))
    assert (config.trainer.world_size, config.trainer.dp) == (4, 2)
    assert config.data.path == "prompts.jsonl"
    reward = load_function(config.reward.function)
    assert reward(completions=["12", "13"], answer=["12", "12"]) == [1.0, 0.0]


def test_what_the_docs_show_of_evaluations_and_data_sets_is_what_a_recipe_has(tmp_path):
    """Each in a folder of its own: Python imports a file once."""
    evaluation, data, generator = (tmp_path / name for name in ("evaluation", "data", "generator"))
    for folder in (evaluation, data, generator):
        folder.mkdir()
    evaluated = load_config(toy(ROOT / "docs/evaluation.md", evaluation)).eval
    assert (evaluated.every, evaluated.sets["aime"].samples) == (20, 16)
    drawn = load_config(toy(ROOT / "docs/data.md", data, place=1)).data.sets
    assert {name: one.ratio for name, one in drawn.items()} == {"math": 3, "code": 1}
    sums = load_function(f"{toy(ROOT / 'docs/data.md', generator)}:sums")
    first, second = (next(sums(seed)) for seed in (1, 2))
    assert first.keys() == {"prompt", "answer"} and first != second


def sample(length: int, finish_reason="stop") -> Sample:
    response = Segment.sampled([7] * length, np.zeros(length, np.float32), version=4)
    return Sample((Segment.given("user", [1, 2]), response), finish_reason, "7" * length)


def group_of(rewards: list[float]) -> Group:
    samples = [sample(length) for length in range(1, len(rewards) + 1)]
    return Group(Prompt(0, "?", [1, 2]), samples, None, np.array(rewards, np.float32))


@pytest.fixture
def best_of(tmp_path):
    file = toy("algorithm.md", tmp_path)
    return override(RunConfig(), [f"algorithm.name={file}:BestOf", "algorithm.keep=2"])


def test_the_algorithm_keeps_the_best_of_a_group(best_of):
    algorithm = algorithms.make(best_of)
    (signal,) = signals_of(algorithm, [group_of([0.1, NAN, 0.9, 0.5])])
    assert [a.tolist() for a in signal.advantages] == [[0], [0, 0], [1, 1, 1], [1, 1, 1, 1]]
    assert [w.tolist() for w in signal.weights] == [[1], [0, 0], [1, 1, 1], [1, 1, 1, 1]]


def test_the_algorithms_loss_is_the_likelihood_of_what_it_keeps(best_of):
    logprobs = torch.tensor([-1.0, -3.0, -2.0, -9.0], requires_grad=True)
    mask = torch.tensor([True, True, True, False])
    advantages = torch.tensor([1.0, 0.0, 1.0, NAN])
    algorithm = algorithms.make(best_of)
    found = algorithm.loss(tokens_of(logprobs, logprobs.detach(), advantages, mask))
    assert found.values.tolist() == [1.0, 0.0, 2.0, 0.0]
    assert set(found.metrics) == set(algorithm.metrics)
    found.values.sum().backward()
    assert_close(logprobs.grad, torch.tensor([-1.0, 0.0, -1.0, 0.0]))


def test_settings_of_ones_own_algorithm_reach_other_processes_and_a_resumed_run(best_of):
    assert pickle.loads(pickle.dumps(best_of)).algorithm.keep == 2
    saved = best_of.model_dump(mode="json")
    assert RunConfig.model_validate(saved).algorithm == best_of.algorithm


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.kept=2", "'algorithm.kept'"),
        ("algorithm.clip_low=0.1", "it is one of loss=clip_cov, loss=gspo, loss=ppo_clip"),
        ("algorithm.keep=0", "algorithm.keep=0 must be at least 1"),
    ],
)
def test_a_setting_that_ones_own_algorithm_lacks_is_refused(best_of, setting, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        override(best_of, [setting])


def test_what_is_no_algorithm_is_refused_by_name(tmp_path):
    file = toy("reward.md", tmp_path)
    with pytest.raises(ConfigError, match=r"no subclass of lora_moe_rl\.algorithms\.base\.Algo"):
        override(RunConfig(), [f"algorithm.name={file}:near"])


@pytest.mark.seconds  # imports Megatron
def test_a_loss_with_other_metrics_than_it_declares_is_refused(best_of):
    from lora_moe_rl.trainer.meter import Meter

    algorithm = algorithms.make(best_of)
    meter = Meter(None, is_last_stage=False, algorithm=algorithm)
    stands = torch.tensor([2, 0])
    for least in (-3.0, -5.0, -4.0):
        both = {"policy": torch.tensor([1.5, NAN]), "least_likely": torch.tensor([least, -9.0])}
        meter.add_metrics(both, stands)
    meter.add_metrics(both, torch.tensor([0, 0]))
    meter.settle()
    assert (meter.sums["loss/policy"], meter.extremes["least_likely"]) == (9.0, -5.0)
    with pytest.raises(ValueError, match=r"returned the metrics \['policy'\]; its algorithm decl"):
        meter.add_metrics({"policy": torch.zeros(2)}, stands)
    more = {name: torch.zeros(2) for name in (*algorithm.metrics, "surprise")}
    with pytest.raises(ValueError, match="surprise"):
        meter.add_metrics(more, stands)


def test_the_correction_weighs_tokens_by_its_ratio(tmp_path):
    file = toy("correction.md", tmp_path)
    name = f"algorithm.correction={file}:Halfway"
    config = override(RunConfig(), ["algorithm=rloo", name, "algorithm.halfway_max=1.5"])
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    rollout = torch.tensor([-1.0 - math.log(0.25), -1.0 - math.log(4.0), NAN])
    advantages, mask = torch.tensor([2.0, -1.0, 5.0]), torch.tensor([True, True, False])
    found = algorithms.make(config).loss(
        tokens_of(logprobs, logprobs.detach(), advantages, mask, rollout)
    )
    # Ratios 0.25 and 4, whose roots are 0.5 and 2, cut to 1.5.
    assert_close(found.values[:2], torch.tensor([-1.0, 1.5]))
    assert_close(found.metrics["weight"][:2], torch.tensor([0.5, 1.5]))
    found.values.sum().backward()
    assert_close(logprobs.grad, torch.tensor([-1.0, 1.5, 0.0]))


class WrittenPolicy:
    async def sample(self, token_ids, n):
        assert (token_ids, n) == ([1, 2], 3)
        return [sample(1), sample(4), sample(2)], "routes"


class WrittenRewards:
    async def score(self, prompt, samples):
        return Scores(np.array([1.0, 1.0, NAN], np.float32), ["the third failed"], Details())


async def test_the_environment_takes_its_cost_from_rewards(tmp_path):
    file = toy("environment.md", tmp_path)
    settings = [f"environment.name={file}:Costly", "environment.cost=0.125"]
    config = override(RunConfig(), [*settings, "algorithm.group_size=3"])
    made = ENVIRONMENTS.find(config.environment.name)(config, WrittenRewards(), tokenizer=None)
    group = await made.rollout(Prompt(0, "?", [1, 2]), WrittenPolicy())
    np.testing.assert_array_equal(group.rewards, [0.875, 0.5, NAN])
    assert (group.routes, group.failures) == ("routes", ["the third failed"])
    assert [len(sample.response_ids) for sample in group.samples] == [1, 4, 2]


class Letters:
    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) % 50 for letter in text]


async def test_the_environment_of_two_turns_asks_again_where_the_answer_was_wrong(tmp_path):
    file = toy("environment.md", tmp_path, 1)
    settings = [f"environment.name={file}:SecondTry", "rollout.max_response_tokens=30"]
    config = override(RunConfig(), [*settings, "algorithm.group_size=3"])
    made = ENVIRONMENTS.find(config.environment.name)(config, WrittenRewards(), Letters())
    policy = SeveralTurns([[7, 7, END], [8, END]])
    for answer, turns in (("77", 1), ("8", 2)):
        prompt = Prompt(0, "1+1=", [1, 2], {"answer": answer})
        group = await made.rollout(prompt, policy)
        assert group.counts == {"second_tries": 3 * (turns - 1), "forks": 0}
        for sample in group.samples:
            assert len(sample.segments) == 2 * turns
            assert sample.mask.sum() == 3 + 2 * (turns - 1)
        assert group.routes.num_samples == 3 and group.routes.first_missing is None


def texts(*completions: str) -> list[Sample]:
    prompt, said = Segment.given("user", [1]), Segment.sampled([2], np.zeros(1), version=0)
    return [Sample((prompt, said), "stop", text) for text in completions]


@pytest.mark.seconds  # starts processes
async def test_the_reward_is_called_with_columns_and_a_failure_is_no_reward(tmp_path):
    config = override(RunConfig(), [f"reward.function={toy('reward.md', tmp_path)}:near"])
    with runner_of(config.reward.function, config.reward.timeout_s) as runner:
        samples = texts("12", "13", "15", "x")
        rewards, failures, _ = await runner.score(Prompt(0, "?", [1], {"answer": "12"}), samples)
        assert (rewards.tolist(), failures) == ([1.0, 0.5, 0.0, 0.0], [])
        rewards, failures, _ = await runner.score(Prompt(1, "?", [1], {"answer": "pi"}), samples)
        assert np.isnan(rewards).all() and failures == []
        rewards, failures, _ = await runner.score(Prompt(2, "?", [1]), samples)
        assert np.isnan(rewards).all() and len(failures) == 4 and "it takes answer" in failures[0]


def test_the_tracker_gets_each_step_and_is_told_the_end(tmp_path):
    file = toy("tracker.md", tmp_path)
    settings = [f"tracker.name={file}:OneMetric", "tracker.metric=mismatch/kl"]
    run = override(RunConfig(), [f"logging.run_dir={tmp_path / 'run'}", *settings])
    config = resolve(run)
    with RunDir(config, False) as run_dir:
        with MetricsWriter(run_dir, config) as metrics:
            metrics.write({"step": 1, "mismatch/kl": 0.25})
            metrics.write({"step": 2, "mismatch/kl": NAN})
        with pytest.raises(ZeroDivisionError), MetricsWriter(run_dir, config):
            _ = 1 / 0
    assert (run_dir.path / "one_metric.txt").read_text() == "1 0.25\n2 nan\ndone\nfailed\n"
