"""Settings of the command line onto a config, and the errors of those that cannot be."""

import pytest
from pydantic import ValidationError

from lora_moe_rl.config import DataConfig, RunConfig, SetConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.help import config_help
from lora_moe_rl.config.keys import all_keys
from lora_moe_rl.config.overrides import override, readable
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.errors import ConfigError
from tests.helpers.settings import changed


@pytest.mark.parametrize(
    "arguments",
    [
        ["adapter.rank=8"],
        ["--adapter.rank", "8"],
        ["--adapter.rank=8"],
        ["adapter.rank=4", "--adapter.rank", "8"],
    ],
)
def test_the_three_ways_to_write_a_setting(arguments):
    config = changed(*arguments)
    assert config == RunConfig.model_validate({"adapter": {"rank": 8}})


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("trainer.lr=3e-5", "trainer.lr", 3e-5),
        ("trainer.lr=.5", "trainer.lr", 0.5),
        ("trainer.clip_grad=0", "trainer.clip_grad", 0.0),
        ("rollout.prefix_caching=false", "rollout.prefix_caching", False),
        ("adapter.expert_rank=null", "adapter.expert_rank", None),
        ("adapter.expert_rank=4", "adapter.expert_rank", 4),
        ("name=12", "name", "12"),
        ("data.answer_key=null", "data.answer_key", None),
        ("reward.function=a.py:f", "reward.function", "a.py:f"),
        ("adapter.targets=q_proj,experts.*", "adapter.targets", ("q_proj", "experts.*")),
        ('adapter.targets=["q_proj"]', "adapter.targets", ("q_proj",)),
        ("adapter.targets=('q_proj',)", "adapter.targets", ("q_proj",)),
        ("adapter.targets=[q_proj,experts.*]", "adapter.targets", ("q_proj", "experts.*")),
        ("adapter.targets=[q_proj]", "adapter.targets", ("q_proj",)),
        ('adapter.rank_pattern={"experts.*": 8}', "adapter.rank_pattern", {"experts.*": 8}),
        ("adapter.alpha_pattern={'q_proj': 8.5}", "adapter.alpha_pattern", {"q_proj": 8.5}),
        ("rollout.stop_token_ids=1,2", "rollout.stop_token_ids", (1, 2)),
        ("rollout.stop_token_ids=[]", "rollout.stop_token_ids", ()),
        ("rollout.stop=null", "rollout.stop", ()),
        ('rollout.stop="</answer>"', "rollout.stop", ("</answer>",)),
        ("rollout.stop=</answer>,END", "rollout.stop", ("</answer>", "END")),
        ('rollout.stop=["[/INST]"]', "rollout.stop", ("[/INST]",)),
        ("replay.mode=off", "replay.mode", "off"),
        ("model=deepseek_v3", "model.path", "deepseek_v3"),
        ("model.path=some/dir=x", "model.path", "some/dir=x"),
        ("data=rows.jsonl", "data.path", "rows.jsonl"),
    ],
)
def test_values(argument, key, value):
    config: object = changed(argument)
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value and type(config) is type(value)


def test_a_section_by_name_keeps_what_the_recipe_set():
    base = RunConfig.model_validate({"model": {"path": "qwen3_moe", "max_length": 64}})
    config = changed("model=deepseek_v3", base=base)
    assert (config.model.path, config.model.max_length) == ("deepseek_v3", 64)
    assert base.model.path == "qwen3_moe"  # a new config; the old one is as it was


def test_a_map_replaces_the_map_of_the_recipe():
    base = RunConfig.model_validate({"adapter": {"rank_pattern": {"q_proj": 4}, "rank": 8}})
    config = changed('adapter.rank_pattern={"o_proj": 2, "*": 3}', base=base)
    assert list(config.adapter.rank_pattern.items()) == [("o_proj", 2), ("*", 3)]
    assert config.adapter.rank == 8


