"""Checkpoints and adapters on their way to a second place, behind the run's back.

    step's end ── hard links in RUN/pushing/step-N ──> one thread ──> a process a try (storage.py)

What waits is one: a newer step takes the place of one that has not begun. Hard links cost no space
as long as the originals are there, and keep the files when they are pruned. Nothing that fails here
stops the run: it is said.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from lora_moe_rl.config.checkpoint import CheckpointConfig
from lora_moe_rl.config.recipes import CONFIG
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.checkpoint import step_of
from lora_moe_rl.files.linking import link
from lora_moe_rl.files.storage import ADAPTERS, CHECKPOINTS, OTHERS

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class Failed(Exception):
    """`code`: the exit code of a process that ended."""

    def __init__(self, why: str, code: int | None = None):
        super().__init__(why)
        self.code = code

    @property
    def final(self) -> bool:
        """Whether another try would fail too."""
        return self.code in (ConfigError.exit_code, OTHERS)


def _start(words: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "lora_moe_rl.files.storage", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:  # no memory, or too many files or processes
        raise Failed(f"no process can be started: {error}") from error


class Pusher:
    """A context manager; on leaving it waits for what is under way, as long as that may take,
    unless the run is ended at once.

    `run_dir`: of the run. `say` gets warnings. Without checkpoint.push_to it does nothing.
    """

    def __init__(self, config: CheckpointConfig, run_dir: Path, say: Callable[[str], None]):
        self.config, self.run_dir, self.say = config, run_dir, say
        self.goes_on: int | None = None
        self.pushed: int | None = None  # the newest step of which all is there
        self._folder = run_dir / "pushing"
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._tried = self._begun = self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="pusher")

    def begin(self, settings: str, goes_on: int | None) -> None:
        """Tries the place, once; a second call does nothing. `settings`: the run's, as YAML.
        `goes_on`: the step that it goes on from; None when it has not been here before. Raises
        ConfigError where the copies of another run are, and for a new run where it cannot be
        written."""
        if self.config.push_to is None or self._tried:
            return
        self.goes_on, self._tried = goes_on, True
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        (self._folder / CONFIG).write_text(settings)
        try:
            self._begin(self._try(self._first_words(), self._deadline()))
        except Failed as error:
            told = f"checkpoint.push_to={self.config.push_to} cannot be written: {error}"
            if goes_on is None or error.code == OTHERS:
                raise ConfigError(told) from error
            self.say(f"{told}; the run goes on, and every checkpoint is tried")

    def __enter__(self) -> Pusher:
        if self.config.push_to is not None:
            self._thread.start()
        return self

    def _first_words(self) -> list[str]:
        config = str(self._folder / CONFIG)
        words = ["begin", str(self.run_dir), str(self.config.push_to), config]
        return words if self.goes_on is None else [*words, str(self.goes_on)]

    def _begin(self, said: str) -> None:
        """The place is ready; `said`: steps of a course that the run has left."""
        self._begun = True
        if said:
            self.say(
                f"the run goes on from step {self.goes_on}: at {self.config.push_to} the copies of "
                f"later steps are of a course that it has left ({said}), and their last files are "
                "named left.json now"
            )

    def push(self, path: Path, adapter: Path | None) -> None:
        """Takes note of a checkpoint and, if there is one, of the adapter's PEFT directory. Takes
        no longer than some hard links do."""
        if self.config.push_to is None:
            return
        taken = self._folder / path.name
        try:
            shutil.rmtree(taken, ignore_errors=True)
            link(path, taken / CHECKPOINTS)
            if adapter is not None:
                link(adapter, taken / ADAPTERS)
        except OSError as error:
            self.say(f"{path.name} is not copied to {self.config.push_to}: {error}")
            return
        with self._changed:
            if self._waiting is not None and self._waiting != taken:
                self.say(
                    f"{self._waiting.name} is not copied to {self.config.push_to}: {path.name} "
                    "was there before its turn came"
                )
                shutil.rmtree(self._waiting, ignore_errors=True)
            self._waiting = taken
            self._changed.notify()

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            try:
                self._copy(taken)
                self.pushed = step_of(taken)
            except Exception as error:  # whatever it is, the next one has its turn
                why = str(error) if isinstance(error, Failed) else repr(error)
                self.say(
                    f"{taken.name} was not copied to {self.config.push_to}: {why}; the run and "
                    f"its own checkpoints are untouched (checkpoint.push_retries="
                    f"{self.config.push_retries}, push_timeout_s={self.config.push_timeout_s:g})"
                )
            finally:
                shutil.rmtree(taken, ignore_errors=True)

    def _next(self) -> Path | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closing)
            taken, self._waiting = self._waiting, None
            return taken

    def _copy(self, taken: Path) -> None:
        """Raises Failed with the last reason once all tries or the time are used up."""
        deadline = self._deadline()
        if not self._begun:
            self._begin(self._with_retries(self._first_words(), deadline))
        for folder in (CHECKPOINTS, ADAPTERS):
            if (taken / folder).is_dir():
                words = [str(self.run_dir), str(self.config.push_to), str(taken / folder)]
                self._with_retries(["upload", *words, f"{folder}/{taken.name}"], deadline)

    def _with_retries(self, words: list[str], deadline: float) -> str:
        attempt = 0
        while True:
            try:
                return self._try(words, deadline)
            except Failed as error:
                pause = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
                late = time.monotonic() + pause >= deadline
                if error.final or late or attempt == self.config.push_retries:
                    raise
                time.sleep(pause)
                attempt += 1

    def _try(self, words: list[str], deadline: float) -> str:
        """One process; returns what it prints. Its input is held open: where it ends, the run has,
        and so does it. Ctrl-C does not reach it, which ends the run after its step and not this.
        """
        process = _start(words)
        held, process.stdin = process.stdin, None  # which `communicate` would close
        try:
            printed, said = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failed(f"no end within push_timeout_s={self.config.push_timeout_s:g}") from None
        finally:
            process.kill()
            process.wait()
            assert held is not None
            held.close()
        if process.returncode:
            lines = said.decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"exit code {process.returncode}"
            raise Failed(reason, process.returncode)
        return printed.decode().strip()

    def _deadline(self) -> float:
        return time.monotonic() + self.config.push_timeout_s

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        at_once = error is not None and not isinstance(error, Exception)
        if not self._thread.is_alive() or at_once:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(1.0)
        if self._thread.is_alive():
            self.say(f"waiting until the last copy is at {self.config.push_to}")
            self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)
