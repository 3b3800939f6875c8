"""TRL's environments train here as they are; whatever one does, the others go on."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from speaker import EOS, Speaker
from written_policy import table_of

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.environments.trl import Trl
from lora_moe_rl.errors import ConfigError, DataError
from lora_moe_rl.files.sample_records import sample_record
from lora_moe_rl.rewards.by_set import NoRewards, RewardsBySet
from lora_moe_rl.tiny.tokenizer import make_tokenizer

pytestmark = pytest.mark.seconds  # starts processes, imports transformers
HELPERS = Path(__file__).parents[2] / "helpers"
FILE = HELPERS / "trl_environments.py"
TOKENIZER = make_tokenizer()
# Of several tests, as each that is made starts a process, which imports what it needs. They are
# tried once, and so show what fails at once.
OF_INCREMENT = {"factory": "IncrementEnv", "group": 2, "retries": 0}
OF_TARGET = {"factory": "TargetEnv", "group": 2, "retries": 0, "max_environments": 3}


@pytest.fixture(scope="module")
def make():
    """The environment of these settings, one for equal ones; the processes of all are ended."""
    made: dict[str, Trl] = {}

    def make(factory: str | None = None, group=1, reward=None, response=200, **settings) -> Trl:
        key = repr((factory, group, reward, response, settings))
        if key in made:
            return made[key]
        if factory is not None:
            settings["factory"] = f"{FILE}:{factory}"
        config = RunConfig(
            model={"max_length": 1024},
            rollout={"max_response_tokens": response},
            algorithm={"name": "reinforce_pp", "group_size": group},
            reward={"function": reward and f"{FILE}:{reward}"},
            environment={"name": "trl", "calls": "python", "tool_timeout_s": 120} | settings,
        )
        rewards = RewardsBySet(config.rewards(), config.reward, 1) if reward else NoRewards()
        made[key] = Trl(config, rewards, TOKENIZER)
        return made[key]

    yield make
    for one in made.values():
        one.rewards.close()
        one.close()


def row(number=0, text="Do! ", **columns) -> Prompt:
    asked = [{"role": "user", "content": text}]
    return Prompt(number, asked, list(b"?"), columns)


def roll(environment, policy, prompt):
    return asyncio.run(environment.rollout(prompt, policy))


def counted(group) -> dict[str, float]:
    return {name: value for name, value in group.counts.items() if value}


def asked(sample) -> str:
    return TOKENIZER.decode(sample.prompt_ids)


def target_of(environment, number: int) -> int:
    """What the environment asks for, for that row."""
    group = roll(environment, Speaker("0"), row(number))
    targets = {int(asked(one).partition("counter by ")[2].partition(".")[0])
               for one in group.samples}  # fmt: skip
    assert len(targets) == 1
    return targets.pop()


def test_trls_own_example_sets_its_task_is_called_and_gives_its_reward(make):
    environment = make(**OF_INCREMENT)
    target = target_of(environment, 3)
    group = roll(
        environment, Speaker(f"[increment({target - 9})]", "[increment(step='9')]", "x"), row(3)
    )
    for sample in group.samples:
        assert f"user: Do! Increment the counter by {target}.\nassistant: " in asked(sample)
        assert "increment" in asked(sample) and "Value to add to the counter." in asked(sample)
        contents = [message["content"] for message in sample.messages]
        assert contents[1] == str(target - 9) and contents[3] == str(target)
        said = [s.token_ids.tolist() for s in sample.segments if s.author == "policy"]
        assert said[-1] == [*b"x", EOS] and sample.mask.sum() == sum(map(len, said))
    shown = [{"role": "user", "content": f"Do! Increment the counter by {target}."}]
    assert sample_record(1, group, None, 1)["prompt"] == shown
    assert group.rewards.tolist() == [1, 1] and not group.failures
    assert counted(group) == {"done": 2, "turns": 6, "tool_calls": 4}
    assert group.details.metrics == {"IncrementEnv": [1, 1]}
    expected = table_of([sample.token_ids.tolist() for sample in group.samples])
    np.testing.assert_array_equal(group.routes.table().ids, expected.ids)
    assert group.routes.table().valid.all()
    missed = roll(environment, Speaker("[increment(9)]", "x"), row(3))
    assert missed.rewards.tolist() == [0, 0]


def test_what_it_draws_follows_from_the_prompt_alone(make):
    environment = make(**OF_INCREMENT)
    first = [target_of(environment, number) for number in range(8)]
    assert len(set(first)) > 1  # and each is the same in its whole group
    assert [target_of(environment, number) for number in range(8)] == first


def test_an_evaluation_has_tasks_of_its_own(make):
    """Of a row of the same number, and of every set."""
    environment = make(**OF_INCREMENT)
    rows = [replace(row(2), data_set=name) for name in ("", "eval/a", "eval/b")]
    seeds = [environment._seed(one) for one in rows]
    assert len(set(seeds)) == 3 and seeds == [environment._seed(one) for one in rows]


def test_a_rows_columns_reach_reset_and_a_reward_function_sees_what_became_of_it(make):
    group = roll(make(**OF_TARGET), Speaker("[increment(4)]", "4"), row(target=4))
    assert group.rewards.tolist() == [1, 1]
    echo = make("EchoToolEnv", group=2, reward="reward_func")
    group = roll(echo, Speaker("[echo('Hello World!')]", "yes"), row())
    np.testing.assert_allclose(group.rewards, [1.2, 1.2], rtol=1e-6)
    assert group.samples[0].messages[1]["content"] == "Hello World!"


def test_its_own_reward_is_added_to_a_reward_functions_which_sees_the_prompt_that_was_asked(make):
    environment = make("IncrementEnv", reward="asked")
    target = target_of(environment, 0)
    group = roll(environment, Speaker(f"[increment({target})]", "x"), row(0))
    assert group.rewards.tolist() == [2]
    assert roll(environment, Speaker("x"), row(0)).rewards.tolist() == [1]


def test_what_its_turns_earn_counts_at_their_ends(make):
    """After each turn it is asked what that has earned, once its calls are answered: after the one
    that cannot be read, and the last, too."""
    said = Speaker("[increment(1),increment(1)]", "[increment(3)]", "[increment(a)]", "x")
    group = roll(make("StepsEnv", response=400), said, row())
    assert group.details.by_turn == {0: [2, 0, 0, 10]} and group.rewards.tolist() == [12]
    assert group.details.metrics == {"StepsEnv": [12]} and counted(group)["parse_error"] == 1
    assert "get_turn_reward" not in asked(group.samples[0])  # it is no tool
    said = Speaker("[increment(1)]", "[increment(2)]", "[increment(1)...")
    group = roll(make("OnlySteps", retries=0), said, row())
    assert group.details.by_turn == {0: [1, 2, 0]} and group.rewards.tolist() == [3]
    assert counted(group)["max_tokens"] == 1
    group = roll(make("OnlySteps", retries=0), Speaker("[increment(4)]", "x"), row())
    assert np.isnan(group.rewards).all() and not group.details.by_turn
    assert "OnlySteps: get_turn_reward returned inf, not a finite number" in group.failures[0]


def test_it_tells_of_the_state_before_each_turn(make):
    """The last turn, which calls nothing, too; a call that cannot be read leaves the state as it
    is."""
    said = Speaker("[increment(2)]", "[increment(a)]", "[increment(1)]", "x")
    group = roll(make("StatesEnv", response=400, retries=0), said, row())
    (one,) = group.samples
    assert one.states == ("at 0", "at 2", "at 2", None) and len(one.turn_ends) == 4
    assert "get_turn_state" not in asked(one)  # it is no tool
    assert roll(make(**OF_INCREMENT), Speaker("x"), row()).samples[0].states == ()
    group = roll(make("StatesEnv", response=400, retries=0), Speaker("[increment(4)]", "x"), row())
    assert "StatesEnv: get_turn_state returned 4, not a text or None" in group.failures[0]


def test_of_several_a_row_names_its_own_and_only_that_ones_tools_are_told_of(make):
    factories = {"count": f"{FILE}:TargetEnv", "game": f"{FILE}:GameEnv"}
    tools = [f"{HELPERS}/tools_of_tests.py:add"]
    environment = make(factories=factories, tools=tools, response=400)
    group = roll(
        environment,
        Speaker("[move('open'),increment(1)]", "[move('again'), add(1,2)]", "x"),
        row(environment="game"),
    )
    contents = [message["content"] for message in group.samples[0].messages]
    assert contents[1:3] == ["None", "error: there is no tool 'increment'; there are move"]
    assert contents[4:6] == ["error: move raised ValueError('Game over.')", "3"]
    calls = group.samples[0].messages[0]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"action": "open"}, {"0": 1}]
    assert group.rewards.tolist() == [1] and counted(group)["tool_error"] == 2
    shown = asked(group.samples[0])
    assert "Open the door." in shown and "move" in shown and "Adds." in shown
    assert "increment" not in shown
    other = roll(environment, Speaker("[increment(2)]", "x"), row(environment="count", target=2))
    assert other.rewards.tolist() == [1] and "move" not in asked(other.samples[0])
    with pytest.raises(DataError, match="is 'chess', which is none of .*: count, game"):
        roll(environment, Speaker("x"), row(environment="chess"))


def test_a_group_whose_conversations_are_set_other_tasks_is_told_of_once(make, caplog):
    for factory, said in (("Seeded", 0), ("OwnRandom", 1)):
        environment = make(factory, group=2)
        groups = [roll(environment, Speaker("x"), row(place)) for place in (0, 1)]
        warned = [m for m in caplog.messages if "reset set 2 of its group's 2 conversations" in m]
        assert len(warned) == said
        tasks = [{bytes(one.prompt_ids) for one in group.samples} for group in groups]
        assert [len(one) for one in tasks] == [1 + said] * 2 and not tasks[0] & tasks[1]


EVIL = [
    ("reset raises", "environment_error", "reset raised RuntimeError('no such world')"),
    ("reset returns", "environment_error", "reset returned 3, not a text or None"),
    ("reset hangs", "timeout", "reset took longer than environment.tool_timeout_s=5"),
    ("exits", "environment_error", "the process ended in call"),
    ("hangs", "timeout", "call took longer than environment.tool_timeout_s=5"),
    ("reward raises", "environment_error", "end raised RuntimeError('no judge')"),
    ("nan", "environment_error", "get_reward returned nan, not a finite number"),
]


def evil_row(folder: Path, how: str, often: int) -> Prompt:
    left = folder / f"left-{often}"
    left.write_text(str(often))
    return row(how=how, left=str(left))


@pytest.mark.parametrize(("how", "kind", "told"), EVIL, ids=[one[0] for one in EVIL])
def test_what_fails_is_begun_anew_and_then_left_out_and_counted(make, tmp_path, how, kind, told):
    # Patient where nothing hangs: a loaded machine is not to be taken for one.
    patience = 5 if "hangs" in how else 120
    environment = make("Evil", tool_timeout_s=patience, retries=1)
    rows = [evil_row(tmp_path, how, often) for often in (1, 2)]

    async def both():  # at the same time: one that hangs takes its time
        speakers = [Speaker("[act()]", "x") for _ in rows]
        return await asyncio.gather(*map(environment.rollout, rows, speakers))

    once, group = asyncio.run(both())
    assert once.rewards.tolist() == [1] and not once.failures
    assert counted(once) == {"done": 1, "turns": 2, "tool_calls": 1, "retried": 1}
    assert np.isnan(group.rewards).all() and len(group.samples) == 1
    (failure,) = group.failures
    assert failure.startswith("prompt 0: ") and told in failure
    assert counted(group)[kind] == 1 and counted(group)["retried"] == 1
    assert not {"done", "max_turns"} & counted(group).keys()
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "613"]]
    assert not left


@pytest.mark.parametrize(
    ("how", "told", "reward"),
    [
        ("prints", "acted", 1),
        ("raises", "error: act raised ValueError('not now')", 1),
        ("bytes", "b'\\xff'", 1),
        ("none", "acted", np.nan),
    ],
)
def test_what_is_no_failure_is_told(make, tmp_path, how, told, reward):
    environment = make("Evil", tool_timeout_s=120, retries=1)
    group = roll(environment, Speaker("[act()]", "x"), evil_row(tmp_path, how, 1))
    assert group.samples[0].messages[1]["content"] == told
    np.testing.assert_array_equal(group.rewards, [reward])
    assert not group.failures


def test_one_that_hangs_takes_no_other_with_it(make, tmp_path):
    environment = make("Evil", group=3, tool_timeout_s=5, retries=0, max_environments=1)
    group = roll(environment, Speaker("[act()]", "x"), evil_row(tmp_path, "hangs", 1))
    assert np.isnan(group.rewards).sum() == 1 and len(group.failures) == 1
    assert counted(group) == {"done": 2, "timeout": 1, "turns": 5, "tool_calls": 3}


def test_no_more_are_there_at_once_than_may_be_and_they_are_used_again(make):
    environment = make("IncrementEnv", group=4, max_environments=2)

    async def twice():
        return [await environment.rollout(row(), Speaker("x")) for _ in range(2)]

    assert [counted(group)["done"] for group in asyncio.run(twice())] == [4, 4]
    assert 1 <= len(environment.instances._live) <= 2


def test_idle_ones_of_other_factories_make_room(make):
    factories = {"count": f"{FILE}:TargetEnv", "game": f"{FILE}:GameEnv"}
    environment = make(factories=factories, group=3, max_environments=3, response=400)
    instances = environment.instances

    async def in_turns():
        most = []
        for name in ("count", "game", "count"):
            prompt = row(environment=name, target=1)
            group = await environment.rollout(prompt, Speaker("x"))
            assert counted(group)["done"] == 3
            most.append(len(psutil.Process(instances._process.pid).children()))
        one = await instances.begin(factories["game"])
        two = await instances.begin(factories["count"])
        assert len(instances._live) == 3 and instances._in_use == 2
        await instances.give_back(one, usable=True)
        await instances.give_back(two, usable=False)
        assert len(instances._live) == 2 and instances._in_use == 0
        return most

    most = asyncio.run(in_turns())
    assert max(most) <= 3


def lose_idle(instances) -> None:
    children = psutil.Process(instances._process.pid).children()
    for process in children:
        process.kill()
    psutil.wait_procs(children, timeout=10)


def lose(instances) -> None:
    """The process that forks, and those that it has forked: new ones are needed."""
    lose_idle(instances)
    instances._process.kill()
    instances._process.wait()


def test_idle_ones_that_were_ended_meanwhile_are_not_asked(make):
    """As the kernel does when memory runs out: that costs no conversation one of its tries."""
    environment = make(**OF_TARGET)
    roll(environment, Speaker("x"), row(target=1))
    lose_idle(environment.instances)
    group = roll(environment, Speaker("x"), row(target=1))
    assert counted(group)["done"] == 2 and not group.failures
    assert len(environment.instances._live) == 2


def test_the_process_that_forks_is_started_again(make):
    environment = make(**OF_INCREMENT)
    lose(environment.instances)
    assert counted(roll(environment, Speaker("x"), row()))["done"] == 2


def test_it_is_started_again_once_and_the_event_loop_goes_on_meanwhile(make):
    """All conversations find it lost at the same time; others, and other agents, wait for none."""
    environment = make(**OF_INCREMENT)
    instances, start = environment.instances, environment.instances._start
    ticked, during = threading.Event(), []

    async def tick():
        while True:
            ticked.set()
            await asyncio.sleep(0.01)

    def counting():
        found = start()
        ticked.clear()
        during.append(ticked.wait(60))  # in vain, were the event loop held up
        return found

    async def rolled():
        ticking = asyncio.create_task(tick())
        try:
            return await environment.rollout(row(), Speaker("x"))
        finally:
            ticking.cancel()

    instances._start = counting
    lose(instances)
    assert counted(asyncio.run(rolled()))["done"] == 2
    assert during == [True]
    instances._start = start


def test_a_process_that_cannot_be_started_again_fails_a_conversation_and_not_the_next(make):
    environment = make(**OF_TARGET)
    instances, start = environment.instances, environment.instances._start

    def refuse():
        raise ConfigError("no memory")

    instances._start = refuse
    lose(instances)
    group = roll(environment, Speaker("x"), row(target=1))
    assert len(group.failures) == 2
    assert "no process could be started: no memory" in group.failures[0]
    instances._start = start
    assert counted(roll(environment, Speaker("x"), row(target=1)))["done"] == 2


def test_a_prompt_that_leaves_no_room_has_failed(make):
    environment = make("IncrementEnv", reward="asked")
    group = roll(environment, Speaker("x"), row(text="x" * 1024))
    assert np.isnan(group.rewards).all() and len(group.samples) == 1
    assert "which leave no room within model.max_length=1024" in group.failures[0]


def test_a_task_with_a_token_that_the_model_lacks_has_failed(make, monkeypatch):
    """What reset adds is the environment's; the run goes on."""
    environment = make("IncrementEnv", reward="asked", retries=1)
    monkeypatch.setattr(environment.tokenizer, "model_vocab_size", ord("I"), raising=False)
    group = roll(environment, Speaker("x"), row())
    assert np.isnan(group.rewards).all() and len(group.samples) == 1
    assert "after IncrementEnv.reset: the prompt has the token" in group.failures[0].replace(
        str(FILE) + ":", ""
    )
    assert counted(group)["environment_error"] == 1 and counted(group)["retried"] == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "needs environment.factory=file.py:Class, or several"),
        ({"factory": "Untyped"}, "no JSON schema can be made of Untyped.act: .*missing a type"),
        ({"factory": "NoReset", "reward": "asked"}, "NoReset has no method reset"),
        ({"factory": "EchoToolEnv"}, "EchoToolEnv has no method get_reward or get_turn_reward"),
        ({"factory": "Gone"}, "has no 'Gone'"),
        ({"factory": "IncrementEnv", "tool_workers": 3}, "tool_workers=3 has no effect without"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(make, settings, told):
    with pytest.raises(ValueError, match=told):  # ConfigError is one, and so is pydantic's
        make(**settings)


def test_nothing_is_left_of_environments_when_the_run_ends(make):
    config = RunConfig(environment={"name": "trl", "factory": f"{FILE}:IncrementEnv"})
    environment = Trl(config, NoRewards(), TOKENIZER)
    before = psutil.Process().children(recursive=True)
    asyncio.run(environment.instances.begin(f"{FILE}:IncrementEnv"))
    (instance,) = environment.instances._live
    (folder := Path(tempfile.gettempdir()) / f"sandbox-{instance.mark}-x").mkdir()
    environment.close()
    assert not folder.exists()
    _, alive = psutil.wait_procs(
        [p for p in before if p.pid == environment.instances._process.pid], timeout=10
    )
    assert not alive
