"""Here so that `tests` is where pytest starts. Where several processes share the files out, those
that take longest are begun first: one that begins last keeps a process busy alone."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# No test is timed: a machine may be busy with something else.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Processes that tests spawn find their functions by the names that test files have: tests.unit....
# At the end: folders of ours are named as packages that others look for.
if (root := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.append(root)

# Under nohup a run is not to hear of a terminal that is closed, and tests see that it does.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Seconds of a test, roughly, by its first marker of these.
SECONDS = {"minute": 60, "whole": 60, "slow": 20, "seconds": 3}
OF_OTHERS = {"unit": 0.05, "integration": 2, "browser": 2}


@pytest.hookimpl(trylast=True)  # of those that are left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return  # alone, what the tests of several files share decides
    of_file: Counter[str] = Counter()
    for item in items:
        of_file[str(item.path)] += _seconds(item)
    items.sort(key=lambda item: (-of_file[str(item.path)], str(item.path)))


def _seconds(item: pytest.Item) -> float:
    for name, seconds in SECONDS.items():
        if item.get_closest_marker(name):
            return seconds
    folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    return OF_OTHERS.get(folder, 1)
