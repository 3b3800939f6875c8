"""How fast the page is with a run of 2,000 steps and 100,000 samples:

    python tests/browser/large.py

Seconds of this process's CPU, which other load on the machine does not change, for what the server
does; and with a Chromium what a person waits for, by the clock.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from browser import Browser, find_browser
from recorded_run import metrics_of, record

from lora_moe_rl.page.link import HOST
from lora_moe_rl.page.runs import Run, Runs
from lora_moe_rl.page.samples import Choice
from lora_moe_rl.page.server import listen, make_server

STEPS, SAMPLES = 2000, 50
WORDS = ["the", "answer", "is", "therefore", "sum", "product", "token", "route", "expert", "layer"]
CHOICES = {
    "no filter": Choice(),
    "a rare word": Choice(text="needle"),
    "a word of all": Choice(text="the"),
    "rewards, longest": Choice(reward_from=0.7, order="-tokens"),
}


def make(folder: Path) -> None:
    """60 metrics a step, as a run has them, and samples of 1.2 kB."""
    run_dir, choose = record(folder, range(1, 2)), random.Random(0)
    with open(run_dir.metrics_file, "w") as file:
        for step in range(1, STEPS + 1):
            more = {f"more/{i}": choose.random() for i in range(60)}
            noise = {"reward/mean": step / STEPS + choose.gauss(0, 0.05)}
            file.write(json.dumps(metrics_of(step) | noise | more) + "\n")
    with open(run_dir.samples_file, "w") as file:
        for number in range(STEPS * SAMPLES):
            file.write(json.dumps(sample(number, choose)) + "\n")


def sample(number: int, choose: random.Random) -> dict:
    step, index = divmod(number, SAMPLES)
    rare = " needle" if choose.random() < 0.01 else ""
    return {
        "sample": index,
        "step": step + 1,
        "row": number // 8,
        "prompt": " ".join(choose.choices(WORDS, k=40)),
        "response": " ".join(choose.choices(WORDS, k=140)) + rare,
        "reward": choose.choice([0.0, 0.5, 1.0]),
        "advantage": choose.gauss(0, 1),
        "finish_reason": "stop",
        "tokens": choose.randrange(500),
        "versions": [step],
    }


def tell(what: str, call: Callable[[], object], clock: Callable[[], float]) -> None:
    begin = clock()
    call()
    print(f"{what:<36} {clock() - begin:7.3f} s", flush=True)


def of_server(run: Run) -> None:
    tell("metrics: read and send all", lambda: run.metrics.columns(run.metrics.names()), cpu)
    tell("samples: the first look", lambda: run.samples.choose(Choice(), 0, 50), cpu)
    for name, choice in CHOICES.items():
        tell(f"samples: {name}", lambda c=choice: run.samples.choose(c, 0, 50), cpu)


def of_browser(browser: Browser, address: str) -> None:
    chart = "document.querySelector('[data-metric=\"reward/mean\"]')?.chart.lines?.length === 1"
    count = "document.getElementById('count').innerText.includes"

    def look(url: str, condition: str) -> None:
        browser.open(url)
        browser.wait(condition)

    tell("browser: curves are there", lambda: look(address, chart), time.monotonic)
    samples = f"{address}#view=samples"
    first = f"{count}('100,000')"
    tell("browser: the first look at samples", lambda: look(samples, first), time.monotonic)

    def search(text: str) -> None:
        browser.type("#filter-text", text)
        browser.wait(f"{count}('(of 100,000)')")

    tell("browser: a rare word", lambda: search("needle"), time.monotonic)


cpu = time.process_time


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make(root / "runs" / "large")
        (run,) = Runs(root / "runs").look()
        of_server(run)
        if find_browser() is None:
            return
        with listen(0) as socket, Browser(root / "profile") as browser:
            server = make_server(root / "runs")
            thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
            thread.start()
            of_browser(browser, f"http://{HOST}:{socket.getsockname()[1]}/")
            server.should_exit = True
            thread.join()


if __name__ == "__main__":
    main()
