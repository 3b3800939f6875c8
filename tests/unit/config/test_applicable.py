"""Options that would have no effect are refused, with what decides it."""

from __future__ import annotations

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.applicable import check_applicable
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError

JUDGED = ("reward.function=lora_moe_rl.rewards:Judge", "reward.args.url=engines")
LAG = ("schedule.lag=1", "refit.slots=3", "algorithm.correction=tis")
TURNS = "placement.mode=colocated"
SPREAD = ["rollout.dp=2", "rollout.ep=true"]
JOINING = ("rollout.engines=2", "rollout.least_engines=1")
CONTINUE = ("schedule.lag=4", "schedule.in_flight=continue")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["replay.mode=off", "replay.audit_samples=8"],
            "replay.audit_samples=8 has no effect with replay.mode=off",
        ),
        (
            ["replay.audit=0", "replay.audit_samples=8"],
            "replay.audit_samples=8 has no effect with replay.audit=0",
        ),
        (
            ["mismatch.stop_above_old=0.3"],
            "mismatch.stop_above_old=0.3 has no effect with schedule.lag=0",
        ),
        (
            ["logging.tokens=true", "logging.routes=true", "replay.mode=r2"],
            "logging.routes=true has no effect with replay.mode=r2",
        ),
        (
            ["refit.transport=cuda_ipc", "trainer.device=cpu"],
            "refit.transport=cuda_ipc keeps a version in the memory of the trainer's GPU, and "
            "trainer.device=cpu",
        ),
        (["logging.routes=true"], "logging.routes=true has no effect with logging.tokens=false"),
        (["schedule.stale=drop"], "schedule.stale=drop has no effect with schedule.lag=0"),
        (
            ["model.chat_template=x", "model.chat_template_file=y.jinja"],
            "model.chat_template and model.chat_template_file=y.jinja are both set",
        ),
        (
            ["schedule.in_flight=continue"],
            "schedule.in_flight=continue has no effect with schedule.lag=0",
        ),
        (
            [*LAG, "schedule.continued=split"],
            "schedule.continued=split has no effect with schedule.in_flight=finish",
        ),
        (
            [*LAG, *CONTINUE, "schedule.continued=split", "replay.mode=off"],
            "schedule.continued=split has no effect with replay.mode=off",
        ),
        ([*JUDGED, "refit.mode=merged"], "reward.args.url=engines asks the frozen base"),
        ([*JUDGED, "reward.args.model=wise"], "there is one model, base"),
        ([*JUDGED, "reward.args.cache=kept"], "reward.args.cache=kept has no effect"),
        (
            ["placement.gives_back=weights"],
            "placement.gives_back=weights has no effect with placement.mode=split",
        ),
        ([*LAG, TURNS], "schedule.lag=1 samples while the trainer updates"),
        (
            [TURNS, "placement.gives_back=weights", "model.held_once=auto"],
            "placement.gives_back=weights moves the engines' base to the host",
        ),
        ([*JOINING, TURNS], "rollout.least_engines=1 has engines join where there is room"),
        (
            [*JOINING, "refit.mode=merged"],
            "rollout.least_engines=1 has engines join that are",
        ),
        ([*SPREAD, "rollout.nodes=2", TURNS], "rollout.nodes=2 spreads an engine over nodes"),
        (
            [*LAG, *CONTINUE, "rollout.stop=end"],
            r'rollout.stop=\["end"\] with schedule.in_flight=continue: a text that begins under',
        ),
        ([*SPREAD, "refit.mode=merged"], "rollout.dp=2 serves adapters in slots alone"),
        (["rollout.ep=true"], "it applies only with rollout.tp or rollout.dp above 1"),
        (
            [TURNS, "rollout.gpus_per_engine=0.5"],
            "rollout.gpus_per_engine=0.5 has no effect with placement.mode=colocated",
        ),
        (
            [TURNS, "trainer.gpus_per_rank=0.5"],
            "trainer.gpus_per_rank=0.5 has no effect with placement.mode=colocated",
        ),
    ],
)
def test_an_option_without_effect_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_applicable(override(RunConfig(), settings))


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["replay.mode=off"],
        ["replay.audit_samples=8"],
        [*LAG, "mismatch.stop_above_old=0.3"],
        [*LAG, "schedule.stale=drop"],
        [*LAG, *CONTINUE, "refit.slots=2"],
        [*LAG, "rollout.stop=end,</answer>"],
        [*LAG, *CONTINUE, "schedule.continued=split"],
        [*JUDGED, "reward.args.model=base"],
        SPREAD,
        [*SPREAD, "rollout.nodes=2"],
        [*SPREAD, TURNS],
    ],
)
def test_an_option_with_effect_is_not(settings):
    check_applicable(override(RunConfig(), settings))


