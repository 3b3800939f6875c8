"""Which tests share a process when several run at once (`pytest -n 2 --dist loadgroup`)."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs a whole file, so that what its fixtures start is started once; and all files
    that ask for the `engine` of a shape, which is one for the session."""
    for item in items:
        shape = item.callspec.params.get("engine") if hasattr(item, "callspec") else None
        group = f"engine {shape}" if shape else f"{item.path.parent.name} {item.path.stem}"
        item.add_marker(pytest.mark.xdist_group(group))
