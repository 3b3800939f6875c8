"""`verify async` with real engines and a real trainer rank, and what it says when a token's version
is not the one that sampled it."""

from __future__ import annotations

import json

import pytest
from engine_fixtures import save_random_model

from lora_moe_rl.cli import main
from lora_moe_rl.verify import in_flight_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    save_random_model("qwen3_moe", folder)
    return str(folder)


def rows_of(model, capsys, *options) -> tuple[int, dict[str, dict]]:
    code = main(["verify", "async", "--model", model, "--json", *options])
    rows = json.loads(capsys.readouterr().out)["rows"]
    return code, {row["name"]: row for row in rows}


def test_every_token_is_of_its_version_in_every_way(model, capsys, monkeypatch):
    code, rows = rows_of(model, capsys)
    print({name: row["error"] for name, row in rows.items()})
    assert code == 0 and all(row["passed"] for row in rows.values())
    joined = rows["join: the trainer, of what goes on"]["error"]
    assert joined > 1e-3 > 100 * rows["split: the trainer"]["error"]


def test_samples_that_carry_another_version_are_noticed(model, capsys, monkeypatch):
    stock = in_flight_run.Sampled

    def swapped(samples, table, versions):
        return stock(samples, table, [versions[1], versions[0], *versions[2:]])

    monkeypatch.setattr(in_flight_run, "Sampled", swapped)
    monkeypatch.setattr(in_flight_run, "WAYS", ("finish",))
    code, rows = rows_of(model, capsys, "--tokens", "24")
    assert code == 1
    assert not rows["finish: an engine of that version alone"]["passed"]
    assert not rows["finish: the trainer"]["passed"]
