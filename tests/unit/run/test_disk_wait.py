"""A run that is to go on, and whose disk refuses: it ends with an exit code of its own, after which
it is tried again."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import DISK, DiskWait
from lora_moe_rl.files.pusher import Pusher
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run import goes_on, start
from lora_moe_rl.run.own_ray import OwnRay


def test_a_disk_that_refuses_keeps_a_run_from_going_on_and_not_for_good(tmp_path, monkeypatch):
    """A stale handle of NFS, a full disk: exit code 74, after which it is tried again."""
    full = OSError(errno.ESTALE, "Stale file handle")

    def refuses(*_, **__):
        raise full

    config = override(RunConfig(), [f"logging.run_dir={tmp_path}"])
    monkeypatch.setattr(goes_on, "check_places", refuses)
    monkeypatch.setattr(goes_on, "steps_done", lambda *_: 0)
    with pytest.raises(DiskWait, match="Stale file handle.*go on with --resume") as caught:
        start.run(config, resume=True)
    assert caught.value.exit_code == DISK
    with pytest.raises(OSError) as raised:
        start.run(config)
    assert raised.value is full


@pytest.mark.parametrize("what", ["write_config", "rewind"])
def test_what_is_written_before_it_goes_on_is_waited_for_too(tmp_path, monkeypatch, what):
    def refuses(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    config = override(RunConfig(), [f"logging.run_dir={tmp_path}"])
    with RunDir(config, False) as run_dir:
        run_dir.append(run_dir.metrics_file, [{"step": 1}])
    if what == "write_config":
        monkeypatch.setattr("lora_moe_rl.files.run_dir.replace_file", refuses)
    else:
        monkeypatch.setattr(RunDir, "rewind", refuses)
    with RunDir(config, True) as run_dir, pytest.raises(DiskWait, match="No space left"):
        run: Any = SimpleNamespace(config=config, run_dir=run_dir, resumed=True, step=0)
        start._run(run, *(OwnRay(config), Pusher(config.checkpoint, tmp_path, print)))
