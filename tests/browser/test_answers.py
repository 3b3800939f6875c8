"""Answers that are late, or come in another order than they were asked for."""

from __future__ import annotations

import pytest
from browser import Browser, at
from recorded_run import record

pytestmark = pytest.mark.browser

HOLD = """(() => {
  const real = window.fetch;
  window.held = [];
  window.fetch = async (url, ...more) => {
    const answer = await real(url, ...more);
    if (window.slow && String(url).includes(window.slow)) await new Promise((go) => held.push(go));
    return answer;
  };
})()"""


def open_held(browser: Browser, address: str, condition: str) -> None:
    """A page on which from now on an answer to what `window.slow` is in the address of waits in
    `held` for a call."""
    browser.open(address)
    browser.wait(condition)
    browser.evaluate(HOLD)


def release(browser: Browser) -> None:
    """Lets the oldest answer go, and what follows from it come to its end."""
    browser.evaluate("held.shift()(), new Promise(done => setTimeout(done, 300))")


def test_a_late_answer_does_not_take_the_place_of_the_sample_that_was_chosen_after_it(
    browser, address
):
    there = "document.querySelector('#sample .facts')"
    open_held(browser, at(address, view="samples", runs="first"), there)
    one, other = browser.evaluate(
        "[...document.querySelectorAll('.item')].slice(1, 3).map(item => item.dataset.number)"
    )
    browser.evaluate("window.slow = 'api/sample?'")
    browser.click(f'.item[data-number="{one}"]')
    browser.wait("held.length === 1")
    browser.evaluate("window.slow = ''")
    browser.click(f'.item[data-number="{other}"]')
    shown = (
        "[document.getElementById('sample').dataset.number, "
        "document.querySelector('.item[aria-selected=true]').dataset.number]"
    )
    browser.wait(f"{shown}.join() === '{other},{other}'")
    release(browser)
    assert browser.evaluate(shown) == [other, other]


def test_a_late_list_of_samples_leaves_the_page_as_it_is(browser, address):
    """It says neither what it has found nor that it is still reading."""
    count = "document.getElementById('count')?.innerText"
    there = f"{count} === '1–48 of 48'"
    open_held(browser, at(address, view="samples", runs="first"), there)
    browser.evaluate("window.slow = 'reward_from=0.75'")
    browser.type("#filter-reward_from", "0.75")
    browser.wait("held.length === 1")
    browser.type("#filter-reward_from", "0.5")
    browser.wait(f"{count} === '1–24 of 24 (of 48)'")
    browser.evaluate("new Promise(done => setTimeout(done, 400))")
    assert browser.evaluate(count) == "1–24 of 24 (of 48)"
    release(browser)
    assert browser.evaluate(count) == "1–24 of 24 (of 48)"


def test_a_late_timeline_is_not_shown(browser, address):
    there = "timelineView.steps?.at(-1).step === 5"
    open_held(browser, at(address, view="timeline", runs="first", at="5", count="2"), there)
    browser.evaluate("window.slow = 'step=3'")
    browser.evaluate("void go({ at: '3' })")
    browser.wait("held.length === 1")
    browser.evaluate("go({ at: '4' }); busy")
    release(browser)
    assert browser.evaluate("timelineView.steps.map(one => one.step)") == [3, 4]


STEPS = "metricStore.series('{run}', '{name}').map(point => point[0])"


def open_settings(browser, address, runs, run, slow):
    """Of a run of two steps, whose metrics are not asked for there; answers of `slow` are held."""
    record(runs / run, range(1, 3))
    there = "document.querySelector('#view tbody')"
    open_held(browser, at(address, view="settings", runs=run), there)
    browser.evaluate(f"window.slow = '{slow}'")


def test_steps_that_came_while_the_first_answer_was_on_its_way_are_there(browser, address, runs):
    open_settings(browser, address, runs, "slow", "api/metrics")
    browser.evaluate("void go({ view: 'curves' })")
    browser.wait("held.length")
    record(runs / "slow", range(3, 5), True)
    browser.evaluate("void metricStore.refresh('slow'), new Promise(done => setTimeout(done, 200))")
    browser.evaluate("window.slow = ''; while (held.length) held.pop()()")
    record(runs / "slow", range(5, 6), True)
    shown = STEPS.format(run="slow", name="reward/mean")
    browser.wait(f"{shown}.includes(5)", 15)
    assert browser.evaluate(shown) == [1, 2, 3, 4, 5]
    browser.wait(f"{STEPS.format(run='slow', name='time/step')}.length === 5")


def test_of_two_metrics_asked_for_at_once_the_one_that_comes_late_has_all_steps(
    browser, address, runs
):
    """The run has grown between both answers."""
    open_settings(browser, address, runs, "growing", "reward%2Fmean")
    browser.evaluate("window.first = metricStore.need('growing', ['reward/mean']), 0")
    browser.wait("held.length === 1")
    record(runs / "growing", range(3, 5), True)
    browser.evaluate("window.second = metricStore.need('growing', ['time/step']), 0")
    browser.evaluate("new Promise(done => setTimeout(done, 200))")
    browser.evaluate("window.slow = ''")
    release(browser)
    browser.evaluate("Promise.all([first, second]).then(() => metricStore.refresh('growing'))")
    for name in ("reward/mean", "time/step"):
        assert browser.evaluate(STEPS.format(run="growing", name=name)) == [1, 2, 3, 4]