def test_sets_are_laid_over_those_of_the_recipe_by_name():
    sets = {"math": SetConfig(path="m.jsonl", ratio=3), "code": SetConfig(path="c.jsonl")}
    base = RunConfig(data=DataConfig(sets=sets))
    config = changed("data.sets.math.ratio=2", "data.sets.more=d.jsonl", base=base)
    found = {name: (one.path, one.ratio) for name, one in config.data.sets.items()}
    assert found == {"math": ("m.jsonl", 2), "code": ("c.jsonl", 1), "more": ("d.jsonl", 1)}
    assert list(changed("data.sets.code=null", base=base).data.sets) == ["math"]
    one = changed("data.sets=null", "data=mine.jsonl", base=base).data
    assert one.sets == {} and one.path == "mine.jsonl"
    assert 'data.sets={"math": {"path": "m.jsonl", "ratio": 3.0}' in config_help(base)


@pytest.mark.parametrize(
    ("arguments", "args"),
    [
        ("data.args.b=3 data.args.c=x", {"a": 1, "b": 3, "c": "x"}),
        ('data.args={"z":0}', {"z": 0}),
        ('data.args={"z":0} data.args.b=[1]', {"z": 0, "b": [1]}),
        ('data.args.b=3 data.args={"z":0}', {"z": 0}),
        ("data.args.d.e=true", {"a": 1, "b": 2, "d.e": True}),
    ],
)
def test_arguments_are_set_one_by_one_or_all_together(arguments, args):
    base = RunConfig(data=DataConfig(generator="m:f", args={"a": 1, "b": 2}))
    assert changed(*arguments.split(), base=base).data.args == args


def test_arguments_of_sets_and_of_the_template_are_set_one_by_one(tmp_path):
    config = changed("data.sets.m.generator=m:f", "data.sets.m.args.k=1", "data.sets.m.args.l=2")
    assert config.data.sets["m"].args == {"k": 1, "l": 2}
    config = changed("data.chat_template_kwargs.enable_thinking=false")
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    (tmp_path / "c.yaml").write_text("data:\n  generator: m:f\n  args: {a: 1}\n  args.b: 2\n")
    assert changed(f"@{tmp_path / 'c.yaml'}").data.args == {"a": 1, "b": 2}


def test_sets_survive_a_file(tmp_path):
    config = changed("data.sets.b=b.jsonl", "data.sets.a.generator=m:f", "data.sets.a.ratio=0.5")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = changed(f"@{tmp_path / 'config.yaml'}")
    assert again == config and list(again.data.sets) == ["b", "a"]


def test_the_order_of_a_map_survives_a_file(tmp_path):
    config = changed('adapter.rank_pattern={"q_proj": 2, "*": 3, "experts.*": 1}')
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = changed(f"@{tmp_path / 'config.yaml'}")
    assert list(again.adapter.rank_pattern) == ["q_proj", "*", "experts.*"]
    assert again == config


