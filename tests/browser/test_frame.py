"""The page on narrow screens, in both colour schemes, and by links to runs that are not there."""

from __future__ import annotations

import pytest
from browser import Browser, at
from recorded_run import record

pytestmark = pytest.mark.browser

VIEWS = ("curves", "samples", "routes", "adapter", "timeline", "settings")
IDLE = "new Promise(done => setTimeout(done, 300))"


def test_nothing_is_wider_than_a_telephone(browser, address):
    try:
        for width in (320, 420, 560):
            browser.resize(width, 800)
            for view in VIEWS:
                browser.open(at(address, runs="first", view=view))
                browser.wait("document.getElementById('view').children.length")
                browser.evaluate(IDLE)
                wide = browser.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, (view, width)
    finally:
        browser.resize(1440, 900)


def contrast(browser: Browser, of: str, behind: str) -> float:
    """Of two colours as CSS says them (https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio)."""

    def luminance(script: str) -> float:
        text = browser.evaluate(script)
        parts = [int(one) / 255 for one in text[4:-1].split(",")]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(of), luminance(behind)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_names_of_filters_can_be_read(browser, address, scheme):
    def choose(value: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": value}
        browser.call("Emulation.setEmulatedMedia", features=[feature])

    choose(scheme)
    try:
        browser.open(at(address, runs="first", view="samples"))
        box = "document.getElementById('filter-text')"
        browser.wait(box)
        colors = (
            f"getComputedStyle({box}, '::placeholder').color",
            f"getComputedStyle({box}).backgroundColor",
        )
        assert contrast(browser, *colors) >= 4.5
    finally:
        choose("light")


def test_a_run_that_the_address_names_and_is_not_there_is_told(browser, address, runs):
    missing = "document.getElementById('missing')"
    browser.open(at(address, runs="gone"))
    browser.wait(f"{missing}.innerText === 'Not there below {runs}: gone.'", 10)
    browser.wait("document.querySelector('#view .empty').innerText === 'Choose a run.'", 10)
    browser.open(at(address, runs="first,gone"))
    browser.wait("document.querySelectorAll('#summary tbody tr').length === 1", 10)
    assert browser.evaluate(f"{missing}.innerText") == f"Not there below {runs}: gone."
    browser.open(at(address, runs="first"))
    browser.wait("document.querySelectorAll('#summary tbody tr').length === 1", 10)
    assert browser.evaluate(f"{missing}.hidden")


def test_a_percent_sign_in_an_address_stands_for_itself(browser, address, runs):
    browser.open(at(address, runs="50%25"))
    browser.wait(f"document.body.innerText.includes('Not there below {runs}: 50%.')", 10)


def test_a_ninth_run_has_a_dashed_line(browser, address, runs):
    names = [f"one-{i}" for i in range(9)]
    for name in names:
        record(runs / name, range(1, 3))
    browser.open(at(address, runs=",".join(names)))
    lines = "document.querySelector('[data-metric=\"reward/mean\"]').chart.lines"
    browser.wait(f"{lines}.length === 9")
    looks = browser.evaluate(f"{lines}.map(line => line.color + line.dash)")
    assert len(set(looks)) == 9
    assert browser.evaluate("document.querySelectorAll('#summary .swatch.dashed').length") == 1
