"""What a pointer and keys do on a chart, and what a chart draws."""

from __future__ import annotations

import json

import pytest
from browser import Browser, at
from recorded_run import metrics_of, record

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


def record_broken(folder, metric: str, values: dict[int, float | None]) -> None:
    """A run of 12 steps that logs `metric` where it is in `values`, and loses the gradient's norm
    in steps 5 and 6."""
    with open(record(folder, range(1, 2)).metrics_file, "w") as file:
        for step in range(1, 13):
            more = {"optim/grad_norm": None if step in (5, 6) else 1.0 + step}
            more |= {metric: values[step]} if step in values else {}
            file.write(json.dumps(metrics_of(step) | more) + "\n")


def colored(browser: Browser, metric: str, step: float, color: str) -> int:
    """Pixels of a line's colour in the column of `step`, above the foot of the chart."""
    return browser.evaluate(f"""(() => {{
        const {{ canvas, toX }} = document.querySelector('[data-metric="{metric}"]').chart;
        const d = canvas.getContext('2d').getImageData(Math.round(toX({step})), 0, 1, 140).data;
        const wanted = {list(bytes.fromhex(color))};
        let n = 0;
        for (let i = 0; i < d.length; i += 4)
          n += d[i + 3] > 60 && wanted.every((one, k) => Math.abs(d[i + k] - one) < 40);
        return n; }})()""")


def test_a_line_breaks_at_a_number_that_was_lost_and_not_between_evaluations(
    browser, address, runs
):
    record_broken(runs / "broken", "eval/test/avg", {4: 0.2, 8: 0.5, 12: 0.9})
    browser.open(at(address, runs="broken"))
    chart = "document.querySelector('[data-metric=\"{}\"]').chart.lines"
    for metric in ("optim/grad_norm", "eval/test/avg"):
        browser.wait(chart.format(metric))
    blue = "3b7fc4"
    assert [colored(browser, "optim/grad_norm", step, blue) > 0 for step in (3.5, 5.5, 9.5)] == [
        True,
        False,
        True,
    ]
    assert all(colored(browser, "eval/test/avg", step, blue) for step in (5, 6, 7, 10))
    x, y = browser.middle('[data-metric="optim/grad_norm"] canvas')
    browser.point(x - 20, y)
    browser.wait("document.getElementById('tip').innerText.includes('not a finite number')", 10)


def test_updates_that_were_skipped_are_shown_once_there_is_one(browser, address, runs):
    record_broken(runs / "whole", "optim/skipped", dict.fromkeys(range(1, 13), 0.0))
    some = {step: float(step in (5, 6)) for step in range(1, 13)}
    record_broken(runs / "skipping", "optim/skipped", some)
    browser.open(at(address, runs="whole"))
    browser.wait("document.querySelectorAll('#summary tbody tr').length === 1")
    assert not browser.evaluate(
        "Boolean(document.querySelector('[data-metric=\"optim/skipped\"]'))"
    )
    assert "skipped" not in browser.text("#summary")
    browser.open(at(address, runs="skipping"))
    browser.wait("document.querySelector('[data-metric=\"optim/skipped\"]').chart.lines", 10)
    cells = "[...document.querySelectorAll('#summary tr')].map(row => row.cells[4].innerText)"
    assert browser.evaluate(cells) == ["updates skipped", "2"]


def test_a_chart_of_many_steps_draws_its_peaks_and_a_pointer_draws_none_of_it_again(
    browser, address
):
    """Of 20,000 steps one is high, and one is lost."""
    open_curves(browser, address)
    browser.evaluate("""(() => {
        const points = Array.from({ length: 20000 }, (_, i) => [i + 1, i === 7000 ? 9 : i % 2]);
        points[12000][1] = NaN;
        window.chart = document.querySelector('[data-metric="reward/mean"]').chart;
        const series = [{ label: 'first', color: '#3b7fc4', dash: [], points }];
        chart.show(series, { range: null, smooth: 0 });
        window.parts = drawable(points, chart.toX);
        window.calls = 0;
        for (const one of charts) {
          const toX = one.toX;
          one.toX = (x) => { calls++; return toX(x); };
        } })()""")
    parts = browser.evaluate("parts")
    width = browser.evaluate("chart.canvas.clientWidth")
    assert len(parts) == 2 and parts[0][-1][0] <= 12000 < 12002 <= parts[1][0][0]
    assert [7001, 9] in parts[0] and sum(map(len, parts)) <= 2 * width
    x, y = browser.middle(CANVAS)
    browser.point(x, y)
    browser.wait("!document.getElementById('tip').hidden", 10)
    painted = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
    browser.evaluate(painted)
    assert 0 < browser.evaluate("calls") < 50
    line = "chart.above.getContext('2d').getImageData(Math.round(chart.toX(marked)), 80, 1, 1)"
    assert browser.evaluate(f"{line}.data[3]") > 0
