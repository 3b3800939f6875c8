"""The numbers that algorithms are compared with are what verl and TRL make of them today."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "tests/unit/algorithms/oracles.json"
SDPO = ROOT / "tests/unit/rewards/sdpo_oracle.json"
# What uv says where no package index answers.
NO_INDEX = ("error sending request", "network was disabled")
# As near as tests/unit/algorithms/test_oracles.py compares them; another CPU rounds otherwise.
CLOSE = {"rel_tol": 1e-6, "abs_tol": 1e-9}


def differences(fresh: Any, kept: Any, place: str = "") -> Iterator[str]:
    """Where two records differ, by their keys and numbers on the way."""
    if isinstance(fresh, dict) and isinstance(kept, dict) and fresh.keys() == kept.keys():
        for key, value in fresh.items():
            yield from differences(value, kept[key], f"{place}/{key}")
    elif isinstance(fresh, list) and isinstance(kept, list) and len(fresh) == len(kept):
        for number, pair in enumerate(zip(fresh, kept, strict=True)):
            yield from differences(*pair, f"{place}/{number}")
    elif not same(fresh, kept):
        yield f"{place}: {str(fresh)[:80]} and not {str(kept)[:80]}"


def same(fresh: Any, kept: Any) -> bool:
    if isinstance(fresh, float) and isinstance(kept, float):
        return math.isclose(fresh, kept, **CLOSE) or (math.isnan(fresh) and math.isnan(kept))
    return type(fresh) is type(kept) and fresh == kept


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_verl_and_trl_in_an_environment_made_anew_say_what_is_committed(tmp_path):
    """`make oracles`, beside the committed files. What the project's own environment is made of is
    taken as it stands."""
    fresh = {COMMITTED: tmp_path / "oracles.json", SDPO: tmp_path / "sdpo.json"}
    own = [word for kind in ("cpu", "gpu") for word in ("-o", f".venv/.setup-{kind}")]
    where = [f"ORACLES={tmp_path / 'oracles'}", f"PYTHON={sys.executable}"]
    where += [f"RECORDS={fresh[COMMITTED]}", f"SDPO_RECORDS={fresh[SDPO]}"]
    made = subprocess.run(
        ["make", *own, "oracles", *where], cwd=ROOT, capture_output=True, text=True
    )
    said = made.stdout + made.stderr
    if made.returncode and any(words in said for words in NO_INDEX):
        pytest.skip(f"no package index can be reached: {said.strip().splitlines()[-1]}")
    assert made.returncode == 0, said
    for kept, made_anew in fresh.items():
        found = json.loads(made_anew.read_text())
        assert not list(differences(found, json.loads(kept.read_text())))


def test_a_number_that_is_another_one_is_found_and_named():
    kept = json.loads(COMMITTED.read_text())
    assert not list(differences(kept, kept))
    other = copy.deepcopy(kept)
    other["batches"][1]["losses"]["gspo token-mean"]["gradient"][0][0] += 1e-5
    other["batches"][2]["corrections"]["veto_k2"]["mask"][0].pop()
    other["versions"]["verl"] = "0.9.2"
    assert [line.partition(":")[0] for line in differences(other, kept)] == [
        "/versions/verl",
        "/batches/1/losses/gspo token-mean/gradient/0/0",
        "/batches/2/corrections/veto_k2/mask/0",
    ]
