import dataclasses
import math

import numpy as np
import pytest

from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.verify.comparisons import Distance, largest_scaled
from lora_moe_rl.verify.replay_ranks import Replayed, _Calls, compare
from lora_moe_rl.verify.replay_record import Recording
from lora_moe_rl.verify.replay_reference import Expected
from lora_moe_rl.verify.replay_report import COMPARED, RecordRow, ReplayRow, Report, allowed
from lora_moe_rl.verify.replay_run import own_rounding
from lora_moe_rl.verify.replay_spread import counted
from lora_moe_rl.verify.replay_tables import moved, permuted, rows_of, shifted, shifts_of

LAYERS, EXPERTS, TOP_K = (1, 3, 4), 8, 2


@pytest.fixture
def table() -> RouteTable:
    rng = np.random.default_rng(0)
    rows = [
        rng.permuted(np.tile(np.arange(EXPERTS), (n, len(LAYERS), 1)), axis=-1)[..., :TOP_K]
        for n in (9, 4, 6)
    ]
    return RouteTable.build(rows, [9, 4, 6], LAYERS, EXPERTS, TOP_K)


def test_other_experts_are_valid_and_no_router_s_choice(table):
    other = permuted(table, seed=3)
    other.check()
    assert (other.ids != table.ids).all()
    assert moved(table, other) > 0.5
    assert moved(table, table) == 0


def test_a_shift_by_a_token_stays_within_the_sample(table):
    wrong = shifted(table, "token")
    for (ids, _), (before, _) in zip(zip(*rows_of(wrong)), zip(*rows_of(table)), strict=True):
        assert (ids[1:] == before[:-1]).all() and (ids[0] == before[-1]).all()


def test_a_shift_by_a_layer_gives_every_layer_its_neighbour_s(table):
    wrong = shifted(table, "layer")
    assert (wrong.ids[:, 1:] == table.ids[:, :-1]).all()
    assert moved(table, wrong) > 0


def test_one_wrong_expert_is_one_id_and_can_be_replayed(table):
    wrong = shifted(table, "expert")
    wrong.check()
    assert (wrong.ids != table.ids).sum() == 1


def test_errors_are_of_the_last_tokens_and_a_nan_is_one():
    got = [np.array([9.0, -1.0, -4.0]), np.array([-2.0])]
    assert largest_scaled(got, [np.array([-1.0, -2.0]), np.array([-2.5])]) == 1.0
    assert np.isnan(largest_scaled(got, [np.array([-1.0, np.nan]), np.array([-2.0])]))


def maps_of(table: RouteTable, column: int, rows: np.ndarray) -> np.ndarray:
    chosen = np.zeros((len(rows), EXPERTS), bool)
    np.put_along_axis(chosen, table.ids[np.maximum(rows, 0), column].astype(int), True, axis=1)
    return chosen


def used(table: RouteTable, installed: RouteTable, again: int = 0, recompute: bool = False):
    """What is found of two micro-batches, the second one padded, with `installed` in use."""
    micro_batches = [np.arange(13), np.array([*range(13, 19), -1, -1])]
    calls = {
        layer: _Calls(
            [maps_of(installed, column, rows) for rows in micro_batches],
            [maps_of(installed, column, rows) for rows in micro_batches[:again]],
        )
        for column, layer in enumerate(LAYERS)
    }
    return compare(micro_batches, calls, Replayed("", [], installed, table), recompute)


def test_what_dispatchers_were_given_is_compared_with_the_table(table):
    found = used(table, table)
    assert found.wrong == 0 and found.seen.all() and found.routes == table.ids.size
    for by, least in (("token", 10), ("layer", 10), ("expert", 1)):
        assert used(table, shifted(table, by)).wrong >= least
    assert used(table, shifted(table, "expert")).wrong == 1


def test_a_difference_names_token_layer_expected_and_used(table):
    (line,) = used(table, shifted(table, "expert")).first
    expected = sorted(table.ids[4, 1].tolist())
    assert line.startswith(f"sample 0, token 4, layer 3: expected {expected}, used [")


