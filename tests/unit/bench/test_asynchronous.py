"""The same work at several lags: what is asked for, what is read, what does not count."""

from __future__ import annotations

import json

import pytest

from lora_moe_rl import cli
from lora_moe_rl.bench import asynchronous as bench
from lora_moe_rl.errors import BenchmarkError

EQUAL, MIXED = 16 * 8 * 16, 16 * 8 * (16 * 7 + 256) // 8


def record(number, seconds, tokens, lag, **more):
    kl = {"mismatch/kl": 0.1, "mismatch/kl_age_0": None} if lag else {"mismatch/kl": 2e-12}
    idle = {"idle/trainer": 0.5, "idle/engines": 0.25}
    return {"step": number, "time/step": seconds, "rollout/tokens": tokens, "replay/coverage": 1,
            "rollout/age_mean": lag, **idle, **kl, **more}  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """Stands for the runs: what each was asked, by name. The steps to warm up take long."""
    found = {}

    def run(name, folder, recipe, steps, settings):
        found[name] = dict(word.split("=", 1) for word in settings)
        lag = int(found[name]["schedule.lag"])
        tokens = EQUAL if name.startswith("equal") else MIXED
        seconds = [9.0] * bench.WARMUP + [2.0 / (1 + lag)] * (steps - bench.WARMUP)
        return [record(n, s, tokens, lag) for n, s in enumerate(seconds, start=1)]

    def simulations(folder, work, lag, from_lag_0):
        return {"simulated": 60.0, "simulated_off": 0.2 if lag == "4" else -0.1}

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(bench, "simulations", simulations)
    monkeypatch.setattr(bench, "busy_cores", lambda: 0.0)
    return found


def test_rates_are_of_steady_steps_and_over_those_of_lag_0(asked, tmp_path, capsys):
    words = ["--steps", "4", "--json", "--out", str(tmp_path), "rollout.engines=2"]
    assert cli.main(["bench", "async", *words]) == 1
    result = json.loads(capsys.readouterr().out)
    assert list(result["runs"]) == [f"{w}, lag {n}" for w in ("equal", "mixed") for n in (0, 1, 4)]
    assert result["runs"]["equal, lag 0"]["samples_per_second"] == pytest.approx(64)
    assert result["runs"]["mixed, lag 4"]["over_lag_0"] == pytest.approx(5)
    assert result["runs"]["mixed, lag 4"]["tokens_per_second"] == pytest.approx(MIXED * 2.5)
    simulated = {n: one["met"] for n, one in result["goals"].items() if "simulated" in n}
    assert [name for name, met in simulated.items() if not met] == [
        f"{work}, lag 4: simulated step against measured" for work in ("equal", "mixed")
    ]
    assert len(simulated) == 6
    others = {n: one for n, one in result["goals"].items() if n not in simulated}
    assert {n: (one["found"], one["limit"]) for n, one in others.items()} == {
        "equal, lag 1: samples a second over lag 0": (pytest.approx(2), 1.4),
        "mixed, lag 4: samples a second over lag 0": (pytest.approx(5), 2.0),
    }
    assert asked["equal, lag 0"]["schedule.lag"] == "0"
    assert asked["mixed, lag 4"]["refit.slots"] == "6"
    assert asked["mixed, lag 4"]["rollout.max_response_tokens"] == "256"
    assert all(one["rollout.engines"] == "2" for one in asked.values())


def test_one_prompt_in_eight_has_long_responses(tmp_path):
    bench.write_rows(tmp_path / "rows.jsonl", 256, 32)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [256, *[16] * 7] * 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"replay/coverage": 0.5}, "replay/coverage is 0.5, not 1"),
        ({"mismatch/kl_age_0": 1e-3}, "mismatch of its own tokens is 1.0e-03"),
        ({"rollout/tokens": 100}, "100 tokens a step, not about"),
    ],
)
def test_a_run_that_did_other_work_has_no_rate(monkeypatch, tmp_path, fault, message):
    monkeypatch.setattr(bench, "run", lambda *_: [record(1, 1.0, MIXED, 1, **fault)])
    with pytest.raises(BenchmarkError, match=f"mixed, lag 1: no rate to report: .*{message}"):
        bench.measure(tmp_path, "mixed", 1, 1, [])
