"""The page in a real browser, on runs that the project's own writers wrote."""

from __future__ import annotations

import json

import numpy as np
import pytest
from browser import Browser, at
from recorded_run import experts_of, loads_of, record

from lora_moe_rl.page.link import link
from lora_moe_rl.page.samples import Choice, Samples
from lora_moe_rl.page.static_page import static_page

pytestmark = pytest.mark.browser


def painted(browser: Browser, metric: str) -> int:
    """How many pixels of a chart are drawn on."""
    chart = f"document.querySelector('[data-metric=\"{metric}\"] canvas')"
    return browser.evaluate(
        f"(() => {{ const c = {chart}; if (!c || !c.width) return 0; "
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; "
        "let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })()"
    )


COUNT = "document.getElementById('count')?.innerText"


def test_curves_of_both_runs_are_drawn_and_summed_up(browser, address):
    browser.open(address)
    browser.wait("document.querySelectorAll('#summary tbody tr').length === 2")
    browser.wait(
        "document.querySelector('[data-metric=\"reward/mean\"]').chart.lines?.length === 2"
    )
    assert painted(browser, "reward/mean") > 500
    summary = browser.text("#summary")
    assert "first" in summary and "0.3 → 0.4" in summary  # 1 to 5 of tenths, and 2 to 6
    points = (
        "document.querySelector('[data-metric=\"reward/mean\"]').chart.series.map(s => s.points)"
    )
    assert sorted(map(len, browser.evaluate(points))) == [3, 6]


def test_two_who_ask_for_a_metric_at_once_both_wait_for_it(browser, address):
    browser.open(at(address, view="settings"))
    browser.wait("document.querySelector('tr.differs')")
    ask = "metricStore.need('first', ['time/step'])"
    lengths = f"{ask}.then(() => metricStore.series('first', 'time/step').length)"
    assert browser.evaluate(f"Promise.all([{lengths}, {lengths}])") == [6, 6]


def test_a_search_finds_any_metric_and_stands_in_the_address(browser, address):
    browser.open(address)
    browser.wait("document.getElementById('metric-search')")
    browser.type("#metric-search", "layer disagr")
    browser.wait("document.querySelectorAll('.chart').length === 3")
    assert "q=layer+disagr" in browser.evaluate("location.hash")
    browser.wait("document.querySelector('[data-metric$=\"layer_02\"]').chart.lines")
    browser.type("#metric-search", "nothing like it")
    browser.wait("document.querySelector('#view .empty')")


def test_a_click_on_a_curve_leads_to_the_samples_of_that_step(browser, address):
    browser.open(at(address, runs="first"))
    browser.wait("document.querySelector('[data-metric=\"reward/mean\"]').chart.lines?.length")
    browser.click('[data-metric="reward/mean"] canvas')
    browser.wait("location.hash.includes('view=samples')")
    step = browser.evaluate("state.step_from")
    assert step in ("3", "4")
    browser.wait(f"{COUNT} === '1–8 of 8 (of 48)'")
    browser.evaluate("history.back()")
    browser.wait("document.querySelector('.chart')")


def test_the_address_that_a_run_says_at_its_end_shows_that_run_alone(browser, address):
    browser.open(link("second", int(address.rstrip("/").rpartition(":")[2])))
    browser.wait("document.querySelectorAll('#summary tbody tr').length === 1")
    assert browser.evaluate("chosenRuns().join()") == "second"


def test_a_run_that_is_chosen_no_more_is_gone_from_the_curves(browser, address):
    browser.open(address)
    browser.wait("document.querySelectorAll('#summary tbody tr').length === 2")
    browser.click('[data-run="second"]')
    browser.wait("document.querySelectorAll('#summary tbody tr').length === 1")
    assert "runs=first" in browser.evaluate("location.hash")


def test_filters_leave_the_samples_that_fit(browser, address):
    browser.open(at(address, view="samples", runs="first"))
    browser.wait(f"{COUNT} === '1–48 of 48'")
    browser.type("#filter-reward_from", "0.5")
    browser.wait(f"{COUNT} === '1–24 of 24 (of 48)'")
    browser.type("#filter-text", "RESPONSE 3-")
    browser.wait(f"{COUNT} === '1–2 of 2 (of 48)'")
    assert browser.evaluate("document.querySelector('.list .item .text').innerText") == (
        "What is 0 + 3? response 3-0-2"
    )
    browser.type("#filter-text", "no such words")
    browser.wait("document.querySelector('.list .empty')")


def test_what_an_empty_filter_says_is_not_cut(browser, address):
    browser.open(at(address, view="samples", runs="first"))
    browser.wait(f"{COUNT} === '1–48 of 48'")
    room = """[...document.querySelectorAll('.tools input[placeholder]')].map(one => {
        const style = getComputedStyle(one), c = document.createElement('canvas').getContext('2d');
        c.font = style.font;
        const arrows = one.type === 'number' && style.appearance !== 'textfield' ? 17 : 0;
        const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
        const text = c.measureText(one.placeholder).width;
        return [one.placeholder, one.clientWidth - padding - arrows - text]; })"""
    found = dict(browser.evaluate(room))
    assert "prompt #" in found and len(found) == 4
    assert [placeholder for placeholder, left in found.items() if left < 0] == []