@pytest.mark.parametrize("mode", [[], ["schedule.in_flight=continue"]])
def test_tokens_of_older_versions_want_a_correction_and_slots_for_what_is_under_way(mode):
    lag = ["schedule.lag=2", *mode]
    with pytest.raises(ConfigError, match="set algorithm.correction .tis, icepop"):
        check_applicable(override(RunConfig(), [*lag, "refit.slots=4"]))
    corrected = [*lag, "algorithm.correction=tis"]
    needed = 2 if mode else 4
    check_applicable(override(RunConfig(), [*corrected, f"refit.slots={needed}"]))
    with pytest.raises(ConfigError, match=f"set refit.slots={needed} or more"):
        check_applicable(override(RunConfig(), [*corrected, f"refit.slots={needed - 1}"]))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("replay.mode=off replay.missing=mask", ["replay.missing=mask", "replay.mode=off"]),
        ("data.path=a.jsonl data.split=test", ["data.split=test", "data.path=a.jsonl"]),
        ("tracker.mode=offline", ["tracker.mode=offline", "tracker.name=none", "wandb"]),
        ("algorithm=gspo algorithm.dual_clip=3", ["dual_clip=3", "loss=gspo", "loss=ppo_clip"]),
        ("trainer.device=cpu trainer.gpus_per_rank=.5", ["gpus_per_rank=0.5", "device=cpu"]),
        ("data.path=a.jsonl data.generator=m:f", ["data.path=a.jsonl", "data.generator=m:f"]),
        (
            "data.system_prompt=S data.system_prompt_file=s.txt",
            ["data.system_prompt and", "data.system_prompt_file=s.txt are both set"],
        ),
        ("data.path=a.jsonl data.args.level=3", ['data.args={"level": 3}', "data.generator=null"]),
        ("data.generator=m:f data.order=by:a", ["data.order=by:a", "data.generator=m:f, whose"]),
        (
            "data.sets.a=a.jsonl data.path=b.jsonl",
            ["data.path=b.jsonl has no effect with data.sets", "data.sets.a.path", "to null"],
        ),
        (
            "data.sets.a=a.jsonl data.chat_template=true",
            ["data.chat_template=true", "data.sets.a.chat_template", "to false"],
        ),
        (
            "data.sets.a=a.jsonl data.sets.a.split=test",
            ["data.sets.a.split=test", "a.path=a.jsonl"],
        ),
        (
            "data.sets.a=a.jsonl data.sets.a.generator=m:f",
            ["data.sets.a.path=a.jsonl", "data.sets.a.generator=m:f"],
        ),
        (
            "data.sets.a=a.jsonl data.sets.a.reward=m:f reward.function=m:g",
            ["reward.function=m:g has no effect: every set"],
        ),
        (
            "reward.function=m:f reward.functions.a=m:g",
            ["reward.function=m:f has no effect beside reward.functions (a)"],
        ),
        ("reward.args.scale=2", ['reward.args={"scale": 2}', "with reward.function=null"]),
        (
            "data.sets.a=a.jsonl reward.functions.a=m:f",
            ["a is a name in data.sets and in reward.functions"],
        ),
        (
            "data.sets.x=a.jsonl data.sets.x.reward=rigth reward.functions.right=m:f",
            ["data.sets.x.reward=rigth: 'rigth' is not of the form", "did you mean right?"],
        ),
        (
            "data.sets.x=a.jsonl data.sets.x.reward=m",
            ["data.sets.x.reward=m: 'm' is not of the form", "of which there are none"],
        ),
        (
            "data.sets.x=a.jsonl data.sets.x.reward=a,a reward.functions.a=m:f",
            ["data.sets.x.reward=a,a names a function twice"],
        ),
        (
            "data.sets.x=a.jsonl data.sets.x.reward=a reward.functions.a=m:f "
            "reward.functions.b=m:f",
            ["reward.functions.b has no effect: every set of data.sets has a reward"],
        ),
        ("reward.functions.a=m:f reward.functions.a.weight=0", ["a have weight=0"]),
        (
            "algorithm.advantage=gdpo reward.function=m:f",
            ["algorithm.advantage=gdpo normalizes each of several", "reward.function is alone"],
        ),
        (
            "algorithm.advantage=gdpo reward.functions.a=m:f reward.functions.b=m:f "
            "reward.functions.b.weight=0",
            ["algorithm.advantage=gdpo", "reward.functions.a.function is alone with a weight"],
        ),
        (
            "algorithm.advantage=gdpo algorithm.overlong_buffer=4",
            ["algorithm.advantage=gdpo", "algorithm.overlong_buffer=4 takes from their sum"],
        ),
        (
            "algorithm.advantage=gdpo algorithm.kl_in=reward algorithm.kl_coef=0.1",
            ["algorithm.advantage=gdpo", "algorithm.kl_in=reward takes a KL from their sum"],
        ),
        ("algorithm.advantage=gdpo algorithm.normalize_std=true", ["normalize_std", "gdpo"]),
        (
            "algorithm.reference=start algorithm.kl_coef=0.1",
            ["algorithm.reference=start", "without adapter.init_from", "leave algorithm.reference"],
        ),
        (
            "algorithm.reference=start adapter.init_from=a",
            ["algorithm.reference=start has no effect with algorithm.kl_coef=0"],
        ),
        ("algorithm=dpo algorithm.reference=start", ["without adapter.init_from"]),
        ("algorithm=sft algorithm.reference=start", ["algorithm.reference=start", "dpo"]),
    ],
)
def test_an_option_that_does_not_apply_names_both(arguments, named):
    with pytest.raises(ConfigError) as caught:
        override(RunConfig(), arguments.split())
    assert all(part in str(caught.value) for part in named)


