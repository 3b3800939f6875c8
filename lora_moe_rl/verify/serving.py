"""`vllm serve` as a child process on loopback, asked through the OpenAI API."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.errors import ExportError
from lora_moe_rl.models import quantised
from lora_moe_rl.rollout.serve_command import serve_command, serving_of

HOST = "127.0.0.1"
ADAPTER = "adapter"  # the name under which an adapter is served
LONGEST = 256  # tokens of a request
POLL_S, GRACE_S, ANSWER_S = 0.2, 20.0, 300.0
LOG_LINES = 20
OWN = ("--skip-tokenizer-init",)  # what a user has no need to type: token ids in and out


class Server:
    """One `vllm serve` and what is asked of it. `start` makes one."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path, command: str):
        self.process, self.port, self.log, self.command = process, port, log, command
        self.root = f"http://{HOST}:{port}"

    def logprobs(
        self, model: str, prompt: Sequence[int], new_tokens: int
    ) -> tuple[list[int], np.ndarray]:
        """The prompt and the tokens that a greedy continuation adds; the logprob of each token
        after the first, float32 `[L - 1]`. `model`: a directory as served, or `ADAPTER`."""
        answer = self._post(
            "/v1/completions",
            {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 1,
                "prompt_logprobs": 0,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            },
        )
        try:
            choice = answer["choices"][0]
            of_prompt = [
                step[str(token)]["logprob"]
                for token, step in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
            ]
            values = of_prompt + choice["logprobs"]["token_logprobs"]
            tokens = [*prompt, *choice["token_ids"]]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ExportError(
                f"vLLM's answer has no logprobs where they are expected ({error!r}): "
                f"{json.dumps(answer)[:500]}"
            ) from error
        return tokens, np.asarray(values, dtype=np.float32)

    def wait(self, timeout: float) -> None:
        """Until it answers. Raises ExportError when it ends before, or takes longer."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ExportError(
                    f"vllm serve ended with {self.process.returncode}:\n{self._tail()}"
                )
            try:
                with urllib.request.urlopen(f"{self.root}/health", timeout=5):
                    return
            except OSError:
                time.sleep(POLL_S)
        raise ExportError(
            f"vllm serve did not answer within {timeout:g} s; give it longer with --timeout:\n"
            f"{self._tail()}"
        )

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.root}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise ExportError(f"vLLM answered {error.code} to {path}: {said}") from error
        except OSError as error:
            raise ExportError(f"vLLM did not answer {path}: {error}\n{self._tail()}") from error

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def end(self) -> None:
        """Ends the server and every process that it started."""
        family = _family(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(family, timeout=5)
        for one in alive:
            one.kill()
        psutil.wait_procs(alive, timeout=5)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@contextmanager
def start(
    model: Path,
    adapter: Path | None,
    rank: int,
    shape: ModelShape,
    dtype: str,
    timeout: float,
    own: Sequence[str] = OWN,
) -> Iterator[Server]:
    """A server of `model`, and of `adapter` on top of it, that answers; it is ended on leaving.
    `own`: arguments that are not in its `command`, of which the last ones hold.

    Raises ExportError when it does not come up.
    """
    port = _free_port()
    more = ["--host", HOST, "--dtype", dtype, "--max-model-len", str(LONGEST)]
    more += ["--generation-config", "vllm", "--no-enable-prefix-caching"]
    served = None if adapter is None else (ADAPTER, str(adapter))
    mla, of_family = serving_of(shape)
    all_more, form = [*of_family, *more], quantised.form_in(model)
    command = serve_command(str(model), served, rank, mla, all_more, form)
    with tempfile.TemporaryDirectory(prefix="lora-moe-rl-serve-") as folder:
        log = Path(folder) / "log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [*_found(command.words), *own, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | command.variables,
                start_new_session=True,
            )
        server = Server(process, port, log, str(command))
        try:
            server.wait(timeout)
            yield server
        finally:
            server.end()


def _found(words: list[str]) -> list[str]:
    """With the program that stands beside this Python, where no shell has the environment's."""
    return [str(Path(sys.executable).parent / words[0]), *words[1:]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