def test_recomputation_must_run_every_micro_batch_again(table):
    assert used(table, table, again=2, recompute=True).routes == 2 * table.ids.size
    with pytest.raises(RuntimeError, match="ran 1 times for 2 micro-batches"):
        used(table, table, again=1, recompute=True)
    with pytest.raises(RuntimeError, match="recomputed without being asked"):
        used(table, table, again=2)


def test_rows_that_are_not_valid_are_not_compared(table):
    table.valid[4, 1] = False
    found = used(table, shifted(table, "expert"))
    assert found.wrong == 0 and found.routes == table.ids.size - TOP_K


FINE = Distance(1e-6, 1e-7)
PLAIN = dict.fromkeys(COMPARED, allowed(1e-5, None))


def passing() -> ReplayRow:
    caught = {"token": (9, 0.1, "a"), "layer": (9, 0.1, "a"), "expert": (1, 0.01, "a")}
    return ReplayRow("tp2", 2, routes=10, errors=dict.fromkeys(COMPARED, FINE), caught=caught)


@pytest.mark.parametrize(
    "change",
    [
        {"routes": 0},
        {"unseen": 1},
        {"wrong": 1},
        {"errors": dict.fromkeys(COMPARED, FINE) | {"vLLM": Distance(2e-5, 1e-7)}},
        {"errors": dict.fromkeys(COMPARED, FINE) | {"float64": Distance(9e-6, 2e-6)}},
        {"errors": dict.fromkeys(COMPARED, FINE) | {"other experts": Distance(math.nan, 1e-7)}},
        {"errors": {"vLLM": FINE}},
        {"allowed": PLAIN | {"vLLM": Distance(math.nan, math.nan)}},
        {"failure": "a rank died"},
        {"caught": {"token": (9, 0.1, "a")}},
        {"caught": {"token": (0, 0.1, "a"), "layer": (9, 0.1, "a"), "expert": (1, 0.1, "a")}},
        {"caught": {"token": (9, 0.1, "a"), "layer": (9, 0.1, "a"), "expert": (1, 9e-5, "a")}},
        {"caught": {"token": (9, 0.1, "a"), "layer": (9, 0.1, "a"), "expert": (1, 0.1, None)}},
        {"caught": passing().caught | {"layer": (9, float("nan"), "a")}},
    ],
)
def test_a_layout_passes_only_without_any_fault(change):
    row = passing()
    assert row.passed
    for name, value in change.items():
        setattr(row, name, value)
    assert not row.passed


@pytest.mark.parametrize("moved", [0.0, float("nan")])
def test_other_experts_that_are_the_recorded_ones_show_nothing(moved):
    assert Report("", [], FINE, PLAIN, 0.9, [passing()], 0.0).passed
    report = Report("", [], FINE, PLAIN, moved, [passing()], 0.0)
    assert not report.passed
    assert report.explanations() == [
        "no route of the other experts differs from the record: they show nothing"
    ]


def test_every_data_parallel_rank_must_have_sampled_what_was_asked_of_it():
    assert counted(np.array([12, 4]), np.array([12, 4])) == ("ranks sampled 12 and 4 tokens", None)
    _, failure = counted(np.array([16, 0]), np.array([12, 4]))
    assert failure == "ranks sampled 16 and 0 tokens instead of 12 and 4"
    _, failure = counted(np.array([16, 0]), np.array([16, 0]))
    assert failure == "ranks sampled 16 and 0 tokens: one was asked for nothing"


def test_a_record_passes_only_when_its_condition_was_met(table):
    def row(**changes) -> RecordRow:
        return RecordRow(
            Recording("preemption", table=table), **{"routes": 9, "error": FINE, **changes}
        )

    assert row().passed
    tie = row(ties=["token 3"])
    assert tie.passed
    notes = Report("", [tie], FINE, PLAIN, 1.0, [], 0.0).notes()
    assert notes == ["preemption: a tie within rounding: token 3"]
    assert not row(differences=["token 3"]).passed
    assert not row(error=Distance(1e-4, 1e-7)).passed
    assert not row(error=Distance(1e-6, 1e-5)).passed
    assert not row(error=None).passed and not row(routes=0).passed
    valid = table.valid.copy()
    valid[2, 0] = False
    holes = row()
    holes.recording.table = dataclasses.replace(table, valid=valid)
    assert not holes.passed and "of the routes were not recorded" in next(holes.faults())
    unmet = row()
    unmet.recording.failure = "vLLM counts no preemption"
    assert not unmet.passed
    assert RecordRow(Recording("prefix hits", absent="no cache")).passed


