"""A Chromium and two recorded runs for the tests of this folder; without a Chromium they are
skipped, and say so."""

from __future__ import annotations

import threading

import pytest
from browser import Browser, find_browser
from recorded_run import record

from lora_moe_rl.page.link import HOST
from lora_moe_rl.page.server import listen, make_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_browser() is None:
        reason = "no Chromium on PATH: apt-get install chromium, and the page is tested in it"
        for item in items:  # of other folders, too
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "runs"
    record(folder / "first", range(1, 7), False, "logging.tokens=true", "logging.routes=true")
    record(folder / "second", range(1, 4), False, "trainer.lr=0.125")
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with listen(0) as socket:
        server = make_server(runs)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
        thread.start()
        yield f"http://{HOST}:{socket.getsockname()[1]}/"
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium") / "profile") as found:
        yield found


@pytest.fixture
def browser(chromium, address):
    """The browser; at the end it has to have met no error, asked nobody else, run nothing of a
    sample's text, and said nothing of trouble."""
    chromium.errors.clear()
    chromium.requests.clear()
    yield chromium
    assert chromium.errors == []
    allowed = (address, "about:", "data:", "file:")
    assert [url for url in chromium.requests if not url.startswith(allowed)] == []
    assert chromium.evaluate("window.planted") is None
    assert chromium.evaluate("document.getElementById('trouble').hidden")
    chromium.call("Page.navigate", url="about:blank")  # before the server it asks is gone
