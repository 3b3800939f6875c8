"""Code of a model runs under limits: whatever it does, it ends, and the run has lost nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from lora_moe_rl.environments.parts.tool_calls import Call
from lora_moe_rl.environments.parts.tool_talk import ToolSettings
from lora_moe_rl.environments.parts.toolbox import Toolbox
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.tools import Sandbox
from lora_moe_rl.tools.sandbox import HOLDS, WORK, Limits, container_command

pytestmark = pytest.mark.seconds  # starts processes


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(wall_s=60, cpu_s=60, output_bytes=1000, disk_mb=2)


@pytest.fixture(scope="module")
def held(sandbox):
    return sandbox.held


def needs(held: tuple[str, ...], what: str) -> None:
    if what not in held:
        pytest.skip(f"this kernel does not hold {what}")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "[no output]"),
        ("import sys; print('a'); sys.exit(3)", "a\n[exit code 3]"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\xfeok')", "��ok"),
        ("import os; os.kill(os.getpid(), 9)", "[ended by SIGKILL]"),
        ("import os; os.kill(os.getpid(), 40)", "[ended by 40]"),
        ("import sys; print(sys.stdin.read(), 'nothing')", " nothing"),
    ],
)
def test_what_code_prints_and_how_it_ends_is_told(sandbox, code, text):
    assert sandbox.run(code).text == text


def test_an_engine_that_does_not_read_its_code_is_ended(monkeypatch, tmp_path):
    """64 KiB are what a pipe takes."""
    (tmp_path / "docker").write_text('#!/bin/sh\n[ "$1" = run ] && exec sleep 600\nexit 0\n')
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ran = Sandbox(container="docker", wall_s=1).run("#" * 200_000)
    assert ran.text == "[ended: it took longer than wall_s=1]"


def test_code_longer_than_a_pipe_is_run(sandbox):
    assert sandbox.run("#" * 1_000_000 + "\nprint('here')").text == "here"


def test_what_it_raises_is_told_with_its_line(sandbox):
    text = sandbox.run("a = 1\nraise ValueError('no')").text
    assert "line 2, in <module>" in text and text.endswith("ValueError: no\n[exit code 1]")


def test_a_hang_a_loop_and_a_flood_are_ended():
    hang = Sandbox(wall_s=1).run("import time\nprint('so far', flush=True)\ntime.sleep(600)")
    assert hang.text == "so far\n[ended: it took longer than wall_s=1]"
    quiet = Sandbox(wall_s=1).run("import os, time\nos.close(1); os.close(2)\ntime.sleep(600)")
    assert quiet.ended == "ended: it took longer than wall_s=1"
    loop = Sandbox(wall_s=500, cpu_s=1).run("while True: pass")
    assert loop.ended == "ended: it used more than cpu_s=1 of a processor"
    flood = Sandbox(wall_s=500, output_bytes=1000).run("while True: print('x' * 1000000)")
    assert flood.output == "x" * 1000 and flood.ended.startswith("ended: it wrote more than")


def test_memory_processes_open_files_and_the_disk_are_bounded(sandbox, held):
    assert "MemoryError" in sandbox.run("bytearray(1 << 32)").text
    opened = "import os\nprint(len([os.open('main.py', 0) for _ in range(500)]))"
    assert "Too many open files" in sandbox.run(opened).text
    needs(held, "files")
    whole = "open('a', 'wb').write(bytes(1 << 20)); open('b', 'wb').write(bytes(1 << 21))"
    assert "No space left" in sandbox.run(whole).text
    many = "for i in range(1000): open(str(i), 'w')"
    assert "No space left" in Sandbox(wall_s=60, num_files=100).run(many).text
    needs(held, "user")
    forks = "import os\nfor _ in range(200):\n    if not os.fork(): import time; time.sleep(600)"
    assert "Resource temporarily unavailable" in sandbox.run(forks).text


def test_what_it_has_started_ends_with_it(sandbox):
    code = (
        "import os, subprocess\n"
        "subprocess.Popen(['sleep', '617'], start_new_session=True)\n"
        "if not os.fork():\n    os.setsid()\n    os.execvp('sleep', ['sleep', '617'])\n"
        "print('begun')"
    )
    assert sandbox.run(code).text == "begun"
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "617"]]
    assert not left


HANGS = Call("python", ["print('so far', flush=True); import time; time.sleep(123456)"])


def called(monkeypatch, folder: Path, timeout_s: float, spec="lora_moe_rl.tools:python"):
    """What a call of the hanging code in a tool's worker came to, the processes that the worker had
    started for it, and the worker. `folder`: where they make temporary folders."""
    folder.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    toolbox = Toolbox([spec], 1, timeout_s, 1000)
    worker = psutil.Process(toolbox.pool.workers[0].process.pid)

    async def meanwhile():
        calling = asyncio.create_task(toolbox.call(HANGS))
        started: list[psutil.Process] = []
        while not any(process.name().startswith("python") and "main.py" in process.cmdline()
                      for process in started):  # fmt: skip
            await asyncio.sleep(0.01)
            started = worker.children(recursive=True)
        assert len(list(folder.iterdir())) == 1
        if timeout_s > 100:
            worker.kill()
            psutil.wait_procs(started, timeout=30)
            left = [process for process in started if lives(process)]
            return await calling, left
        return await calling, started

    try:
        told, started = asyncio.run(meanwhile())
    finally:
        toolbox.close()
    psutil.wait_procs(started, timeout=30)  # what hangs would for longer
    return told, [process for process in started if lives(process)]


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_left_of_it_when_the_worker_that_has_called_it_is_late(tmp_path, monkeypatch):
    told, left = called(monkeypatch, tmp_path, 3)
    assert told == (False, "python took longer than environment.tool_timeout_s=3")
    assert not left and not list(tmp_path.iterdir())


def test_it_ends_with_who_has_called_it_even_where_nobody_looks_for_it(tmp_path, monkeypatch):
    told, left = called(monkeypatch, tmp_path, 600)
    assert told == (False, "python ended its process (signal SIGKILL)")
    assert not left and not list(tmp_path.iterdir())


def test_its_own_limit_comes_before_that_of_the_tool():
    """So that the model is told what its code has printed."""
    assert Limits().wall_s + 5 <= ToolSettings(name="tools").tool_timeout_s


CONTAINED = """
from lora_moe_rl.tools import Sandbox

