"""Commands that write a PEFT directory, on a disk that refuses in the middle of it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lora_moe_rl.cli import main
from lora_moe_rl.files import saving

COMMANDS = {
    "export": ["export", "ADAPTER", "--to", "peft"],
    "import": ["adapter", "import", "ADAPTER"],
    "resize": ["adapter", "resize", "ADAPTER", "--rank", "3"],
    "combine": ["adapter", "combine", "ADAPTER:1", "ADAPTER:2"],
}


def refusing(monkeypatch, after: int) -> None:
    """No room for what comes after so many tensors."""
    original, count = saving._bytes, iter(range(10**9))

    def bytes_of(values):
        if next(count) == after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(values)

    monkeypatch.setattr(saving, "_bytes", bytes_of)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("after", [0, 40])
def test_a_full_disk_is_said_and_nothing_is_left(
    adapter, tmp_path, capsys, monkeypatch, command, after
):
    words = [word.replace("ADAPTER", str(adapter)) for word in COMMANDS[command]]
    out = tmp_path / "there" / "out"
    out.parent.mkdir()
    with monkeypatch.context() as patch:
        refusing(patch, after)
        assert main([*words, "--out", str(out)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"cannot write {out}: No space left on device; nothing was left there" in said
    assert "Traceback" not in said and not [*out.parent.iterdir()]
    assert main([*words, "--out", str(out)]) == 0


@pytest.mark.parametrize("name", ["README.md", "adapter_config.json"])
def test_a_file_beside_the_weights_is_written_with_them_or_not_at_all(
    adapter, tmp_path, capsys, monkeypatch, name
):
    original = Path.write_text

    def write_text(path, *args, **kwargs):
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", write_text)
    out = tmp_path / "out"
    assert main(["export", str(adapter), "--to", "peft", "--out", str(out)]) == 1
    assert "cannot write" in capsys.readouterr().err and not [*tmp_path.iterdir()]
