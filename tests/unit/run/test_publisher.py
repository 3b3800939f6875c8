"""What the run does with engines that do not serve what they were sent, and when it looks."""

from __future__ import annotations

import asyncio

import pytest
import torch
from faulty_ports import OTHER, FaultyEngines, PlainChannel, PlainTrainer, Prompts, samples
from transport_ranks import VERSION, all_sent, make_channel

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import RefitError
from lora_moe_rl.kernels.merge.rounding import Arrived
from lora_moe_rl.refit.transports.directory import read_manifest
from lora_moe_rl.run.publisher import Publisher


class Run:
    """A publisher that serves version 0, from a trainer that is at it. `dtype` sets the tolerance
    that the proof allows."""

    def __init__(
        self,
        engines: FaultyEngines,
        dtype="float32",
        first=0,
        replay="r3",
        in_flight="finish",
        ranks=1,
        placement="split",
        **refit,
    ):
        self.engines, self.trainer = engines, PlainTrainer(first, engines.step)
        schedule = {"in_flight": in_flight}
        rollout = {"dp": ranks, "ep": ranks > 1}
        config = RunConfig(
            refit=refit,
            replay={"mode": replay},
            schedule=schedule,
            rollout=rollout,
            placement={"mode": placement},
        )
        self.channel = PlainChannel()
        ports = (self.trainer, engines, self.channel, Prompts())
        self.publisher = Publisher(config, *ports, dtype, first)
        asyncio.run(self.publisher.start())

    def publish(self, version: int) -> dict[str, float]:
        self.trainer.version = version
        parts = [f"parts of {version}"]
        return asyncio.run(self.publisher.publish(version, parts, samples(version)))

    def returned(self, index: int) -> None:
        asyncio.run(self.publisher.prove_returned(index, self.publisher.version))


FAULTS = {
    "serves the base instead of adapter version 2": lambda version: None,
    "serves version 1 instead of adapter version 2": lambda version: 1,
    "engine and trainer differ by": lambda version: OTHER,
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("message", "serves"), FAULTS.items())
def test_an_engine_that_serves_something_else_is_taken_back(message, serves, index):
    run = Run(FaultyEngines(routes=[0.0, 0.0]))
    run.publish(1)
    run.engines.serves = {index: serves}
    with pytest.raises(RefitError, match=message):
        run.publish(2)
    assert run.engines.rolled_back == [(2, ["parts of 2"])] and run.publisher.version == 1


def test_every_data_parallel_rank_of_an_engine_is_proven():
    """Versions are nearer to each other than the tolerance: of all ranks together the one that
    serves another would not be told."""
    run = Run(FaultyEngines(step=0.01, noise=1e-4, of_ranks=4), "bfloat16", ranks=4)
    assert run.publish(1)["refit/told"] == 1
    sequences, _ = run.engines.scored[-1]
    assert all(sequences[i] == sequences[i - i % 4] for i in range(len(sequences)))
    run.engines.serves = {0: lambda version: 1}
    with pytest.raises(RefitError, match="serves version 1 instead of adapter version 2"):
        run.publish(2)


@pytest.mark.parametrize("older", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "step", "noise"),
    [("float32", 1e-5, 1e-7), ("bfloat16", 0.02, 0.005)],
)
def test_an_older_version_is_told_within_the_tolerance(dtype, step, noise, older):
    """The versions that a slot may still hold: the last two, which are within the tolerance."""
    run = Run(FaultyEngines(step=step, noise=noise), dtype)
    assert run.publish(1)["refit/told"] == run.publish(2)["refit/told"] == 1
    run.engines.serves = {0: lambda version: older}
    with pytest.raises(RefitError, match=f"serves version {older} instead of adapter version 3"):
        run.publish(3)
    assert len(run.engines.rolled_back) == 1


def test_versions_that_noise_hides_from_each_other_are_compared_instead():
    run = Run(FaultyEngines(step=1e-5, noise=0.01), "bfloat16", compare_every=0)
    run.engines.compared.clear()
    found = run.publish(1)
    assert (found["refit/told"], found["refit/compared"]) == (0, 1)
    assert run.engines.compared == [(1, None)]
    run.engines.holds_other = ["layers.0.q_proj.A"]
    with pytest.raises(RefitError, match=r"version 2 is not served: .* sent in layers.0.q_proj.A$"):
        run.publish(2)
    assert run.engines.rolled_back == [(2, ["parts of 2"])] and run.publisher.version == 1