def test_what_a_sample_says_is_text_and_never_run(browser, address):
    browser.open(at(address, view="samples", runs="second", n="3"))
    browser.wait("document.querySelectorAll('#sample .turn').length === 4")
    shown = browser.text("#sample")
    assert "<script>window.planted = true</script><img src=x" in shown
    assert "a tool says 42" in shown and "reward short" in shown
    assert browser.evaluate("document.querySelectorAll('#view script, #view img').length") == 0


def test_the_group_of_a_sample_stands_beside_it(browser, address):
    browser.open(at(address, view="samples", runs="second", n="5"))
    browser.wait("document.querySelectorAll('#group button').length === 4")
    rewards = "[...document.querySelectorAll('#group button')].map(b => b.innerText)"
    assert browser.evaluate(rewards) == ["0", "0.25", "0.5", "0.75"]
    browser.click("#group button:first-child")
    browser.wait("location.hash.includes('n=4')")
    browser.wait("document.querySelector('#sample').innerText.includes('response 1-1-0')")


def test_tokens_are_coloured_by_what_is_chosen(browser, address):
    browser.open(at(address, view="samples", runs="first", n="3"))
    browser.wait("document.querySelectorAll('#sample .tokens span').length === 6")
    kinds = "[...document.querySelectorAll('#token-color option')].map(o => o.value)"
    assert browser.evaluate(kinds) == [
        "advantage",
        "logprob",
        "difference",
        "entropy",
        "version",
        "loss",
    ]
    shades = (
        "[...document.querySelectorAll('#sample .tokens span')]"
        ".map(s => Number(getComputedStyle(s).backgroundColor.split(',')[3]?.slice(0, -1) ?? 0))"
    )
    assert len(set(browser.evaluate(shades))) == 1  # one advantage for all
    browser.choose("#token-color", "logprob")
    browser.wait("location.hash.includes('color=logprob')")
    browser.wait(f"new Set({shades}).size > 1")
    found = browser.evaluate(shades)
    assert found[1] == max(found) > found[0] > found[2] and found[3:5] == [0, 0]
    browser.choose("#token-color", "entropy")
    browser.wait(
        f"location.hash.includes('color=entropy') && {shades}[0] === Math.max(...{shades})"
    )
    found = browser.evaluate(shades)
    assert found[0] > found[1] > found[2] > found[5] > 0 and found[3:5] == [0, 0]  # of a tool: none


