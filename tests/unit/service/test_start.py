"""What a service tells of itself."""

from __future__ import annotations

from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.facts import find
from lora_moe_rl.service.start import facts_of, roomy

SHAPE = find("qwen3-30b-a3b").shape


def test_a_tokenizer_is_where_clients_find_it(tmp_path, monkeypatch):
    """One of the hub by the hub's name: the server's own directories are not on other machines."""
    hub = facts_of(RunConfig(model="Qwen/Qwen3-30B-A3B"), "base", SHAPE)
    assert (hub.base_model, hub.tokenizer) == ("base", "Qwen/Qwen3-30B-A3B")
    assert facts_of(RunConfig(model=str(tmp_path)), "base", SHAPE).tokenizer == str(tmp_path)
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert facts_of(RunConfig(model="~/mine"), "base", SHAPE).tokenizer == str(tmp_path / "mine")
    tiny = facts_of(RunConfig(model="qwen3_moe"), "base", SHAPE).tokenizer
    assert tiny == "qwen3_moe" or tiny.startswith("/")


def test_engines_have_room_for_one_token_more_where_the_model_has():
    most = SHAPE.max_positions
    for length, engines in ((512, 513), (most - 1, most), (most, most)):
        config = RunConfig(model={"path": "m", "max_length": length})
        facts = facts_of(config, "base", SHAPE)
        assert (facts.max_length, facts.scores_whole) == (length, length < most)
        assert roomy(config, facts).model.max_length == engines
