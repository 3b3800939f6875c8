"""What a process has started ends with it, however it ends."""

import subprocess
import sys

import psutil

DRIVER = """
import subprocess, sys
from lora_moe_rl.cluster.watchdog import watch
watch()
start = "setsid sleep 600 > /dev/null 2>&1 & echo $!"
orphan = subprocess.run(["sh", "-c", start], capture_output=True, text=True).stdout.strip()
child = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
print(child, orphan, flush=True)
sys.stdin.readline()
"""


def test_what_a_killed_process_has_started_ends_with_it():
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    started = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    (dog,) = [
        p for p in psutil.Process(driver.pid).children() if "watchdog" in " ".join(p.cmdline())
    ]
    assert len(started) == 2 and all(process.is_running() for process in started)
    driver.kill()
    driver.wait()
    for process in [*started, dog]:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            psutil.wait_procs([process], timeout=0.2)
