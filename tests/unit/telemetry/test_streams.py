"""A run whose console is gone goes on: a closed pipe, a full disk, a terminal that was closed."""

from __future__ import annotations

import errno
import logging
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_moe_rl import cli
from lora_moe_rl.errors import FAULT, ActorFailed
from lora_moe_rl.telemetry import console

SPEAKER = """
import signal, sys
from pathlib import Path
from lora_moe_rl.config import RunConfig
from lora_moe_rl.telemetry import console, names
from lora_moe_rl.telemetry.console import StepLines

signal.signal(signal.SIGHUP, signal.SIG_IGN)
folder, way = Path(sys.argv[1]), sys.argv[2]
console.speak(way)
console.log_to(folder / "controller.log")
(folder / "there").touch()
sys.stdin.readline()
config, lines = RunConfig(), StepLines(RunConfig())
for step in range(1, 4):
    with console.Starting():
        pass
    with console.progress(4, config) as advance:
        advance(1)
    lines.show({"step": step, names.STEP_SECONDS: 1.0})
    console.say("said")
    console.warn("warned")
    print("a reward's own words", flush=True)
(folder / "done").touch()
"""


def begin(folder: Path, way: str, **streams) -> subprocess.Popen:
    words = [sys.executable, "-c", SPEAKER, str(folder), way]
    speaker = subprocess.Popen(words, stdin=subprocess.PIPE, **streams)
    while not (folder / "there").exists():
        time.sleep(0.05)
    return speaker


def goes_on(speaker: subprocess.Popen, folder: Path, why: str) -> None:
    """It is let speak, and comes to its end."""
    speaker.communicate(b"go on\n", timeout=120)
    assert speaker.returncode == 0 and (folder / "done").exists()
    logged = (folder / "controller.log").read_text()
    assert logged.count("sys.stdout cannot be written") == 1 and why in logged


@pytest.mark.parametrize("way", ["lines", "json"])
def test_with_a_reader_that_has_ended(tmp_path, way):
    """train | head -1"""
    speaker = begin(tmp_path, way, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert speaker.stdout is not None and speaker.stderr is not None
    speaker.stdout.close()
    speaker.stderr.close()
    speaker.stdout = speaker.stderr = None
    goes_on(speaker, tmp_path, "Broken pipe")


def test_with_a_terminal_that_was_closed(tmp_path):
    ours, theirs = pty.openpty()
    speaker = begin(tmp_path, "lines", stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)
    goes_on(speaker, tmp_path, "Input/output error")


FULL = """
import os, sys
from lora_moe_rl.telemetry import console
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
for line in range(2000):
    console.say("said to a file of a full disk")
"""


def test_with_a_full_disk():
    done = subprocess.run([sys.executable, "-c", FULL], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stderr.count("sys.stdout cannot be written") == 1  # there is no log here


class Disk:
    """A standard stream on a disk that is full at first."""

    encoding = "utf-8"

    def __init__(self):
        self.full, self.text = True, ""

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_where_there_is_room_again_it_is_said_there(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(sys, "stdout", disk)
    console.say("first")
    disk.full = False
    console.say("second")
    assert disk.text.endswith("second\n")


def test_what_a_signal_says_in_the_middle_of_a_write_ends_no_run(monkeypatch):
    def write(text: str) -> int:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    disk = Disk()
    monkeypatch.setattr(disk, "write", write)
    monkeypatch.setattr(sys, "stdout", disk)
    console.say_stopping()


def test_an_error_keeps_its_exit_code(monkeypatch):
    def fails():
        raise ActorFailed("engine-0", "it died")

    monkeypatch.setattr(sys, "stderr", Disk())
    assert cli.exit_code_of(fails, []) == FAULT


def test_other_commands_end_with_their_reader():
    """plan | head: as any program of a pipe."""
    reads, writes = os.pipe()
    os.close(reads)
    words = [sys.executable, "-m", "lora_moe_rl", "train", "--help"]
    program = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert program.returncode == 1 and program.stderr == ""


def test_without_a_log_a_warning_is_said_once():
    words = ["from lora_moe_rl.telemetry import console", "console.warn('there')"]
    done = subprocess.run([sys.executable, "-c", "; ".join(words)], capture_output=True, text=True)
    assert done.stderr == "warning: there\n"


def test_the_log_goes_to_stderr_as_long_as_there_is_one(tmp_path, monkeypatch):
    before = list(logging.root.handlers)
    disk = Disk()
    monkeypatch.setattr(sys, "stderr", disk)
    try:
        console.log_to(tmp_path / "controller.log")
        logging.getLogger("x").warning("first")
        disk.full = False
        logging.getLogger("x").warning("second")
        console.warn("no copy")
        assert disk.text == "WARNING x: second\nwarning: no copy\n"  # each is there once
        assert "W lora_moe_rl.telemetry.console: no copy" in (
            (tmp_path / "controller.log").read_text()
        )
    finally:
        logging.basicConfig(handlers=before, force=True)
