"""The table of faults: what it expects a run to say is what the run's code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_moe_rl.chaos.inject import INJECTORS
from lora_moe_rl.chaos.kinds import KINDS, STOPPED, check, chosen, matches, patience
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.trouble import Trouble
from lora_moe_rl.run.checkpoints import CHECKPOINT
from lora_moe_rl.run.supervisor import Lives, Newest
from lora_moe_rl.telemetry.metric_rows import ROWS

PACKAGE = Path(__file__).parents[3] / "lora_moe_rl"
PROMISES = PACKAGE.parent / "docs/faults.md"
REWARD = {"function": "m:f"}


def test_each_kind_is_brought_about_in_one_place():
    inside = {name for name, kind in KINDS.items() if kind.inside}
    assert inside | INJECTORS.keys() == KINDS.keys() and not inside & INJECTORS.keys()


def test_each_kind_is_noticed_in_one_way_and_promised_something():
    for name, kind in KINDS.items():
        assert bool(kind.says) != bool(kind.counts), name
        assert kind.promised and (STOPPED not in kind.promised or kind.says), name
    assert {kind.counts for kind in KINDS.values()} - {""} <= {row[0] for row in ROWS}


def test_the_page_names_each_kind():
    page = PROMISES.read_text()
    assert all(f"`{name}`" in page for name in KINDS)


def test_what_the_supervisor_says_is_what_is_looked_for():
    said = Lives(3, Newest()).ended(-9, Newest(5))
    assert said and matches(KINDS["controller.kill"].says, said.replace(" ", "\n"))
    for kind in ("rank.kill", "engine.kill", "engine.hang"):
        assert not matches(KINDS[kind].says, said)


def test_what_a_full_disk_makes_a_run_say_is_what_is_looked_for():
    said: list[str] = []
    Trouble(said.append).failed(CHECKPOINT, "File too large")
    assert matches(KINDS["disk.full"].says, f"warning: {said[0]}")


@pytest.mark.parametrize(
    ("file", "words", "kind", "said"),
    [
        (
            "cluster/replicas.py",
            "%s {what} (%s): starting it anew",
            "engine.kill",
            "engine-0 died (x)",
        ),
        ("cluster/replicas.py", '"is silent"', "engine.hang", "engine-1 is silent (x)"),
        (
            "cluster/lasting_trainer.py",
            "all trainer ranks are ended and started anew",
            "rank.kill",
            "trainer-0 failed (x): all trainer ranks are ended and started anew",
        ),
        (
            "refit/parts.py",
            "the checksum of {layout.entries[number].tensor} from",
            "shm.corrupt",
            "adapter version 3: the checksum of layers.0.q_proj.A from trainer rank 0 differs",
        ),
        (
            "router_replay/packed.py",
            "are corrupt: ",
            "route.flip",
            "rank 0, sample 1: routes of layers 0 to 3 are corrupt: their",
        ),
        (
            "refit/proof.py",
            "engine and trainer differ by",
            "adapter.flip",
            "adapter version 3: engine and trainer differ by 1e-1",
        ),
    ],
)
def test_what_a_log_line_or_an_error_says_is_what_is_looked_for(file, words, kind, said):
    """The line itself needs engines or ranks to come about: it is looked up in its source."""
    assert words in (PACKAGE / file).read_text()
    assert matches(KINDS[kind].says, said) and not matches(KINDS[kind].says, "step 7: a step")


@pytest.mark.parametrize(
    ("kind", "settings", "way_out"),
    [
        ("engine.kill", {"algorithm": {"name": "sft"}}, "has no engine"),
        ("controller.kill", {"checkpoint": {"every": 0}}, "checkpoint.every=0"),
        ("disk.full", {"checkpoint": {"every": 0}}, "checkpoint.every=0"),
        ("reward.hang", {"reward": {}}, "reward.function"),
        ("route.flip", {"replay": {"mode": "off"}}, "use r3"),
        ("route.flip", {"replay": {"mode": "r2"}}, "use r3"),
        ("shm.corrupt", {"refit": {"transport": "distributed"}}, "shared memory"),
    ],
)
def test_a_fault_that_a_run_cannot_have_is_refused_by_name(kind, settings, way_out):
    check([kind], RunConfig(reward=REWARD))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--faults {kind}: .*{way_out}"):
        check([kind], RunConfig(**settings))


def test_kinds_are_named_one_by_one_or_all():
    assert chosen("all") == list(KINDS)
    assert chosen("rank.kill, nan.grad") == ["rank.kill", "nan.grad"]
    for wrong in ("rank.kil", "", "rank.kill,rank.kill"):
        with pytest.raises(ConfigError, match="--faults"):
            chosen(wrong)


def test_a_fault_is_waited_for_longer_than_its_time_outs():
    hang = RunConfig(trainer={"timeout_s": 5000}, reward=REWARD)  # type: ignore[arg-type]
    assert patience("rank.hang", hang) - patience("rank.kill", hang) == 5000