def python(code: str) -> str:
    '''
    Runs code.

    Args:
        code: The code.
    '''
    return Sandbox(container="podman", image="here", wall_s=600).run(code).text
"""


def test_a_container_is_killed_when_the_worker_that_has_started_it_is_ended(tmp_path, monkeypatch):
    program = engine(tmp_path, monkeypatch, ENGINE)
    (tmp_path / "mine.py").write_text(CONTAINED)
    toolbox = Toolbox([f"{tmp_path}/mine.py:python"], 1, 5, 1000)
    try:
        done, text = asyncio.run(toolbox.call(HANGS))
    finally:
        toolbox.close()
    assert not done and "took longer than" in text
    deadline, log = time.monotonic() + 60, Path(f"{program}.log")
    while not (asked := log.read_text().splitlines())[-1].startswith("kill "):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = next(line for line in asked if line.startswith("run "))
    assert f"--name {asked[-1].removeprefix('kill ')} " in started


def test_it_has_no_network(sandbox, held):
    needs(held, "network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        told = sandbox.run(code).text
    assert "unreachable" in told or "refused" in told


def test_it_reads_and_writes_no_file_of_the_run_and_no_secret(sandbox, held, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "abc")
    assert sandbox.run("import os; print('SECRET_KEY' in os.environ)").text == "False"
    needs(held, "files")
    tmp_path.chmod(0o777)
    (tmp_path / "mine").write_text("x")
    (tmp_path / "mine").chmod(0o666)
    told = sandbox.run(f"open({str(tmp_path / 'mine')!r}, 'w')").text
    assert "Read-only file system" in told or "Permission denied" in told
    needs(held, "user")
    (tmp_path / "mine").chmod(0o600)
    assert "Permission denied" in sandbox.run(f"open({str(tmp_path / 'mine')!r})").text
    assert int(sandbox.run("import os; print(os.getuid())").text) not in (0, os.getuid())


def test_nothing_is_left_in_the_temporary_folder(sandbox, monkeypatch, tmp_path):
    tmp_path.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sandbox.run("open('a', 'w').write('x')")
    assert not list(tmp_path.iterdir())


def test_what_has_to_hold_and_does_not_is_an_error(monkeypatch):
    monkeypatch.setattr(Sandbox, "held", ("processes",))
    Sandbox(must_hold=("processes",))
    with pytest.raises(ConfigError, match="does not hold network, user"):
        Sandbox(must_hold=("network", "processes", "user"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"memory": 5}, "has no limit memory; it has wall_s"),
        ({"must_hold": ("peace",)}, "must_hold=peace is none of network"),
        ({"container": "lxc"}, "container='lxc' is none of docker, podman"),
    ],
)
def test_what_there_is_not_is_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        Sandbox(**settings)


# Written in the place of an engine: it answers as that one without a daemon, or runs the code here.
NO_DAEMON = "#!/bin/sh\necho 'Cannot connect to the daemon' >&2\nexit 1\n"
ENGINE = """#!/bin/sh
echo "$@" >> "$0.log"
case "$1" in run) exec python3 -I -u - ;; image) [ "$3" = here ] ;; esac
"""


def engine(folder: Path, monkeypatch, source: str) -> Path:
    program = folder / "podman"
    program.write_text(source)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return program


def test_a_container_needs_an_engine_its_daemon_and_an_image(tmp_path, monkeypatch):
    engine(tmp_path, monkeypatch, NO_DAEMON)
    told = r"container=podman: its daemon does not answer \(Cannot connect to the daemon\)"
    with pytest.raises(ConfigError, match=told):
        Sandbox(container="podman")
    engine(tmp_path, monkeypatch, ENGINE)
    with pytest.raises(ConfigError, match="image=gone is not here: podman pull gone"):
        Sandbox(container="podman", image="gone")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="there is no program podman"):
        Sandbox(container="podman")


def test_a_container_is_asked_as_a_process_is_and_killed_when_it_is_late(tmp_path, monkeypatch):
    program = engine(tmp_path, monkeypatch, ENGINE)
    sandbox = Sandbox(container="podman", image="here", wall_s=60)
    assert sandbox.held == HOLDS
    assert sandbox.run("print(6 * 7)").text == "42"
    assert sandbox.run("raise SystemExit(4)").text == "[exit code 4]"
    late = Sandbox(container="podman", image="here", wall_s=1)
    assert late.run("import time; time.sleep(600)").ended.startswith("ended: it took longer")
    asked = (tmp_path / "podman.log").read_text().splitlines()
    name = asked[-2].partition("--name ")[2].split()[0]
    assert asked[-1] == f"kill {name}" and program.exists()


def test_a_container_gets_every_limit_and_no_right():
    command = " ".join(container_command("docker", "python:3", "n", Limits(memory_mb=7)))
    for part in (
        "--network none", "--memory 7m", "--memory-swap 7m", "--pids-limit 32", "--read-only",
        "--cap-drop ALL", "--security-opt no-new-privileges", "--user 65534:65534",
        "--ulimit cpu=10", "size=64m,nr_inodes=256", "--pull never",
    ):  # fmt: skip
        assert part in command
    assert command.endswith("python:3 python -I -u -")


def test_equal_code_says_the_same_each_time(sandbox):
    """It is told in the tokens that a policy goes on from."""
    code = "import os; print(os.getcwd()); 1 / 0"
    first, second = sandbox.run(code), sandbox.run(code)
    assert first.output == second.output
    assert first.output.startswith(f"{WORK}\n")
    assert f'File "{WORK}/main.py", line 1' in first.output