def test_what_rounding_does_to_float32_is_allowed_and_little_more():
    """By hand: three times Hugging Face's own, and never less than the tolerance."""
    least = allowed(1e-5, None)
    assert (least.worst, least.most) == pytest.approx((1e-5, 1e-6), rel=1e-12)
    assert allowed(1e-5, Distance(3e-6, 3e-7)) == least
    more = allowed(1e-5, Distance(2e-5, 5e-7))
    assert (more.worst, more.most) == pytest.approx((6e-5, 1.5e-6), rel=1e-12)
    assert Distance(5.9e-5, 1.4e-6).within(more)
    assert not Distance(6.1e-5, 1e-7).within(more) and not Distance(1e-6, 1.6e-6).within(more)
    assert not Distance(math.nan, 1e-7).within(more)


def test_what_rounding_may_do_is_measured_on_the_tokens_that_are_compared():
    """By hand: of two samples, each of nine tokens of a prompt and one that was sampled. Rounding
    does ten times as much to those that were sampled."""
    exact = [np.full(10, -1.0), np.full(10, -1.0)]
    single = [one.copy() for one in exact]
    for sample, off in zip(single, (1e-6, 2e-6), strict=True):
        sample[:9] += 1e-7
        sample[9] += off
    single[1][3] += 5e-5  # a sensitive token, which any of them might have been
    other = [one + 3e-7 for one in exact]
    rows = [RecordRow(Recording("a"), rounding=np.array([1e-6])),
            RecordRow(Recording("b"), rounding=np.array([2e-6])),
            RecordRow(Recording("c", absent="no cache"))]  # fmt: skip
    found = own_rounding(rows, [Expected((exact, exact), (single, other))])
    worst = pytest.approx(5.01e-5, rel=1e-3)
    assert found.all is not None and found.all.worst == worst
    assert found.records[2] is None
    a, b = found.records[:2]
    assert a is not None and (a.worst, a.most) == (worst, pytest.approx(1e-6))
    assert b is not None and (b.worst, b.most) == (worst, pytest.approx(2e-6))
    most = {name: one and one.most for name, one in found.replays.items()}
    assert most["vLLM"] == pytest.approx(1.9e-6)  # of the two that were sampled
    assert most["float64"] == pytest.approx(1.1e-6, rel=0.02)  # of all twenty
    assert most["other experts"] == pytest.approx(3e-7, rel=1e-3)
    blind = Expected((exact, exact), (exact, exact))
    blind.single = blind.exact
    nothing = own_rounding(rows, [blind])
    assert nothing.all is None and nothing.records == [None] * 3
    assert set(nothing.replays.values()) == {None}


def test_a_wrong_table_must_move_ten_times_what_rounding_may():
    row = dataclasses.replace(passing(), allowed=dict.fromkeys(COMPARED, Distance(2e-3, 1e-4)))
    assert not row.passed  # its one wrong expert moved 1e-2
    assert list(row.faults()) == [
        "a table that is wrong by one expert moved no logprob by more than 0.01: at least 2e-02 is "
        "asked"
    ]


def test_distances_keep_a_nan_and_the_worse_of_two():
    found = Distance.of(np.arange(10.0), np.array([1000.0]))
    assert found == Distance(1000.0, 9.0)
    assert found.or_worse(Distance(1.0, 19.0)) == Distance(1000.0, 19.0)
    assert math.isnan(found.or_worse(Distance(math.nan, 0.0)).worst)
    assert math.isnan(Distance.of(np.array([1e-6, np.nan])).most)


def test_a_model_with_one_moe_layer_has_no_other_whose_routes_it_could_have():
    one = RouteTable(
        np.zeros((2, 1, 2), np.uint8), np.ones((2, 1), bool), np.array([0, 2]), (3,), 4
    )
    assert shifts_of(one) == ("token", "expert")
    row = passing()
    row.shifts = shifts_of(one)
    assert not row.passed
    del row.caught["layer"]
    assert row.passed
