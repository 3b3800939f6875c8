"""Config files: how they lie over each other, what is refused, and a round trip."""

import json

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.errors import ConfigError

FILES = {
    "c.yaml": "adapter:\n  rank: 8\nreplay:\n  mode: off\ntrainer:\n  lr: 3e-5\n",
    "dotted.yml": "adapter.rank: 8\nreplay.mode: off\ntrainer.lr: 3e-5\n",
    "c.json": json.dumps({"adapter": {"rank": 8}, "replay": {"mode": "off"}, "trainer.lr": 3e-5}),
    "c.toml": "[adapter]\nrank = 8\n[replay]\nmode = 'off'\n[trainer]\nlr = 3e-5\n",
}


@pytest.mark.parametrize("name", FILES)
def test_files_lie_over_the_config_in_their_turn(tmp_path, name):
    path = tmp_path / name
    path.write_text(FILES[name])
    config = override(RunConfig(), ["adapter.rank=4", f"@{path}", "trainer.lr=1e-3"])
    assert (config.adapter.rank, config.replay.mode, config.trainer.lr) == (8, "off", 1e-3)
    assert load_config(str(path)).trainer.lr == 3e-5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adapter: {rnk: 8}", "did you mean adapter.rank?"),
        ("adapter: [8]", "adapter is a section"),
        ("- 1", "holds a list"),
        ("a: [", "is not valid YAML"),
        ("data: {sets: {a: {path: b}, a: {path: c}}}", "the key 'a' stands twice in one map"),
        ("adapter: {rank: eight}", "adapter.rank='eight' is not an integer"),
        ("model: " + "[" * 5000, "c.yaml is nested too deeply"),
        ("model: é".encode("latin-1"), "c.yaml is not UTF-8: byte 7 is 0xe9; save it as UTF-8"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        override(RunConfig(), [f"@{path}"])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"), [("c.json", '{"model": ' + "[" * 100_000), ("c.toml", "a = " + "[" * 5000)]
)
def test_other_files_that_are_nested_without_end(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name} is nested too deeply"):
        override(RunConfig(), [f"@{tmp_path / name}"])


def test_a_key_that_stands_twice_in_json_is_refused(tmp_path):
    (tmp_path / "c.json").write_text('{"data": {"sets": {"a": {}, "a": {}}}}')
    with pytest.raises(ConfigError, match=r"not valid JSON: the key 'a' stands twice"):
        override(RunConfig(), [f"@{tmp_path / 'c.json'}"])


def test_what_yaml_merges_may_be_written_over(tmp_path):
    text = "data:\n  sets:\n    a: &a {path: a.jsonl, limit: 3}\n    b: {<<: *a, path: b.jsonl}\n"
    (tmp_path / "c.yaml").write_text(text)
    sets = override(RunConfig(), [f"@{tmp_path / 'c.yaml'}"]).data.sets
    assert (sets["b"].path, sets["b"].limit) == ("b.jsonl", 3)


def test_an_empty_file_sets_nothing(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("# nothing yet\nadapter:\n")
    assert override(RunConfig(), [f"@{path}"]) == RunConfig()


def test_yaml_round_trip_of_every_key(tmp_path):
    settings = [
        "adapter.targets=q_proj",
        "replay.mode=off",
        "name=off",
        "trainer.lr=1e-7",
        "seed=3",
    ]
    config = override(RunConfig(), settings)
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(config))
    assert load_config(str(path)) == config
