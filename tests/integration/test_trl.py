"""A whole run with an environment of TRL's kind, with real engines."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from cli_run import CliRun

from lora_moe_rl.files.jsonl import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SAMPLES = 16


def started(tmp_path: Path, *more: str) -> Path:
    """The folder of a run that has ended well, and has left no process."""
    folder, recipe = tmp_path / "run", Path(__file__).with_name("trl_recipe.py")
    settings = f"logging.samples_per_step={SAMPLES}", f"logging.run_dir={folder}"
    run = CliRun("train", recipe, *settings, *more, output=tmp_path / "out")
    try:
        assert run.finish(800) == 0, run.output
        assert not run.leftovers()  # the environments' processes among them
    finally:
        run.end()
    return folder


def test_a_run_with_an_environment_of_trl_gets_its_rewards_and_leaves_no_process(tmp_path):
    folder = started(tmp_path)
    for step, record in enumerate(read_jsonl(folder / "metrics.jsonl"), start=1):
        assert record["mismatch/kl"] <= 1e-6 and record["replay/coverage"] == 1
        assert record["environment/conversations"] == SAMPLES and record["reward/failed"] == 0
        assert record["environment/tool_calls"] > 0 and record["environment/retried"] == 0
        assert record["reward/SevenMore"] == pytest.approx(record["reward/mean"])
        samples = [one for one in read_jsonl(folder / "samples.jsonl") if one["step"] == step]
        assert {one["reward"] for one in samples} <= {0, 0.5, 1}


def groups_of(folder: Path) -> list[list]:
    """Of each group its samples, as they are on record, with what is known of their tokens."""
    samples, tokens = (read_jsonl(folder / f"{name}.jsonl") for name in ("samples", "tokens"))
    groups: dict[tuple[int, int], list] = defaultdict(list)
    for sample, known in zip(samples, tokens, strict=True):
        groups[sample["step"], sample["drawn"]].append((sample, known))
    return [*groups.values()]


def returns_of(turns: list[float], gamma: float) -> list[float]:
    return [sum(r * gamma**i for i, r in enumerate(turns[k:])) for k in range(len(turns))]


def normalized(own: float, others: list[float]) -> float:
    spread = statistics.stdev(others) if len(others) > 1 else 0.0
    return (own - statistics.mean(others)) / (spread + 1e-6) if spread else 0.0


def test_rewards_of_turns_become_advantages_of_turns_in_a_real_run(tmp_path):
    """What the samples on record say was earned, turn by turn, worked out anew; and the trainer had
    just those advantages."""
    factory = Path(__file__).with_name("trl_recipe.py")
    folder = started(
        tmp_path,
        f"environment.factory={factory}:ByTurn",
        "algorithm.advantage=turns",
        "algorithm.turn_gamma=0.5",
        "logging.tokens=true",
    )
    compared = 0
    for group in groups_of(folder):
        assert len(group) == 4
        earned = [sample["turn_rewards"] for sample, _ in group]
        for (sample, _), turns in zip(group, earned, strict=True):
            assert {*turns} <= {0, 0.5} and sum(turns) == sample["reward"]
        ahead = [returns_of(turns, 0.5) for turns in earned]
        for (sample, known), own in zip(group, ahead, strict=True):
            wanted, turn = [], 0
            whole = {"author": "policy", "tokens": sample["tokens"]}
            for part in sample.get("segments", [whole]):
                if part["author"] != "policy":
                    wanted += [0.0] * part["tokens"]
                    continue
                here = normalized(own[turn], [one[turn] for one in ahead if len(one) > turn])
                compared += here != 0
                wanted += [here] * part["tokens"]
                turn += 1
            left_out = [weight == 0 for weight in known["weights"]]
            wanted = [0.0 if out else one for one, out in zip(wanted, left_out, strict=True)]
            assert known["advantages"] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert compared > 8
    for record in read_jsonl(folder / "metrics.jsonl"):
        assert record["mismatch/kl"] <= 1e-6 and record["replay/coverage"] == 1
        assert record["reward/by_turn"] == 1 and 0 <= record["reward/turns_alone"] < 0.5
        assert record["loss/policy"] != 0


def turns_of(sample: dict, known: dict) -> list[dict]:
    """Of each turn that is in the loss its state, where its tokens stand, and what it has earned
    with those after it: the state is what was told, or else the text that was shown."""
    parts = sample.get("segments", [{"author": "policy", "tokens": sample["tokens"]}])
    shown, found, start = "prompt", [], 0
    said = iter(sample.get("messages", [{"role": "assistant"}]))
    ahead = returns_of(sample["turn_rewards"], 0.95)
    states = sample.get("turn_states", [None] * len(ahead))
    for part in parts:
        message, stop = next(said), start + part["tokens"]
        if part["author"] == "policy":
            assert message["role"] == "assistant"
            told, earned = states[len(found)], ahead[len(found)]
            state = shown if told is None else ("told", told)
            found.append({"state": state, "at": range(start, stop), "earned": earned})
        else:
            shown = message["content"]
        start = stop
    assert start == sample["tokens"] and len(found) == len(ahead) == len(states)
    return [one for one in found if any(known["weights"][at] for at in one["at"])]


def test_turns_in_the_same_state_are_compared_in_a_real_run(tmp_path):
    """Worked out anew from the texts and rewards on record: the trainer had just those advantages,
    the samples' and half of the turns'."""
    folder = started(
        tmp_path,
        f"environment.factory={Path(__file__).with_name('trl_recipe.py')}:ByState",
        "algorithm.advantage=gigpo",
        "algorithm.step_advantage_w=0.5",
        "logging.tokens=true",
    )
    told = shown = again = 0
    for group in groups_of(folder):
        rewards = [sample["reward"] for sample, _ in group]
        turns = [turns_of(sample, known) for sample, known in group]
        states = defaultdict(list)
        for one in (one for several in turns for one in several):
            states[one["state"]].append(one["earned"])
        assert len(states["prompt"]) == len(group) == 4
        told += sum(len(several) > 1 for state, several in states.items() if state[0] == "told")
        shown += sum(len(several) > 1 for state, several in states.items() if state[0] != "told")
        for (sample, known), own in zip(group, turns, strict=True):
            again += len({one["state"] for one in own}) < len(own)
            wanted = [0.0] * sample["tokens"]
            for one in own:
                here = normalized(sample["reward"], rewards)
                here += 0.5 * normalized(one["earned"], states[one["state"]])
                for at in one["at"]:
                    wanted[at] = here
            assert known["advantages"] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert told and shown > 8 and again  # states were shared, some by turns of one sample
    for record in read_jsonl(folder / "metrics.jsonl"):
        assert record["mismatch/kl"] <= 1e-6 and record["replay/coverage"] == 1
        assert 0 < record["reward/turns_alone"] < 0.8 and record["reward/turns_alike"] > 1
        assert record["loss/policy"] != 0
