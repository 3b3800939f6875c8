"""A Chromium for the tests of this folder; without one they are skipped, and say so."""

from __future__ import annotations

import pytest
from browser import find_browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_browser() is None:
        reason = "no Chromium on PATH: apt-get install chromium, and the page is tested in it"
        for item in items:  # of other folders, too
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason=reason))
