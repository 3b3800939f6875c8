"""What a service tells of itself."""

from __future__ import annotations

from lora_moe_rl.config import RunConfig
from lora_moe_rl.service.start import facts_of


def test_a_tokenizer_is_where_clients_find_it(tmp_path, monkeypatch):
    """One of the hub by the hub's name: the server's own directories are not on other machines."""
    hub = facts_of(RunConfig(model="Qwen/Qwen3-30B-A3B"), "base")
    assert (hub.base_model, hub.tokenizer) == ("base", "Qwen/Qwen3-30B-A3B")
    assert facts_of(RunConfig(model=str(tmp_path)), "base").tokenizer == str(tmp_path)
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert facts_of(RunConfig(model="~/mine"), "base").tokenizer == str(tmp_path / "mine")
    tiny = facts_of(RunConfig(model="qwen3_moe"), "base").tokenizer
    assert tiny == "qwen3_moe" or tiny.startswith("/")