def test_what_was_given_back_is_there_before_the_proof_and_samples_come_after_it():
    engines = FaultyEngines(back={"placement/given_back": 2.0})
    run = Run(engines)
    engines.turns.clear()
    scored = len(engines.scored)
    assert run.publish(1)["placement/given_back"] == 2.0
    assert engines.turns == ["come back", *["score"] * (len(engines.scored) - scored), "go on"]
    engines.turns.clear()
    assert run.publish(1)["placement/given_back"] == 2.0  # its update was skipped
    assert engines.turns == ["keep", "come back", "go on"]
    assert engines.kept[-1][0] == 1 and not engines.compared[1:]


def test_an_engine_that_came_back_during_an_update_that_made_no_version_is_proven():
    run = Run(engines := FaultyEngines(routes=[0.0, 0.0]))
    run.publish(1)
    engines.came_back = [1]
    engines.turns.clear()
    run.publish(1)
    assert engines.turns == ["keep", "come back", "score", "score", "go on"]  # base, version
    assert engines.compared[-1] == (1, [1])
    engines.serves = {0: lambda version: None}
    with pytest.raises(RefitError):
        run.publish(2)
    assert engines.turns[-1] == "score"


def test_a_version_over_whose_proof_the_last_engine_leaves_is_proven_by_who_stands_in_for_it():
    run = Run(engines := FaultyEngines())
    engines.turns.clear()
    engines.stands_in = lambda: run.publisher.prove_returned(0, 1)
    found = run.publish(1)
    proof = ["all back", "score", "score"]  # that of who stands in: base, version
    assert engines.turns == ["come back", "score", *proof, "score", "go on"]
    assert (found["refit/told"], run.publisher.version) == (1, 1) and found["refit/max_diff"] < 1e-6
    run.engines.serves = {0: lambda version: 1}
    engines.stands_in = lambda: run.publisher.prove_returned(0, 2)
    with pytest.raises(RefitError, match="serves version 1 instead of adapter version 2"):
        run.publish(2)
    assert run.publisher.version == 1


def test_the_trainer_begins_with_what_a_version_is_proven_on_before_engines_take_it():
    run = Run(FaultyEngines())
    publish = run.engines.publish

    async def noted(version, parts):
        begun.append(len(run.trainer.ahead))
        return await publish(version, parts)

    begun, run.engines.publish = [], noted
    for version in (1, 2):
        run.publish(version)
        sequences, _ = run.engines.scored[-1]
        assert run.trainer.ahead[-1] == sequences and begun[-1] == version + 1


def test_a_trainer_on_the_engines_devices_begins_with_nothing_while_they_have_them():
    run = Run(FaultyEngines(), placement="colocated")
    run.publish(1)
    assert not run.trainer.ahead


def test_the_channel_is_told_before_engines_take_a_version_and_keeps_those_of_the_slots():
    run = Run(FaultyEngines(), slots=2)
    told, publish = run.channel.told, run.engines.publish

    async def noted(version, parts):
        told.append(("taken", parts))
        return await publish(version, parts)

    run.engines.publish = noted
    told.clear()
    for version in (1, 2):
        run.publish(version)
    assert told == [
        *(("published", ["parts of 1"]), ("taken", ["parts of 1"]), ("keep", [0, 1])),
        *(("published", ["parts of 2"]), ("taken", ["parts of 2"]), ("keep", [1, 2])),
    ]


def test_the_channel_is_told_of_a_version_that_is_offered_again_before_engines_come_back():
    """Ranks that were started anew offer anew what a skipped update has left as it was."""
    run = Run(FaultyEngines())
    told, keep = run.channel.told, run.engines.keep

    async def noted(version, parts):
        told.append(("kept", parts))
        return await keep(version, parts)

    run.engines.keep = noted
    run.publish(1)
    told.clear()
    run.publish(1)
    assert told == [("published", ["parts of 1"]), ("kept", ["parts of 1"])]


def test_files_that_ranks_started_anew_have_written_again_are_published_again(tmp_path):
    run = Run(FaultyEngines(), first=VERSION)
    run.publisher.channel = channel = make_channel("directory", tmp_path)
    all_ = all_sent(channel)
    anew = channel.outgoing(all_.layouts[0], "127.0.0.1")
    anew.memory(all_.layouts[0].nbytes, torch.device("cpu"))
    anew.offer(all_.sent[0])
    asyncio.run(run.publisher.publish(VERSION, all_.sent, samples(VERSION)))
    assert read_manifest(tmp_path, VERSION) == all_.sent


def test_slots_are_compared_at_the_start_and_every_so_many_versions():
    run = Run(FaultyEngines(), first=5, compare_every=4)
    found = {version: run.publish(version)["refit/compared"] for version in (6, 8, 9, 10)}
    assert found == {6: 0, 8: 0, 9: 1, 10: 0}
    assert [version for version, _ in run.engines.compared] == [5, 9]


