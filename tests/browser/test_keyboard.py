"""The page by keyboard: what has the focus keeps it."""

from __future__ import annotations

import pytest
from browser import Browser, at
from recorded_run import record

pytestmark = pytest.mark.browser

SPACE, ENTER = (" ", 32, " "), ("Enter", 13, "\r")
IDLE = "new Promise(done => setTimeout(done, 300))"


def focus(browser: Browser, selector: str) -> None:
    browser.wait(f"document.querySelector('{selector}')")
    browser.evaluate(f"{IDLE}.then(() => document.querySelector('{selector}').focus())")


def focused(browser: Browser, selector: str) -> bool:
    """After a while."""
    return browser.evaluate(f"{IDLE}.then(() => document.activeElement?.matches('{selector}'))")


@pytest.mark.parametrize(
    ("view", "selector", "key"),
    [
        ("curves", "[data-run=second]", SPACE),
        ("curves", "#tabs a:nth-child(2)", ENTER),
        ("curves", '[data-metric="reward/mean"] button', SPACE),
        ("samples", "#group button:nth-child(2)", SPACE),
        ("settings", "#view input[type=checkbox]", SPACE),
    ],
)
def test_what_a_key_was_pressed_on_keeps_the_focus(browser, address, view, selector, key):
    browser.open(at(address, view=view, runs="first,second"))
    focus(browser, selector)
    before = browser.evaluate("location.hash")
    browser.key(*key)
    assert focused(browser, selector)
    assert browser.evaluate("location.hash") != before


def test_timeline_by_keys(browser, address):
    browser.open(at(address, view="timeline", runs="first", count="2"))
    focus(browser, ".tools button")
    for last in (4, 2):
        browser.key(*SPACE)
        browser.wait(f"timelineView.steps.at(-1).step === {last}", 10)
        assert browser.evaluate("document.querySelector('.tools button').disabled") == (last == 2)
        assert last == 2 or focused(browser, ".tools button")


def test_a_run_that_goes_on_leaves_the_focus_and_what_is_typed(browser, address, runs):
    record(runs / "live", range(1, 3))
    browser.open(at(address, view="timeline", runs="live"))
    count = '[aria-label="number of steps"]'
    browser.wait("timelineView.steps?.at(-1).step === 2")
    browser.type(count, "12")
    record(runs / "live", range(3, 4), True)
    browser.wait("timelineView.steps.at(-1).step === 3", 15)
    assert focused(browser, count)
    assert browser.evaluate(f"document.querySelector('{count}').value") == "12"
    focus(browser, "[data-run=live]")
    record(runs / "live", range(4, 5), True)
    browser.wait("timelineView.steps.at(-1).step === 4", 15)
    assert focused(browser, "[data-run=live]")
