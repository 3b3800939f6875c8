"""The arithmetic of `bench refit`, its gate, and the plan of Kimi-K2."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lora_moe_rl.bench import refit, refit_plan
from lora_moe_rl.bench.refit_report import GOALS, parts
from lora_moe_rl.bench.report import conclude
from lora_moe_rl.cli import main
from lora_moe_rl.errors import BenchmarkError

WAYS = (
    "disk", "in_memory", "publish", "publish/send", "publish/slot", "publish/stage",
    "publish/commit", "write", "memcpy",
)  # fmt: skip


def make_result(**milliseconds: float) -> dict:
    result = {
        "base": {"layers": 48, "experts": 128, "hidden_size": 128, "moe_intermediate_size": 64},
        "adapter": {"rank": 16, "tensors": 37248, "bytes": 115_000_000},
        "trainer": "pp2", "cores": 2, "busy_cores_before": 0.0, "rounds": 5,
        "logprobs": {"difference": 0.0, "effect": 1.2},
        "seconds": {
            way: dict.fromkeys(("median", "best"), milliseconds.get(way, 1) / 1e3) for way in WAYS
        },
        "transfers_a_layer": {"all": 14, "most_on_a_link": 14},
        "memory": {"extra": 50, "shared": 100, "largest_part": 100},
        "generation": {
            "ratio": 0.95, "tokens_per_second_before": 100, "tokens_per_second_around": 95,
            "requests": 12,
        },
        "kimi_k2": {
            "rank": 32, "trainer_ranks": 512, "engine_ranks": 16, "seconds": 0.1,
            "transfers": 25184, "bytes": 1, "most_bytes_received": 1,
        },
    }  # fmt: skip
    return result | {"goals": {name: judge(result) for name, judge in GOALS.items()}}


@pytest.mark.parametrize("on_cpu", [True, False])
def test_no_graphs_are_captured_on_gpus(monkeypatch, tmp_path, on_cpu):
    monkeypatch.setattr(refit, "vllm_on_cpu", lambda: on_cpu)
    assert refit.make_config(tmp_path, "ep2").rollout.enforce_eager is not on_cpu


def test_goals_are_judged_by_medians_and_in_their_direction(capsys):
    times = {"memcpy": 8, "write": 20, "publish": 49, "disk": 2450, "in_memory": 700}
    result = make_result(**times)
    found = {name: (goal["found"], goal["met"]) for name, goal in result["goals"].items()}
    assert found["write / memcpy"] == (2.5, True)
    assert found["publish / memcpy"] == (6.125, False)
    assert found["vLLM's files / publish"] == (pytest.approx(50), True)
    assert found["vLLM in memory / publish"] == (pytest.approx(700 / 49), False)
    assert found["extra memory / largest part"] == (0.5, True)
    assert found["tokens/s around a refit / before"] == (0.95, True)
    conclude(result, False, parts)
    printed = capsys.readouterr().out
    assert printed.count("missed") == 2
    assert "2,450.0" in printed
    assert "busy" not in printed


def test_the_pages_have_the_goals_that_the_command_judges_by():
    docs = Path(__file__).parents[3] / "docs"
    goals = {name: one["limit"] for name, one in make_result()["goals"].items()}
    row = r"^\| ([^|]+?) \| [^|]+ \| [<>]= ([\d.]+) \|"
    told = dict(re.findall(row, (docs / "refit.md").read_text(), re.M))
    shown = {"transfers a layer, trainer EP 2": "transfers a layer"}
    shown["extra memory while receiving / largest part"] = "extra memory / largest part"
    shown["tokens/s in the second around a refit / before"] = "tokens/s around a refit / before"
    assert {shown.get(name, name): float(limit) for name, limit in told.items()} == goals
    figures = (docs / "figures.md").read_text()
    for words, name in (
        ("publish over a copy of the same bytes", "publish / memcpy"),
        ("vLLM's in-memory path over publish", "vLLM in memory / publish"),
    ):
        (limit,) = re.findall(rf"^\| {words} \| [^|]+ \| ([\d.]+) \|", figures, re.M)
        assert float(limit) == goals[name]


def test_a_rate_takes_tokens_between_outputs_to_grow_evenly():
    events = [(t / 4, 2) for t in range(41)]  # 8 tokens a second, in steps of two
    assert refit.rate(events, 2.1, 3.1) == pytest.approx(8)
    stalled = [(t if t <= 5 else t + 0.5, n) for t, n in events]
    assert refit.rate(stalled, 5.0, 6.0) == pytest.approx(4)
    with pytest.raises(BenchmarkError, match="ran for 10.0 s only"):
        refit.rate(events, 9.5, 10.5)


def test_the_plan_of_kimi_k2_is_complete():
    found = refit_plan.kimi_k2()
    assert found["transfers"] > 61 * 14
    assert found["seconds"] < 5


@pytest.mark.parametrize(("ours", "base"), [(0.5, 0.0), (1.0, 1.0)])
def test_other_logprobs_than_vllms_own_give_no_figures(ours, base):
    """Another answer than vLLM's own, and an adapter that changes nothing."""
    bench = object.__new__(refit.Bench)
    bench.expected, bench.base = [np.array([1.0])], [np.array([base])]
    with pytest.raises(BenchmarkError, match="no seconds to report: logprobs of ours differ by"):
        bench._compare("ours", [np.array([ours])])


def test_the_command_knows_its_layouts(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "refit", "--trainer", "tp2"])
    assert "invalid choice: 'tp2'" in capsys.readouterr().err
