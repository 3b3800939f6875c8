"""A run whose process dies is started again: after which ends, how often, and with nothing left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lora_moe_rl.cli import main
from lora_moe_rl.errors import DISK, FAULT, ActorFailed, ClusterError, MismatchError
from lora_moe_rl.run import supervisor
from lora_moe_rl.run.supervisor import Lives, Newest


def test_the_end_of_a_run_and_errors_that_would_come_again_are_the_end():
    asked = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
    for code in (0, 1, 2, 130, *asked, MismatchError.exit_code):
        assert Lives(3, Newest()).ended(code, Newest()) is None, code


def test_a_killed_process_and_a_failed_actor_are_not():
    assert "signal SIGKILL" in (Lives(3, Newest()).ended(-signal.SIGKILL, Newest(4)) or "")
    assert "exit code 75" in (Lives(3, Newest()).ended(FAULT, Newest(4)) or "")
    assert "from the checkpoint of step 4" in (
        Lives(3, Newest()).ended(-signal.SIGSEGV, Newest(4)) or ""
    )
    assert ActorFailed.exit_code == ClusterError.exit_code == FAULT


def test_only_lives_without_a_new_checkpoint_are_bounded():
    lives = Lives(2, Newest())
    newest = [0, 2, 2, 4, 6, 6, 6, 6]
    assert [lives.ended(FAULT, Newest(step)) is not None for step in newest] == [True] * 7 + [False]
    assert lives.in_vain == 3


def test_a_disk_is_waited_for_however_long_that_takes():
    lives = Lives(2, Newest())
    codes = [FAULT, FAULT, *[DISK] * 9]
    assert all(lives.ended(code, Newest()) for code in codes)
    assert lives.in_vain == 2 and lives.ended(FAULT, Newest()) is None


def test_a_checkpoint_in_the_place_of_a_damaged_one_is_a_new_one(run_dir):
    """Step 2 was damaged: the run went on from an earlier one, and came to it again."""
    root = run_dir / "checkpoints"
    assert Newest.of(root) == Newest(2) and Newest.of(run_dir) == Newest()
    manifest = root / "step-000002/manifest.json"
    manifest.touch()
    before = Newest.of(root)
    os.utime(manifest, ns=(0, before.written + 1))
    lives = Lives(0, before)
    assert lives.ended(FAULT, Newest.of(root)) is not None
    assert lives.ended(FAULT, Newest.of(root)) is None


DRIVER = """
import sys
from lora_moe_rl.config import RunConfig
from lora_moe_rl.run import supervisor
from lora_moe_rl.run.supervisor import supervise
supervisor.DISK_S = float(sys.argv[5])
config = RunConfig(logging={"run_dir": sys.argv[1]}, faults={"max_resumes": int(sys.argv[2])})
first, later = (["sh", "-c", script] for script in sys.argv[3:5])
sys.exit(supervise(config, first, later))
"""


def start(
    run_dir: Path, first: str, later: str, max_resumes: int = 3, disk_s: float = 1.0
) -> subprocess.Popen:
    arguments = [str(run_dir), str(max_resumes), first, later, str(disk_s)]
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run that has a checkpoint."""
    folder = tmp_path / "run"
    (folder / "checkpoints/step-000002").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "config.yaml").touch()
    return folder


def test_what_a_killed_run_had_started_has_ended_before_it_goes_on(run_dir, tmp_path):
    """An orphan in a session of its own keeps writing for a while; and one is ended."""
    orphan = f"setsid sh -c 'sleep 1; echo old >> {tmp_path}/order' > /dev/null 2>&1 &"
    first = f"{orphan} echo first >> {tmp_path}/order; kill -9 $$"
    driver = start(run_dir, first, f"echo later >> {tmp_path}/order")
    _, said = driver.communicate(timeout=600)
    assert driver.returncode == 0
    assert (tmp_path / "order").read_text().split() == ["first", "old", "later"]
    assert "signal SIGKILL" in said and "1 of faults.max_resumes=3" in said
    assert "signal SIGKILL" in (run_dir / "logs/supervisor.log").read_text()


def test_a_run_without_a_step_is_started_as_it_was_the_first_time(tmp_path):
    first = f"echo first >> {tmp_path}/order; [ $(wc -l < {tmp_path}/order) = 3 ] || exit 75"
    driver = start(tmp_path / "run", first, "exit 1")
    driver.communicate(timeout=600)
    assert driver.returncode == 0
    assert (tmp_path / "order").read_text().split() == ["first"] * 3
    assert not (tmp_path / "run").exists()  # a note there would keep the run from starting


def test_beyond_the_bound_it_ends_as_the_run_did(run_dir, tmp_path):
    driver = start(run_dir, "exit 75", f"echo x >> {tmp_path}/lives; kill -9 $$", max_resumes=2)
    _, said = driver.communicate(timeout=600)
    assert driver.returncode == 128 + signal.SIGKILL
    assert len((tmp_path / "lives").read_text().split()) == 2
    assert "3 times in a row without a new checkpoint" in said


