import json

import numpy as np
import pytest

from lora_moe_rl.bench import replay, replay_cost, replay_effect, replay_report
from lora_moe_rl.bench.report import conclude
from lora_moe_rl.kernels.route_codec import unpack_array
from lora_moe_rl.router_replay.packed import PackedRoutes


def test_bytes_of_published_models(tmp_path):
    found = replay.measure_bytes(tmp_path)
    assert {name: row["packed"] for name, row in found.items()} == {
        "Qwen3-30B-A3B": 336,
        "Qwen3-235B-A22B": 658,
        "DeepSeek-V3": 464,
        "Kimi-K2": 540,
        "Moonlight": 117,
    }
    assert found["Kimi-K2"]["uint8"] is None and found["DeepSeek-V3"]["uint8"] == 464
    assert found["Kimi-K2"]["int16"] == 960 and found["Kimi-K2"]["int32"] == 1920


def test_figures_come_with_their_goals_and_exit_code(capsys, monkeypatch):
    monkeypatch.setattr(replay, "CODEC_S", 0.0)
    monkeypatch.setattr(replay, "CODEC_TOKENS", 256)
    code = replay.main(["--only", "bytes,codec", "--json"])
    result = json.loads(capsys.readouterr().out)
    goals = result["goals"].values()
    assert {"bytes", "codec"} <= set(result) and len(goals) == 2
    assert code == (0 if all(goal["met"] for goal in goals) else 1)
    for row in result["codec"].values():
        assert row["pack_gb_s"] > 0 and row["unpack_gb_s"] > 0


def result_of(**changes) -> replay.Result:
    found = {
        "busy_cores_before": 0.0,
        "codec": {"a": {"pack_gb_s": 2.0, "unpack_gb_s": 3.0}},
        "step": {"share": 0.01, "seconds": {"pack": 1e-3}, "added": 1e-3, "step": 0.1,
                 "pair": {"with": 0.2, "without": 0.2}, "tokens": 9},
        "kimi": {"total": 0.5, "seconds": {"check": 0.5}, "layers": 8, "samples": 2, "tokens": 3,
                 "bytes": 10, "cpu_seconds": 0.6},
        "effect": {"on_over_off": dict.fromkeys(replay_report.MISMATCH, 0.1), "tokens": 3,
                   "on": dict.fromkeys(replay_report.MISMATCH, 0.1), "parameters": 1e6,
                   "off": dict.fromkeys(replay_report.MISMATCH, 1.0), "disagreement": 0.1,
                   "shape": replay_effect.SHAPE},
    }  # fmt: skip
    for section, values in changes.items():
        found[section] = found[section] | values
    return found | {"goals": replay.goals(found)}


@pytest.mark.parametrize(
    "missed",
    [
        {"codec": {"b": {"pack_gb_s": 0.9, "unpack_gb_s": 3.0}}},
        {"codec": {"b": {"pack_gb_s": 2.0, "unpack_gb_s": 0.9}}},
        {"step": {"share": 0.021}},
        {"kimi": {"total": 1.1}},
        {"effect": {"on_over_off": dict.fromkeys(replay_report.MISMATCH, 0.1) | {"kl": 0.6}}},
        {"effect": {"on_over_off": {"kl": 0.1, "mean_abs_logprob_diff": float("nan")}}},
    ],
)
def test_each_goal_can_be_missed(missed):
    assert all(goal["met"] for goal in result_of()["goals"].values())
    assert sum(not goal["met"] for goal in result_of(**missed)["goals"].values()) == 1


def test_a_missed_goal_is_shown(capsys):
    conclude(result_of(kimi={"total": 1.1}), False, replay_report.parts)
    shown = capsys.readouterr().out
    assert "seconds a rank, Kimi-K2 at PP 8: 1.1, at most 0.5: missed" in shown
    assert shown.count(": met") == 5


def test_a_stopwatch_adds_up_and_leaves_what_it_watched_as_it_was():
    class Thing:
        def call(self) -> int:
            return 7

    watch = replay_cost.Stopwatch()
    stock = Thing.call
    with watch.watching(("call", Thing, "call")):
        assert [Thing().call() for _ in range(3)] == [7, 7, 7]
    assert Thing.call is stock and watch.seconds["call"] > 0


def test_synthetic_routes_are_those_of_one_stage(monkeypatch):
    monkeypatch.setattr(replay_cost, "KIMI_SAMPLES", 3)
    monkeypatch.setattr(replay_cost, "KIMI_TOKENS", 5)
    layers = tuple(range(1, 9))
    sent, nbytes, _ = replay_cost._kimi_routes(lambda part: part, layers)
    assert sent.num_samples == 3 and len(sent.layers) == 60 and sent.pieces[0] == layers
    assert nbytes > 3 * 5 * 72  # rows and headers
    table = PackedRoutes.from_bytes(sent.blocks[1].parts[0]).unpack()
    assert table.ids.shape == (5, 8, 8) and table.valid.all()
    assert len(np.unique(table.ids)) > 100
    again = PackedRoutes.from_bytes(sent.blocks[1].parts[0])
    assert np.array_equal(unpack_array(again.rows, again.layout), table.ids)


def test_mismatch_is_of_the_response_tokens():
    rollout = [np.array([-1.0, -2.0], np.float32), np.array([-1.0], np.float32)]
    trainer = [np.array([-9.0, -1.5, -2.0], np.float32), np.array([-9.0, -2.0], np.float32)]
    found = replay_effect.compare(rollout, trainer)
    assert found["mean_abs_logprob_diff"] == pytest.approx(0.5)
    assert found["max_abs_logprob_diff"] == 1.0
    assert found["off_by_2x"] == pytest.approx(1 / 3)