def test_a_reward_sinks_over_tokens_that_there_can_be():
    """With a buffer of 9 before the longest response of 8 an empty one would lose 1/9 already."""
    fits = override(RunConfig(), ["algorithm.overlong_buffer=8"])
    assert fits.algorithm.overlong_buffer == fits.rollout.max_response_tokens == 8
    with pytest.raises(ConfigError) as caught:
        override(RunConfig(), ["algorithm.overlong_buffer=9"])
    assert "algorithm.overlong_buffer=9 is more than rollout.max_response_tokens=8" in str(
        caught.value
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "replay.mode=off replay.missing=error",
        "tracker=wandb tracker.mode=offline",
        "tracker.mode=offline tracker.name=wandb",
        "algorithm.clip_low=0.1 algorithm=rloo",
        "data.path=org/set data.split=test",
        "data.sets.a=org/set data.sets.a.split=test",
        "data.sets.a=a.jsonl data.sets.a.reward=m:f data.sets.b=b.jsonl reward.function=m:g",
        "reward=m:f reward.args.scale=2",
        "algorithm.reference=start algorithm.kl_coef=0.1 adapter.init_from=a",
        "algorithm=dpo algorithm.reference=start adapter.init_from=a",
        "algorithm.advantage=gdpo reward.functions.a=m:f reward.functions.b=m:g",
    ],
)
def test_an_option_that_applies_or_has_its_default_is_fine(arguments):
    override(RunConfig(), arguments.split())
