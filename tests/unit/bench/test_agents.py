"""What is said of trajectories by two servers, and when nothing is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from lora_moe_rl.bench import agents
from lora_moe_rl.bench.agents import OURS, SAID, THEIRS, TURNS, Asked, Round, Spent
from lora_moe_rl.bench.report import all_met
from lora_moe_rl.errors import BenchmarkError

TOKENS = [(100 + 60 * turn, SAID) for turn in range(TURNS)]
NUMBERS = {
    "turns": 4.0 * TURNS, "forks": 0.0, "engine_seconds": 7.6, "route_bytes": 3200.0,
    "full_route_bytes": 32000.0, "asked_of_cache": 1000.0, "had_by_cache": 800.0,
}  # fmt: skip


def rounds(theirs: float = 2.0, tokens: list = TOKENS) -> dict[str, list[Round]]:
    """Two rounds of two trajectories; those of `vllm serve` take `theirs` seconds each."""
    return {
        OURS: [Round([Spent(TOKENS, 2.0)] * 2, 4.0)] * 2,
        THEIRS: [Round([Spent(tokens, theirs)] * 2, 2 * theirs)] * 2,
    }


def of(theirs: float = 2.0, **numbers: float) -> dict:
    counts = {OURS: NUMBERS | numbers, THEIRS: NUMBERS}
    return agents.figures(rounds(theirs), counts)


def test_shares_rates_and_the_ratio_are_of_the_seconds_of_both():
    found = of()
    assert found["outside_the_engine"] == pytest.approx(1 - 7.6 / 8)
    assert found["ratio"] == 1 and all_met(found)
    assert found["servers"][OURS] == {
        "tokens_per_second": 4 * TURNS * SAID / 8, "cache_hit_rate": 0.8
    }  # fmt: skip
    assert found["route_bytes_of_a_turn"] == 100 and found["full_route_bytes_of_a_turn"] == 1000
    assert not all_met(of(theirs=1.7)) and not all_met(of(engine_seconds=7.0))
    assert all_met(of(theirs=1.81))


def test_other_tokens_than_with_the_other_server_are_no_figures():
    agents.check(rounds(), 0)
    with pytest.raises(BenchmarkError, match="other numbers of tokens"):
        agents.check(rounds(tokens=[(101, SAID), *TOKENS[1:]]), 0)
    with pytest.raises(BenchmarkError, match="1 forks"):
        agents.check(rounds(), 1)
    short = {
        name: [Round([Spent([(100, SAID - 1)], 1.0)], 1.0)] for name in (OURS, THEIRS)
    }  # fmt: skip
    with pytest.raises(BenchmarkError, match=f"turns of \\[{SAID - 1}\\] tokens"):
        agents.check(short, 0)


@pytest.mark.parametrize(("trajectories", "rounds"), [(256, 4), (10, 4), (3, 4), (7, 1)])
def test_as_many_trajectories_are_run_as_are_asked_for(trajectories, rounds):
    tasks = agents.tasks_of_rounds(trajectories, rounds)
    assert [task for of in tasks for task in of] == list(range(trajectories))
    sizes = [len(of) for of in tasks]
    assert len(sizes) == min(rounds, trajectories) and max(sizes) - min(sizes) <= 1


@pytest.mark.seconds  # imports the endpoint
async def test_both_servers_are_warm_with_as_many_at_once_as_are_measured(monkeypatch):
    from lora_moe_rl.bench import agents_servers

    class Engine:
        class counted:
            remote = staticmethod(lambda: asyncio.sleep(0, {"forks": 0.0}))

    played = []

    async def play(asked, tasks, at_once):
        played.append((asked, list(tasks), at_once))
        return Round([Spent(TOKENS, 1.0) for _ in tasks], 1.0)

    monkeypatch.setattr(agents, "played", play)
    monkeypatch.setattr(agents_servers, "counts_of_server", lambda root: {})
    both = {OURS: Asked("ours", "m", True), THEIRS: Asked("theirs", "m", False)}
    asked = SimpleNamespace(trajectories=5, rounds=2, at_once=3)
    rounds, _ = await agents._rounds(both, Engine, asked)
    assert [(len(tasks), at_once) for _, tasks, at_once in played[:2]] == [(3, 3), (3, 3)]
    assert [sum(len(one.spent) for one in rounds[name]) for name in both] == [5, 5]


def test_what_a_tool_answers_has_as_many_tokens_each_time():
    assert {len(agents.tool(said)) for said in ("", "abc 1", "x" * SAID)} == {agents.TOLD}


@pytest.mark.seconds  # imports the endpoint
def test_the_caches_counts_are_those_of_all_engines_in_vllms_metrics():
    from lora_moe_rl.bench.agents_servers import cache_counts

    text = """# HELP vllm:prefix_cache_hits_total Prefix cache hits
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 20.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 7.0
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e+09
"""
    assert cache_counts(text) == {"asked_of_cache": 120.0, "had_by_cache": 64.0}
