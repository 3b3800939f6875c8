"""What a pointer and keys do on a chart, and what a chart draws."""

from __future__ import annotations

import pytest
from browser import Browser, at

pytestmark = pytest.mark.browser

CANVAS = '[data-metric="reward/mean"] canvas'


def open_curves(browser: Browser, address: str, **state: str) -> tuple[float, float]:
    """The middle of the chart of rewards, once it is drawn."""
    browser.open(at(address, runs="first", **state))
    browser.wait("document.querySelector('[data-metric=\"reward/mean\"]').chart.lines?.length")
    return browser.middle(CANVAS)


def settled(browser: Browser) -> str:
    """What the page is of after a while."""
    return browser.evaluate(
        "new Promise(done => setTimeout(() => done(state.view + ' ' + state.x), 200))"
    )


def test_a_drag_zooms_also_past_the_edge_and_esc_shows_all_steps_again(browser, address):
    x, y = open_curves(browser, address)
    browser.drag((x + 10, y), (x + 400, y))
    browser.wait("state.x === '3-6'", 10)
    assert not browser.evaluate("document.querySelector('#view button').hidden")
    browser.key("Escape", 27)
    assert settled(browser) == "curves "
    open_curves(browser, address, x="2-4")
    browser.evaluate("document.querySelector('#view button').click()")
    assert settled(browser) == "curves "


def test_a_press_that_hardly_moves_is_a_click_on_the_step_where_it_began(browser, address):
    """Here the middle is between steps 3 and 4: the pointer goes from the one to the other."""
    _, y = open_curves(browser, address)
    middle = browser.evaluate(
        f"(() => {{ const c = document.querySelector('{CANVAS}'); "
        "return c.getBoundingClientRect().x + c.closest('article').chart.toX(3.5); })()"
    )
    browser.drag((middle - 2, y), (middle + 2, y))
    browser.wait("state.view === 'samples'", 10)
    assert browser.evaluate("[state.step_from, state.step_to]") == ["3", "3"]


def test_only_a_press_of_the_first_button_on_the_chart_itself_picks_a_step(browser, address):
    x, y = open_curves(browser, address)
    browser.drag((x, y), (x, y), "right")
    assert settled(browser) == "curves "
    x, y = open_curves(browser, address)
    browser.drag((x, y - 160), (x, y))  # from above the chart into it
    assert settled(browser) == "curves "