def test_slots_are_compared_in_time_whatever_versions_a_step_ends_on():
    """Two updates a step, one of which was skipped: no version is a multiple of four."""
    run = Run(FaultyEngines(), first=1, compare_every=4)
    found = {version: run.publish(version)["refit/compared"] for version in (3, 5, 7, 9)}
    assert found == {3: 0, 5: 1, 7: 0, 9: 1}


def test_an_engine_whose_slots_hold_something_else_at_the_start_stops_the_run():
    with pytest.raises(RefitError, match="sent in a.B; engines serve no version now"):
        Run(FaultyEngines(holds_other=["a.B"]))


def test_an_engine_that_came_back_is_proven_and_compared():
    run = Run(FaultyEngines(routes=[0.0, 0.0]))
    run.publish(1)
    run.returned(1)
    assert run.engines.compared[-1] == (1, [1])
    run.engines.holds_other = ["a.B"]
    with pytest.raises(RefitError, match="something else than was sent in a.B"):
        run.returned(1)
    run.engines.holds_other, run.engines.serves = [], {1: lambda version: 0}
    with pytest.raises(RefitError, match="serves the base instead of adapter version 1"):
        run.returned(1)


def test_each_engine_is_compared_with_its_own_routes():
    """Equal routes are scored once."""
    run = Run(FaultyEngines(routes=[0.0, 3.0, 0.0]))
    run.trainer.scored.clear()
    assert run.publish(1)["refit/told"] == 1
    assert run.trainer.scored == [(0.0, True), (3.0, True)]


@pytest.mark.parametrize("mode", ["off", "r2"])
def test_routes_that_are_missing_do_not_stop_a_run_that_replays_none(mode):
    run = Run(FaultyEngines(complete=False, routes=[0.0, 3e-4]), replay=mode)
    run.publish(1)
    assert {routes for routes, _ in run.trainer.scored} == {None}


@pytest.mark.parametrize(("mode", "complete"), [("off", True), ("r3", True), ("r3", False)])
def test_routes_are_replayed_when_they_are_there_or_have_to_be(mode, complete):
    run = Run(FaultyEngines(complete=complete, routes=[3.0]), replay=mode)
    run.publish(1)
    assert {routes for routes, _ in run.trainer.scored} == {3.0}


def test_the_probe_has_pieces_of_other_samples_each_step():
    run = Run(FaultyEngines(), proof_prompts=2)
    run.publish(1)
    run.publish(2)
    probed = [sequences for sequences, version in run.engines.scored if version]
    fixed, drawn = [p[:2] for p in probed], [p[2:] for p in probed]
    assert fixed[0] == fixed[1] == run.publisher.probe
    for version, found in zip((1, 2), drawn, strict=True):
        of_step = [sample.token_ids.tolist() for sample in samples(version)]
        assert len(found) == 2 and all(piece in of_step for piece in found)


def test_an_engine_that_is_wrong_on_the_steps_samples_alone_stops_the_run(monkeypatch):
    run = Run(FaultyEngines())
    score = run.engines.score

    async def wrong(sequences, version, engines=None):
        found = await score(sequences, version, engines)
        found[0].logprobs[-1][3] += 0.02
        return found

    monkeypatch.setattr(run.engines, "score", wrong)
    with pytest.raises(RefitError, match=r"differ by 2.00e-02 in logprob on the step's samples"):
        run.publish(1)
    assert run.engines.rolled_back


def test_a_token_that_rounding_puts_beyond_the_tolerance_has_slots_compared(monkeypatch):
    run = Run(FaultyEngines(noise=1e-4), "bfloat16", compare_every=0)
    score = run.engines.score

    async def rounded(sequences, version, engines=None):
        found = await score(sequences, version, engines)
        if version:
            found[0].logprobs[-1][3] += 0.9
        return found

    monkeypatch.setattr(run.engines, "score", rounded)
    run.engines.compared.clear()
    found = run.publish(1)
    assert (found["refit/told"], found["refit/compared"]) == (0, 1)
    assert found["refit/max_diff"] == pytest.approx(0.9, abs=1e-3)
    assert run.engines.compared == [(1, None)] and run.publisher.version == 1
    run.engines.holds_other = ["layers.0.experts.up.B"]
    with pytest.raises(
        RefitError, match="version 2 is not served: .* sent in layers.0.experts.up.B$"
    ):
        run.publish(2)


@pytest.mark.parametrize(
    ("refit", "left"), [({}, True), ({"slots": 1}, False), ({"mode": "merged"}, False)]
)
def test_a_roll_back_says_when_there_is_nothing_to_go_back_to(refit, left):
    run = Run(FaultyEngines(), **refit)
    run.engines.serves = {0: lambda version: OTHER}
    with pytest.raises(RefitError) as caught:
        run.publish(1)
    assert ("engines serve no version now" in str(caught.value)) != left