def test_a_signal_reaches_the_run_once_and_it_is_not_started_again(run_dir, tmp_path):
    handles = f"trap 'echo asked >> {tmp_path}/asked; exit 75' TERM; touch {tmp_path}/there; "
    driver = start(run_dir, handles + "while true; do sleep 0.1; done", "exit 1")
    while not (tmp_path / "there").exists():
        time.sleep(0.05)
    driver.terminate()
    driver.communicate(timeout=600)
    assert driver.returncode == 75
    assert (tmp_path / "asked").read_text().split() == ["asked"]


def test_a_full_disk_does_not_use_up_the_bound(run_dir, tmp_path):
    count = f"echo x >> {tmp_path}/lives; [ $(wc -l < {tmp_path}/lives) = 3 ] || exit {DISK}"
    driver = start(run_dir, "exit 75", count, max_resumes=1)
    began = time.monotonic()
    _, said = driver.communicate(timeout=600)
    assert driver.returncode == 0 and time.monotonic() - began > 2
    assert said.count("the disk is full or away") == 2


def test_a_note_that_the_disk_refuses_ends_nothing(run_dir):
    (run_dir / "logs/supervisor.log").symlink_to("/dev/full")
    driver = start(run_dir, "kill -9 $$", "exit 0")
    _, said = driver.communicate(timeout=600)
    assert driver.returncode == 0 and "signal SIGKILL" in said


def test_a_console_that_is_gone_ends_nothing_either(run_dir, tmp_path):
    driver = start(run_dir, "sleep 1; kill -9 $$", f"touch {tmp_path}/there")
    assert driver.stderr is not None
    driver.stderr.close()
    driver.stderr = None
    driver.communicate(timeout=600)
    assert driver.returncode == 0 and (tmp_path / "there").exists()


def names_of(processes: list[psutil.Process]) -> list[str]:
    """Of those that are still there."""
    found = []
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            found.append(one.name())
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_between_two_lives_is_heard(run_dir, tmp_path, number):
    """It waits for what the dead run has left. The first process of a container would not hear of a
    signal that has no handler."""
    orphan = "setsid sleep 3 > /dev/null 2>&1 &"
    driver = start(run_dir, f"{orphan} kill -9 $$", f"touch {tmp_path}/later")
    run = psutil.Process(driver.pid)
    while "sleep" not in names_of(run.children()):  # until it was adopted
        time.sleep(0.05)
    driver.send_signal(number)
    driver.communicate(timeout=600)
    assert driver.returncode == 130 and not (tmp_path / "later").exists()


def test_a_signal_while_a_disk_is_waited_for_is_heard(run_dir, tmp_path):
    driver = start(run_dir, f"exit {DISK}", f"touch {tmp_path}/later", disk_s=600)
    log = run_dir / "logs/supervisor.log"
    while not log.exists() or not log.read_text():
        time.sleep(0.05)
    driver.terminate()
    driver.communicate(timeout=600)
    assert driver.returncode == 130 and not (tmp_path / "later").exists()


def test_a_process_that_cannot_be_started_is_a_life_in_vain(monkeypatch, capsys):
    def popen(*args, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(supervisor, "DISK_S", 0.0)
    monkeypatch.setattr(supervisor.subprocess, "Popen", popen)
    assert supervisor._live(["true"], supervisor.Asked()) == FAULT
    assert "cannot be started: [Errno 12] Cannot allocate memory" in capsys.readouterr().err


def test_the_run_is_asked_to_end_when_its_supervisor_is_killed(run_dir, tmp_path):
    driver = start(run_dir, f"echo $$ > {tmp_path}/pid; exec sleep 600", "exit 1")
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    run = psutil.Process(int((tmp_path / "pid").read_text()))
    driver.kill()
    driver.communicate(timeout=600)
    _, alive = psutil.wait_procs([run], timeout=60)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_what_goes_on_is_the_same_command_with_resume(monkeypatch):
    calls = []
    monkeypatch.setattr(supervisor, "supervise", lambda *what: calls.append(what) or 7)
    words = ["recipes/tiny_arithmetic.py", "--supervise", "--resume-from", "X", "trainer.steps=3"]
    assert main(["train", *words]) == 7
    ((config, first, later),) = calls
    assert config.trainer.steps == 3
    command = [sys.executable, "-m", "lora_moe_rl", "train", "recipes/tiny_arithmetic.py"]
    assert first == [*command, "--resume-from", "X", "trainer.steps=3"]
    assert later == [*command[:4], "--resume", "recipes/tiny_arithmetic.py", "trainer.steps=3"]


def test_a_dry_run_is_not_supervised(capsys):
    assert main(["train", "recipes/tiny_arithmetic.py", "--supervise", "--dry-run"]) == 2
    assert "--supervise and --dry-run are both given" in capsys.readouterr().err