def test_a_token_has_the_colour_and_the_numbers_of_how_far_both_engines_are_apart(browser, address):
    """The trainer is below the engine at the first token, and above it at the third."""
    browser.open(at(address, view="samples", runs="first", n="3", color="difference"))
    browser.wait("document.querySelectorAll('#sample .tokens span').length === 6")
    spans = "[...document.querySelectorAll('#sample .tokens span')]"
    hues = f"{spans}.map(s => getComputedStyle(s).backgroundColor.replace(/^rgba?/, ''))"
    found = browser.evaluate(hues)
    none, minus, plus = found[1], found[0], found[2]
    assert len({none, minus, plus}) == 3 and found[3:] == [none] * 3
    assert minus.startswith("(221, 120, 40,") and plus.startswith("(47, 133, 200,")
    box = browser.evaluate(
        f"(() => {{ const r = {spans}[0].getBoundingClientRect(); "
        "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    browser.point(*box)
    browser.wait("document.getElementById('tip').innerText.includes('trainer − engine')")
    shown = browser.text("#tip")
    assert "−2.38e-7" in shown or "-2.38e-7" in shown
    assert "entropy, nats" in shown and "logprob, trainer" in shown


def test_a_click_on_a_token_shows_its_experts(browser, address):
    """Two tokens of the prompt stand before it; the last token of a sample is not fed."""
    browser.open(at(address, view="samples", runs="first", n="3"))
    browser.wait("document.querySelectorAll('#sample .tokens span').length === 6")
    browser.evaluate("document.querySelector('[data-token=\"1\"]').click()")
    cells = "[...document.querySelectorAll('#experts td')].map(cell => cell.innerText)"
    assert browser.evaluate(cells) == [", ".join(map(str, ids)) for ids in experts_of(3)]
    browser.evaluate("document.querySelector('[data-token=\"5\"]').click()")
    assert "was not fed" in browser.text("#experts")


SHOWN = "routesView.found?.shown.step"
LOADS = "[...document.querySelectorAll('#loads .heat')].map(card => card.values)"


def relative(loads: np.ndarray) -> np.ndarray:
    """Over the mean of each row."""
    return loads / loads.mean(axis=1, keepdims=True)


def test_the_load_of_experts_is_shown_of_a_step_and_of_a_layer(browser, address):
    browser.open(at(address, view="routes", runs="first"))
    browser.wait(f"{SHOWN} === 6 && document.querySelectorAll('#loads .heat').length === 2")
    of_step, of_layer = browser.evaluate(LOADS)
    np.testing.assert_allclose(of_step, relative(loads_of(6)))
    steps = np.array([loads_of(step)[0] for step in range(1, 7)])
    np.testing.assert_allclose(of_layer, relative(steps).T)
    by_layer = "[...document.querySelectorAll('#by-layer .heat b')].map(b => b.innerText)"
    assert browser.evaluate(by_layer) == ["replay/disagreement · first"]
    assert "as the engine chose them" in browser.text("#loads")

    browser.evaluate("document.getElementById('route-step').value = 3")
    browser.evaluate("document.getElementById('route-step').dispatchEvent(new Event('input'))")
    browser.wait(f"{SHOWN} === 3 && location.hash.includes('step=3')")
    np.testing.assert_allclose(browser.evaluate(LOADS)[0], relative(loads_of(3)))
    browser.choose("#route-layer", "2")
    browser.wait("location.hash.includes('layer=2') && routesView.found.byStep.layer === 2")
    steps = np.array([loads_of(step)[2] for step in range(1, 7)])
    np.testing.assert_allclose(browser.evaluate(LOADS)[1], relative(steps).T)


def test_a_place_in_the_picture_of_loads_tells_its_count_and_chooses_its_layer(browser, address):
    browser.open(at(address, view="routes", runs="first", step="2"))
    browser.wait("document.querySelectorAll('#loads .heat canvas').length === 2")
    canvas = "document.querySelector('#loads .heat canvas')"
    painted = f"{canvas}.getContext('2d').getImageData({canvas}.width - 5, 5, 1, 1).data[3] > 0"
    browser.wait(painted)
    # Its middle: layer 1 of three, and left of the middle of eight experts, as names stand there.
    browser.click("#loads .heat canvas")
    browser.wait("location.hash.includes('layer=1')")
    tip = browser.text("#tip")
    assert "layer 1, expert 3" in tip and f"chosen\n{loads_of(2)[1, 3]}\n" in tip
    assert "step=2" in browser.evaluate("location.hash")


def test_a_link_to_a_step_and_a_layer_shows_them(browser, address):
    browser.open(at(address, view="routes", runs="second", step="2", layer="1"))
    browser.wait(f"{SHOWN} === 2 && routesView.found.byStep.layer === 1")
    assert browser.evaluate("document.getElementById('route-step').value") == "2"
    assert browser.evaluate("document.getElementById('route-layer').value") == "1"


def test_the_other_views_show_what_the_run_kept(browser, address):
    browser.open(at(address, view="timeline", runs="first", at="4", count="2"))
    browser.wait("timelineView.steps?.length === 2")
    assert browser.evaluate("timelineView.steps.map(s => s.step)") == [3, 4]
    browser.open(at(address, view="adapter", runs="first"))
    browser.wait("document.querySelector('#view').innerText.includes('no checkpoint yet')")
    browser.open(at(address, view="settings"))
    browser.wait("document.querySelectorAll('tr.differs').length >= 2")
    assert "trainer.lr" in browser.text("#view") and "trainer.tp" not in browser.text("#view")


def test_a_run_that_goes_on_is_followed(browser, address, runs):
    record(runs / "live", range(1, 3))
    browser.open(at(address, runs="live"))
    last = "metricStore.series('live', 'reward/mean').at(-1)?.[0]"
    browser.wait(f"{last} === 2")
    record(runs / "live", range(3, 5), True)
    browser.wait(f"{last} === 4")


def test_one_file_shows_and_filters_the_same_without_a_server(browser, runs, tmp_path):
    out = tmp_path / "out.html"
    out.write_text(static_page(runs, 100))
    browser.open(at(out.as_uri(), runs="first"))
    browser.wait(
        "document.querySelector('[data-metric=\"reward/mean\"]').chart.lines?.length === 1"
    )
    browser.open(at(out.as_uri(), view="samples", runs="first", reward_from="0.5", text="RESPONSE"))
    browser.wait(f"{COUNT} === '1–12 of 12 (of 48)'")
    ask = {"step_from": "2", "reward_to": "0.5", "finish": "stop", "order": "-reward"}
    browser.open(at(out.as_uri(), view="routes", runs="first", step="4", layer="2"))
    browser.wait(f"{SHOWN} === 4 && routesView.found.byStep.layer === 2")
    np.testing.assert_allclose(browser.evaluate(LOADS)[0], relative(loads_of(4)))
    script = f"source.samples('first', {{...DEFAULTS, ...{json.dumps(ask)}}}, 0, 50)"
    embedded = browser.evaluate(f"{script}.then(found => found.list.map(one => one.number))")
    choice = Choice(step_from=2, reward_to=0.5, finish="stop", order="-reward")
    wanted = Samples(runs / "first" / "samples.jsonl").choose(choice, 0, 50)["list"]
    assert embedded == [one["number"] for one in wanted] and len(embedded) > 10