def test_an_engine_that_cannot_take_a_version_back_does_not_hide_why_it_should(monkeypatch):
    run = Run(FaultyEngines())
    run.engines.serves = {0: lambda version: OTHER}

    async def roll_back(version, parts):
        raise RefitError("worker 0: no")

    monkeypatch.setattr(run.engines, "roll_back", roll_back)
    with pytest.raises(RefitError, match="differ by .*; nor could it be taken back: worker 0: no"):
        run.publish(1)


def test_a_version_that_an_engine_refuses_is_not_served():
    run = Run(FaultyEngines())
    run.engines.refuses = True
    with pytest.raises(RefitError, match="worker 0: no"):
        run.publish(1)
    assert run.publisher.version == 0


def test_a_version_that_is_served_already_is_not_proven_again():
    run = Run(FaultyEngines())
    asked = len(run.engines.scored)
    found = run.publish(0)
    assert found.pop("memory/engines_peak") == 1.5  # as of the publish that there was
    assert found.pop("rollout/engines") == 1
    assert set(found.values()) == {0} and len(run.engines.scored) == asked


def arrived(share: float, change: float = 1.0) -> Arrived:
    """`share` of the change has arrived, and nothing else; weights a hundred times the change."""
    return Arrived((1 - share) ** 2 * change, 1e4, change, share**2 * change)


def test_what_rounding_loses_of_merged_weights_is_told_and_stops_a_run(caplog):
    run = Run(FaultyEngines(), mode="merged", warn_lost=0.2, stop_lost=0.5)
    run.engines.arrived = {"a": arrived(1.0, 3.0), "b": arrived(0.6)}
    found = run.publish(1)
    assert found["refit/lost"] == pytest.approx(0.4 / 4)
    assert found["refit/error_over_change"] == pytest.approx(0.4 / 2)
    assert found["refit/cosine"] == pytest.approx((3 + 0.6) / (4 * (3 + 0.36)) ** 0.5)
    assert not caplog.records
    assert run.publish(1)["refit/lost"] == found["refit/lost"]  # is served already
    run.engines.arrived = {"a": arrived(1.0), "b": arrived(0.2)}
    for version in (2, 3):
        run.publish(version)
    (warning,) = caplog.messages  # once
    assert "40.0% of the change lost" in warning and "worst is b: 80.0%" in warning
    assert "refit.warn_lost=0.2: use refit.rounding=stochastic" in warning
    run.engines.arrived = {"a": arrived(0.4)}
    with pytest.raises(RefitError, match=r"60.0% .*above refit.stop_lost=0.5: use .*no version"):
        run.publish(4)
    assert run.engines.rolled_back and run.publisher.version == 3


def test_a_change_too_small_for_float32_is_not_judged():
    run = Run(FaultyEngines(), mode="merged")
    run.engines.arrived = {"a": Arrived(error=1e-9, value=1e4, change=1e-9, got=0.0)}
    assert run.publish(1)["refit/lost"] == 1.0
    run.engines.arrived = {"a": Arrived(error=1e-7, value=1e4, change=1e-7, got=0.0)}
    with pytest.raises(RefitError, match="100.0% of the change lost"):
        run.publish(2)


def test_where_no_change_was_wanted_none_may_have_come():
    run = Run(FaultyEngines(), mode="merged")
    run.engines.arrived = {"a": Arrived(error=0.0, value=1e4, change=0.0, got=0.0)}
    assert run.publish(1)["refit/lost"] == 0
    run.engines.arrived = {"a": Arrived(error=1e-9, value=1e4, change=0.0, got=1e-9)}
    with pytest.raises(RefitError, match="inf% of the change lost"):
        run.publish(2)


def test_a_loss_that_is_no_number_stops_the_run():
    run = Run(FaultyEngines(), mode="merged")
    run.engines.arrived = {"a": Arrived(error=float("nan"), value=1e4, change=1.0, got=1.0)}
    with pytest.raises(RefitError, match="nan% of the change lost"):
        run.publish(1)


def test_requests_move_on_to_a_version_once_it_is_proven_if_that_is_asked():
    assert not Run(FaultyEngines()).engines.moved
    run = Run(FaultyEngines(), in_flight="continue")
    run.publish(1)
    assert run.engines.moved == [0, 1]
    run.publish(1)  # a skipped update makes none
    run.engines.serves = {0: lambda version: OTHER}
    with pytest.raises(RefitError):
        run.publish(2)
    assert run.engines.moved == [0, 1]
