"""How fast the page is with a run of 2,000 steps and 100,000 samples, and one of 100,000 steps:

    python tests/browser/large.py

First seconds of this process's CPU for what the server does. With a Chromium then what a person
waits for: by the clock, and as seconds of CPU of the page's own thread and of the server, which
other load on the machine changes little.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import numpy as np
from browser import Browser, find_browser
from recorded_run import metrics_of, record

from lora_moe_rl.page.link import HOST
from lora_moe_rl.page.runs import Run, Runs
from lora_moe_rl.page.samples import Choice
from lora_moe_rl.page.server import listen, make_server

STEPS, SAMPLES, LONG = 2000, 50, 100_000
LAYERS, EXPERTS = 48, 128
WORDS = ["the", "answer", "is", "therefore", "sum", "product", "token", "route", "expert", "layer"]
CHOICES = {
    "no filter": Choice(),
    "a rare word": Choice(text="needle"),
    "a word of all": Choice(text="the"),
    "rewards, longest": Choice(reward_from=0.7, order="-tokens"),
}
# One after the other, each beside those before it.
FILTERS = (("text", "needle"), ("text", "the"), ("reward_from", "0.7"), ("step_from", "1000"))


def make(folder: Path) -> None:
    """60 metrics a step, as a run has them, samples of 1.2 kB, and loads of 48 layers with 128
    experts."""
    run_dir, choose = record(folder, range(1, 2)), random.Random(0)
    with open(run_dir.metrics_file, "w") as file:
        for step in range(1, STEPS + 1):
            more = {f"more/{i}": choose.random() for i in range(60)}
            noise = {"reward/mean": step / STEPS + choose.gauss(0, 0.05)}
            file.write(json.dumps(metrics_of(step) | noise | more) + "\n")
    draw = np.random.default_rng(0)
    with open(run_dir.routes_file, "w") as file:
        for step in range(1, STEPS + 1):
            loads = draw.integers(0, 2000, (LAYERS, EXPERTS)).tolist()
            line = {"step": step, "replay": "r3", "layers": list(range(LAYERS)), "loads": loads}
            file.write(json.dumps(line) + "\n")
    with open(run_dir.samples_file, "w") as file:
        for number in range(STEPS * SAMPLES):
            file.write(json.dumps(sample(number, choose)) + "\n")


def make_long(folder: Path) -> None:
    """Of many steps the metrics alone, with a dozen that are shown at first."""
    shown = ("policy/entropy", "rollout/truncated", "optim/grad_norm", "loss/policy", "time/train")
    more = ("time/refit", "experts/busiest", "experts/entropy", "experts/idle", "refit/seconds")
    choose = random.Random(0)
    with open(record(folder, range(1, 2)).metrics_file, "w") as file:
        for step in range(1, LONG + 1):
            noise = {name: choose.random() for name in ("reward/mean", *shown, *more)}
            file.write(json.dumps(metrics_of(step) | noise | {"mismatch/kl": 1e-9}) + "\n")


def sample(number: int, choose: random.Random) -> dict:
    step, index = divmod(number, SAMPLES)
    rare = " needle" if choose.random() < 0.01 else ""
    return {
        "sample": index,
        "step": step + 1,
        "drawn": number // 8,
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
    tell("routes: the first look", lambda: run.routes.of_step(None), cpu)
    tell("routes: a layer", lambda: run.routes.of_layer(7), cpu)


def page_cpu(browser: Browser) -> float:
    """Seconds of CPU that the page's main thread has worked."""
    metrics = browser.call("Performance.getMetrics")["metrics"]
    return next(one["value"] for one in metrics if one["name"] == "TaskDuration")


def of_browser(browser: Browser, address: str) -> None:
    """By the clock, from the navigation or the last key to what is shown then."""
    chart = "document.querySelector('[data-metric=\"reward/mean\"]')?.chart.lines?.length === 1"
    count = "document.getElementById('count')?.innerText"

    def look(view: str, condition: str, run: str = "large") -> None:
        browser.open(f"{address}#view={view}&runs={run}")
        browser.wait(condition)

    def move() -> None:
        """Ten times over a chart, each until it is painted."""
        x, y = browser.middle('[data-metric="reward/mean"] canvas')
        for i in range(10):
            browser.point(x - 80 + 15 * i, y)
            browser.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")

    def filtered(name: str, text: str) -> None:
        before = browser.evaluate(count)
        browser.type(f"#filter-{name}", text)
        browser.wait(f"({count} ?? {json.dumps(before)}) !== {json.dumps(before)}")

    def choose(step: int) -> None:
        browser.evaluate(f"go({{ step: '{step}' }})")
        browser.wait(f"routesView.found.shown.step === {step}")

    def clocked(what: str, call: Callable[[], object]) -> None:
        begin = time.monotonic(), page_cpu(browser), cpu()
        call()
        end = time.monotonic(), page_cpu(browser), cpu()
        seconds = [b - a if b >= a else b for a, b in zip(begin, end)]  # a new page is a new thread
        print(f"{what:<36}" + "".join(f"{one:9.3f} s" for one in seconds), flush=True)

    browser.call("Performance.enable", timeDomain="threadTicks")
    print(f"\n{'in the browser':<36}{'clock':>11}{'page':>11}{'server':>11}")
    for time_of in ("the first time", "again"):
        clocked(f"curves, {time_of}", lambda: look("curves", chart))
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
        print(f"{'  of these until the first paint':<36}{browser.evaluate(paint):9.3f} s")
    clocked("ten moves over a chart", move)
    clocked("samples, the first time", lambda: look("samples", f"{count}?.includes('100,000')"))
    clocked("samples, again", lambda: look("samples", f"{count}?.includes('100,000')"))
    for name, text in FILTERS:
        clocked(f"filter {name}={text}", lambda n=name, t=text: filtered(n, t))
    there = "document.querySelectorAll('#loads .heat').length === 2"
    clocked("routes, the first time", lambda: look("routes", there))
    clocked("routes of another step", lambda: choose(1000))
    for time_of in ("the first time", "again"):
        clocked(f"curves of {LONG:,} steps, {time_of}", lambda: look("curves", chart, "long"))
    clocked("ten moves over a chart", move)


cpu = time.process_time


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        load = " ".join(f"{one:.1f}" for one in os.getloadavg())
        print(f"{os.cpu_count()} cores, load averages before it {load}")
        make(root / "runs" / "large")
        make_long(root / "runs" / "long")
        of_server(next(run for run in Runs(root / "runs").look() if run.name == "large"))
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