def test_settings_depend_on_each_other_only_when_all_are_there():
    config = changed("trainer.tp=2", "trainer.world_size=2")
    assert config.trainer.dp == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("adapter.rnk=8", "unknown config key 'adapter.rnk'; did you mean adapter.rank?"),
        ("adaptor.rank=8", "did you mean adapter.rank?"),
        ("rollout.stop=[/INST]", """as a text it is 'rollout.stop=["[/INST]"]'"""),
        ("eval=null", "eval is a section, which stays; eval.sets=null takes eval.sets away"),
        ("model=null", "model=null: model is a section, which stays; set its keys"),
        ("adapter.targets=null", "adapter.targets is empty: nothing would be trained"),
        ("seed=4294967296", "seed=4294967296 must be less than 4294967296"),
        ("lr=1", "here it is trainer.lr"),
        ("tp=2", "did you mean trainer.tp or rollout.tp?"),
        ("traner.tp=2", "did you mean trainer.tp?"),
        ("--adapter-rank=2", "did you mean adapter.rank?"),
        (
            "tracker=wanbd",
            "tracker.name='wanbd' is none of mlflow, none, tensorboard, trackio, wandb",
        ),
        (
            "algorithm.critic_lr=1e-3",
            "algorithm.critic_lr is no setting of the chosen algorithm: it is one of ppo, vapo",
        ),
        ("algorithm=gspo algorithm.label_smoothing=0.1", "algorithm: it is one of dpo"),
        ("tracker=wandb tracker.mod=offline", "did you mean tracker.mode?"),
        ("algorithm=gpro", "algorithm.name='gpro' is none of cispo, dapo, "),
        ("refit.transport=smh", "refit.transport='smh' is not one of auto, cuda_ipc, "),
        ("qqqqqqq=1", "see `lora-moe-rl train --help` for all keys"),
        ("adapter.rank=x", "adapter.rank='x' is not an integer"),
        ("adapter.rank_pattern=8", "adapter.rank_pattern=8 is not a map (write {"),
        ('adapter.rank_pattern={"q_proj":0}', "adapter.rank_pattern.q_proj=0 must be at least 1"),
        ('adapter.rank_pattern={"q_proj":"a"}', "rank_pattern.q_proj='a' is not an integer"),
        ("adapter.rank=1.5", "adapter.rank=1.5 is not an integer"),
        ("adapter.rank=0", "adapter.rank=0 must be at least 1"),
        ("adapter.rank=513", "adapter.rank=513 is not a rank vLLM can serve"),
        ("adapter.expert_rank=600", "adapter.expert_rank=600 is not a rank vLLM can serve"),
        ("adapter.targets=", "adapter.targets is empty"),
        ("adapter=8", "adapter is a section; set one of its keys: adapter.rank, "),
        ("replay.mode=r4", "replay.mode='r4' is not one of 'off', 'r2' or 'r3'"),
        ("logging.progress=perhaps", "logging.progress='perhaps' is neither true nor false"),
        ("trainer.lr=fast", "trainer.lr='fast' is not a number"),
        ("trainer.lr=Infinity", "trainer.lr=inf is not a finite number"),
        ("trainer.lr=NaN", "trainer.lr=nan"),
        ("rollout.stop_token_ids=1,b", "rollout.stop_token_ids.1='b' is not an integer"),
        ("name=a b", "name='a b' may hold only what matches"),
        ("trainer.world_size=3 trainer.tp=2", "trainer.world_size=3 does not match the layout"),
        ("trainer.ep=3", "trainer.ep=3 does not divide the 1 ranks"),
        ("rollout.max_response_tokens=512", "leaves no room for a prompt"),
        ("--adapter.rank", "--adapter.rank needs a value"),
        ("--adapter.rank --trainer.lr=1", "--adapter.rank needs a value"),
        ("adapter.rank", "'adapter.rank' is not a setting: write key=value"),
        ("=3", "unknown config key ''"),
        (
            "data.order=random",
            "data.order='random' may hold only what matches ^(shuffle|sequential",
        ),
        ("data.order=by:", "data.order='by:' may hold only what matches"),
        ("data.sets.a.order=up", "data.sets.a.order='up' may hold only what matches"),
        (
            'data.filter={"a":[2,1]}',
            'data.filter={"a": [2.0, 1.0]}: a lets no row through; write [',
        ),
        ('data.sets.b.filter={"a":[null,null]}', "a has no bound; write [least, most]"),
        ('data.filter={"a":[1]}', "data.filter.a.1"),
        ('data.filter={"a":[1,"x"]}', "data.filter.a.1='x' is not a number"),
        ("data.filter=5", "data.filter=5 is not a map"),
        ("data.shuffle=false", "here it is data.order (shuffle, sequential or by:COLUMN)"),
        ("data.sets.math.pth=a.jsonl", "did you mean data.sets.NAME.path?"),
        ("data.sets.math.ratio=0", "data.sets.math.ratio=0 must be greater than 0"),
        ("data.sets.math.ratio=-1", "data.sets.math.ratio=-1 must be greater than 0"),
        ("data.sets.math.ratio=many", "data.sets.math.ratio='many' is not a number"),
        ("data.sets.math=8", "data.sets.math is a section; set one of its keys: data.sets.NAME."),
        ("data.sets.math.sets.more=a.jsonl", "unknown config key 'data.sets.math.sets.more'"),
        ('data.sets={"a/b":{"path":"c"}}', "a set named 'a/b': a name is a part of keys and of m"),
        ('data.sets={"a":{},"a":{}}', "the key 'a' stands twice in one map"),
        ('adapter.targets=["q_proj]', "is not a list"),
        ("reward.timeout_s=9", "reward.timeout_s=9 has no effect without a reward function"),
        ("reward.workers=9", "reward.workers=9 has no effect without a reward function"),
        ("@missing.yaml", "cannot read the config file missing.yaml"),
        ("@rows.txt", "its name must end in .yaml, .yml, .json or .toml"),
    ],
)
def test_bad_settings(argument, message):
    arguments = [argument] if argument == "name=a b" else argument.split()
    with pytest.raises(ConfigError) as caught:
        changed(*arguments)
    assert message in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_every_fault_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        changed("adapter.rank=0", "replay.mode=x")
    assert len(str(caught.value).splitlines()) == 2


