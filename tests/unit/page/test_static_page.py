"""The page as one file."""

import json
import re

from recorded_run import PLANTED, record

from lora_moe_rl.page.static_page import static_page


def data_of(html: str) -> dict:
    found = re.search(r"const PAGE_DATA = (.*);\n", html)
    assert found is not None
    return json.loads(found[1])


def test_all_that_it_shows_stands_in_it(tmp_path):
    record(tmp_path / "one")
    html = static_page(tmp_path, 20)
    data = data_of(html)["of"]["one"]
    assert data["metrics"]["columns"]["reward/mean"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert (len(data["samples"]), data["of_samples"]) == (20, 48)
    assert [one["step"] for one in data["timeline"]["steps"]] == [1, 2, 3, 4, 5, 6]
    assert [one["step"] for one in data["routes"]["records"]] == [1, 2, 3, 4, 5, 6]
    rest = re.sub(r"const PAGE_DATA = .*;\n", "", html)
    assert "<script src" not in rest and '<link rel="stylesheet"' not in rest


def test_a_text_of_a_run_ends_no_script(tmp_path):
    record(tmp_path / "one", range(1, 2))
    html = static_page(tmp_path, 20)
    assert any(one["response"] == PLANTED for one in data_of(html)["of"]["one"]["samples"])
    assert html.count("<script") == html.count("</script>") == 1
    assert "<img" not in html
