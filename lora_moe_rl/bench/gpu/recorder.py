"""A plug-in of pytest: how each test ended is in the stage's file once it has ended, and which one
runs."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from lora_moe_rl.bench.gpu.parts import Parts

FILE, PART = "LORA_MOE_RL_TESTS_FILE", "LORA_MOE_RL_TESTS_PART"
MOST = 500  # characters of a message


class Recorder:
    def __init__(self, parts: Parts, name: str):
        self.parts, self.name = parts, name
        self.tests: list[dict[str, Any]] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.case: dict[str, Any] = {"name": _name(nodeid), "end": "passed", "seconds": 0.0}
        self._put({"running": self.case["name"]})

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called with the report of a test's setup, call or teardown."""
        self.case["seconds"] = round(self.case["seconds"] + report.duration, 3)
        if not report.passed and self.case["end"] != "failed":
            self.case |= {"end": report.outcome, "message": _message(report)}
        self.case |= dict(report.user_properties)  # what the test itself recorded

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests.append(self.case)
        self._put({})

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is a test that failed."""
        if not report.passed:
            case = {"name": _name(report.nodeid), "end": report.outcome, "seconds": 0.0}
            self.tests.append(case | {"message": _message(report)})
            self._put({})

    def _put(self, more: dict[str, Any]) -> None:
        counts = Counter(case["end"] for case in self.tests)
        self.parts.put(self.name, {"counts": dict(counts), "tests": self.tests} | more)


def _name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]


def _message(report: Any) -> str:
    """Why, in a line or two: of a skip its reason, of a failure what was raised."""
    told = report.longrepr
    if isinstance(told, tuple):  # (file, line, reason)
        return str(told[2]).removeprefix("Skipped: ")[:MOST]
    crash = getattr(told, "reprcrash", None)
    return (crash.message if crash else str(told))[:MOST]


def pytest_configure(config: Any) -> None:
    parts = Parts(Path(os.environ[FILE]))
    config.pluginmanager.register(Recorder(parts, os.environ[PART]))