def test_reward_functions_are_laid_over_those_of_a_recipe_and_chosen_by_set():
    config = changed(
        "data.sets.x=x.jsonl",
        "data.sets.y=y.jsonl",
        "data.sets.z=z.jsonl",
        "reward.functions.a=m:f",
        "reward.functions.b=m:g",
        "reward.functions.c.function=m:h",
        "reward.functions.b.weight=-0.5",
        "reward.functions.b.args.scale=2",
        "reward.functions.c=null",
        "data.sets.y.reward=b",
        "data.sets.z.reward=m:k",
    )
    found = {
        data_set: [(one.name, one.key, one.function, one.args, one.weight) for one in functions]
        for data_set, functions in config.rewards().items()
    }
    a = ("a", "reward.functions.a.function", "m:f", {}, 1.0)
    b = ("b", "reward.functions.b.function", "m:g", {"scale": 2}, -0.5)
    own = ("", "data.sets.z.reward", "m:k", {}, 1.0)
    assert found == {"x": [a, b], "y": [b], "z": [own]}


def test_help_lists_every_key_with_its_sentence_in_100_columns():
    text = config_help(RunConfig())
    for key in all_keys().values():
        assert f"  {key.name}=" in text
        assert key.sentence and key.sentence.split()[0] in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "replay.mode=r3   (off, r2 or r3)" in text
    assert "adapter.expert_rank=null   (int or null)" in text
    assert 'adapter.targets=["*"]   (list of str)' in text
    assert r'environment.answer_in_text="\n{answer}\n"   (str)' in text
    assert "data.sets.NAME.ratio=1.0" in text and "data.sets.NAME.limit" not in text


def test_help_says_of_each_plug_in_what_a_key_is_for_it():
    text = " ".join(config_help(RunConfig()).split())
    for said in (
        "algorithm.correction_max=2.0 (float) (correction=sequence_truncate, "
        "correction=token_truncate) Largest weight, an absolute ratio.",
        "algorithm.correction_max=5.0 (float) (correction=token_mask) Largest weight",
        "algorithm.rejection_max=0.5 (float) (rejection=off_policy) Largest mean",
        "algorithm.rejection_max=1.001 (float) (rejection=sequence_mean) Largest geometric",
        "algorithm.group_size=8 (int) Samples of each prompt. algorithm.group_size=2 (int) (dpo)",
        "environment.retries=1 (int) (external) More tries",
        "environment.retries=2 (int) (tools, trl) How often",
    ):
        assert said in text
    line = ["algorithm.correction=token_truncate", "algorithm.correction_max=2.5"]
    text = config_help(override(RunConfig(), [*line, "algorithm.group_size=4"]))
    for shown in ("correction_max=3.0", "correction_max=2.5", "correction_max=5.0"):
        assert f"algorithm.{shown} " in text
    assert "correction_max=2.0 " not in text
    assert "group_size=4 " in text and "group_size=8 " not in text and "group_size=2 " in text


def test_errors_of_a_config_built_in_python_read_the_same():
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"adapter": {"rnk": 8}, "trainer": {"lr": -1}})
    assert str(readable(caught.value)).splitlines() == [
        "unknown config key 'adapter.rnk'; did you mean adapter.rank?",
        "trainer.lr=-1 must be greater than 0.0",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("DataConfig(pth='x')", "unknown config key 'data.pth'; did you mean data.path?"),
        ("TrainerConfig(steps=0)", "trainer.steps=0 must be at least 1"),
        (
            "RewardConfig(function=reward)",
            "reward.function is the function reward itself; name it,",
        ),
        ("RunConfig(reward=reward)", "reward is the function reward itself; name it, as file.py:"),
        (
            "AlgorithmConfig(name='grpo', clip_low=0.1)",
            'has the keys that all have; with others it is a map: algorithm={"name": ..., ...}',
        ),
    ],
)
def test_a_section_that_is_built_by_itself_is_named_with_the_line(tmp_path, line, message):
    file = tmp_path / "mine.py"
    file.write_text(f"from lora_moe_rl.config import *\n\ndef reward(): ...\n\n{line}\n")
    with pytest.raises(ConfigError) as error:
        load_config(str(file))
    assert str(error.value).startswith(f"{file}, line 5: ") and message in str(error.value)


def test_a_config_that_is_made_is_not_changed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from lora_moe_rl.config import RunConfig\nconfig = RunConfig()\nconfig.seed = 3\n"
    )
    with pytest.raises(ConfigError, match=r"mine.py, line 3: seed=3 cannot be set on a"):
        load_config(str(file))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("refit.slots=3", "set algorithm.correction (tis, icepop, mis, "),
        ("algorithm.correction=tis", "set refit.slots=3 or more (it is 2)"),
        ("algorithm.correction=tis refit.mode=merged", "refit.mode=merged has one at a time"),
    ],
)
def test_what_a_run_that_samples_ahead_needs(settings, message):
    with pytest.raises(ConfigError) as error:
        override(RunConfig(), ["schedule.lag=1", *settings.split()])
    assert message in str(error.value)


@pytest.mark.parametrize("correction", ["algorithm.correction=icepop", "algorithm.anchor=rollout"])
def test_a_run_may_sample_ahead_with_a_correction(correction):
    config = override(RunConfig(), ["schedule.lag=2", "refit.slots=4", correction])
    assert config.schedule.lag == 2


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (["data.sets=null", "data.sets.c.path=new"], {"c": 1.0}),
        (["data.sets.a=null", "data.sets.a.path=new"], {"b": 1.0, "a": 1.0}),
        (["data.sets.a.path=new"], {"a": 3.0, "b": 1.0}),
        (["data.sets.a=null"], {"b": 1.0}),
    ],
)
def test_what_was_taken_away_is_not_there_again(settings, found):
    sets = {"a": {"path": "x", "ratio": 3.0}, "b": {"path": "y"}}
    config = changed(*settings, base=RunConfig.model_validate({"data": {"sets": sets}}))
    assert {name: one.ratio for name, one in config.data.sets.items()} == found


@pytest.mark.parametrize(
    "setting",
    [
        *("algorithm.draw_again=true", "algorithm.kl_coef=true", "trainer.clip_grad=false"),
        *("seed=true", 'data.filter={"x": [true, 1]}', 'adapter.rank_pattern={"a": true}'),
    ],
)
def test_true_is_no_number(setting):
    with pytest.raises(ConfigError, match=f"^{setting.partition('=')[0]}=.* is not a number$"):
        changed(setting, "data.path=x.jsonl")


WHERE = {
    "algorithm": "algorithm=opd",
    "environment.timeout_s": "environment=external",
    "environment.tool_timeout_s": "environment=tools",
}


@pytest.mark.parametrize("name", [name for name in all_keys() if name.endswith("_s")])
def test_a_time_out_that_clocks_cannot_count_to_is_refused(name):
    first = [WHERE[key] for key in (name, name.partition(".")[0]) if key in WHERE]
    with pytest.raises(ConfigError, match=rf"{name}=10000000000.0 must be at most 2592000"):
        changed(*first, f"{name}=1e10")
