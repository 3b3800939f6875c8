"""When a run stops because engines and trainer are not one policy, or its tokens are too old."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.errors import MismatchError
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run.mismatch import MismatchBounds, stop_above

SAMPLES = 6
WORST = (
    "token 8 at 3 of sample 4 (prompt 0, 2 tokens of prompt, version 3), rollout -2.0000 and "
    "trainer -0.5000"
)


def a_group(versions=(3, 3)) -> Group:
    """Six samples of two tokens, of which all have the same versions."""
    token_ids = [7, 8]
    parts = [
        Segment.sampled([token], np.zeros(1), version)
        for token, version in zip(token_ids, versions, strict=True)
    ]
    segments = (Segment.given("user", [5, 6]), *parts)
    samples = [Sample(segments, "stop", f"response {i}") for i in range(SAMPLES)]
    return Group(Prompt(0, "1+2=", [5, 6]), samples, None, np.zeros(SAMPLES, np.float32))


@pytest.fixture
def check(tmp_path):
    """Checks an update of step 4, twice, whose mismatch/kl is `kl`, by age `ages`; returns the
    samples on record."""
    (tmp_path / "config.json").write_text(json.dumps({}))

    def check(kl: float, dtype="float32", nonfinite=0, lag=0, ages=(), **mismatch) -> list[str]:
        config = RunConfig(
            mismatch=mismatch,
            schedule={"lag": lag},
            logging={"run_dir": str(tmp_path / "run"), "samples_per_step": 1},
        )
        with RunDir(config, resume=(tmp_path / "run").exists()) as run_dir:
            bounds = MismatchBounds(config, run_dir, dtype)
            group = a_group()
            signals = [Signal.of_samples(group, group.rewards)]
            metrics = {"mismatch/kl": kl, "mismatch/max_abs_logprob_diff": 1.5}
            metrics |= {f"mismatch/kl_age_{age}": value for age, value in enumerate(ages)}
            metrics["mismatch/judged"] = float(not ages or not math.isnan(ages[0]))
            worst = {"sample": 4, "token": 3, "rollout_logprob": -2.0, "trainer_logprob": -0.5}
            metrics |= {f"mismatch/worst_{name}": value for name, value in worst.items()}
            result = UpdateResult(4, metrics, skipped=nonfinite, nonfinite=nonfinite, seconds=1.0)
            try:
                for _ in range(2):
                    bounds.check(4, [group], signals, result)
            finally:
                written = run_dir.samples_file.exists() and read_jsonl(run_dir.samples_file)
                check.samples = [record["response"] for record in written or ()]
        return check.samples

    return check


@pytest.mark.parametrize(
    ("settings", "dtype", "bound"),
    [
        ({}, "float32", 1e-7), ({}, "bfloat16", 0.1),
        ({"replay": {"mode": "off"}}, "float32", 1e-4),
        ({"replay": {"mode": "r2"}}, "float32", 1e-4),
        ({"replay": {"missing": "route"}}, "float32", 1e-4),
        ({"replay": {"mode": "off"}}, "bfloat16", 0.1),
        ({"trainer": {"fp8_forward": "engine"}}, "float32", 0.1),
        ({"mismatch": {"stop_above": 0.3}}, "float32", 0.3),
    ],
)  # fmt: skip
def test_what_is_beyond_rounding_where_routes_are_replayed_is_beyond_the_bound(
    settings, dtype, bound
):
    assert stop_above(RunConfig(**settings), dtype) == bound


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-7), ("bfloat16", 0.1)])
def test_a_mismatch_above_the_bound_stops_the_run(check, dtype, bound):
    assert check(0.9 * bound, dtype) == []
    with pytest.raises(MismatchError) as caught:
        check(1.1 * bound, dtype)
    for text in (
        "step 4",
        f"{1.1 * bound:.2e}, more than {bound:.2e}",
        "1.50e+00 apart",
        "stop_",
        WORST,
    ):
        assert text in str(caught.value)


def test_all_samples_of_the_step_that_stops_a_run_are_written(check):
    with pytest.raises(MismatchError, match="samples.jsonl"):
        check(1.0)
    assert check.samples == [f"response {i}" for i in range(SAMPLES)]


def test_the_bound_is_a_setting(check):
    assert check(0.5, stop_above=0.6) == []
    with pytest.raises(MismatchError, match="5.00e-01, more than 4.00e-01"):
        check(0.5, stop_above=0.4)


@pytest.mark.parametrize("kl", [math.inf, math.nan])
def test_a_mismatch_that_is_no_number_stops_the_run(check, kl):
    with pytest.raises(MismatchError):
        check(kl)


def test_a_step_of_nan_is_left_to_the_bound_on_skipped_steps(check):
    assert check(math.nan, nonfinite=1) == []


NONE = math.nan  # of an age of which there is no token


@pytest.mark.parametrize(
    ("ages", "wrong"),
    [
        ((2e-7, 0.4, 0.4), "mismatch/kl_age_0 is 2.00e-07, more than 1.00e-07"),
        ((1e-8, 0.6, NONE), "mismatch/kl_age_1 is 6.00e-01, more than 5.00e-01"),
        ((NONE, NONE, 0.6), "mismatch/kl_age_2 is 6.00e-01, more than 5.00e-01"),
        ((NONE, math.inf, 0.1), "mismatch/kl_age_1 is inf, more than 5.00e-01"),
    ],
)
def test_with_lag_tokens_of_every_age_have_a_bound(check, ages, wrong):
    with pytest.raises(MismatchError, match=wrong) as caught:
        check(0.1, lag=2, ages=ages)
    assert f"mismatch.stop_above{'' if '_0 ' in wrong else '_old'} sets" in str(caught.value)


def test_with_lag_a_mismatch_within_both_bounds_passes(check):
    assert check(0.3, lag=2, ages=(1e-8, 0.4, 0.4)) == []
    assert check(0.3, lag=1, ages=(NONE, 0.8), stop_above_old=0.9) == []


def test_with_lag_a_logprob_of_nan_is_not_taken_for_no_token(check):
    with pytest.raises(MismatchError, match="mismatch/kl is nan"):
        check(math.nan, lag=1, ages=(math.nan, 0.1))


def test_that_the_strict_bound_judges_no_token_is_said_once(check, caplog):
    caplog.set_level("INFO")
    check(0.1, lag=1, ages=(1e-8, 0.1))
    assert caplog.messages == []
    check(0.1, lag=1, ages=(NONE, 0.1))
    (said,) = caplog.messages
    assert "no sampled token is of the version that is updated" in said
    assert "mismatch.stop_above judges none" in said and "stop_above_old=0.5" in said


@pytest.mark.parametrize(
    ("schedule", "updates", "versions", "wrong"),
    [
        (0, 1, (3, 3), None),
        (0, 1, (3, 2), "sampled under version 2: .*lag=0 .* must be of 3 to 3"),
        (0, 1, (4, 3), "sampled under version 4"),
        (2, 1, (1, 3), None),
        ({"lag": 1, "stale": "train"}, 1, (1, 3), None),
        ({"lag": 1, "stale": "train"}, 1, (0, 3), r"of 1 to 3 \(schedule.stale=train\)"),
        ({"lag": 1, "stale": "drop"}, 1, (1, 3), r"of 2 to 3 \(schedule.stale=drop\)"),
        (2, 1, (0, 3), "sampled under version 0: .*lag=2 and 1 versions a step .* of 1 to 3"),
        (1, 2, (1, 3), None),
        (1, 2, (0, 3), "lag=1 and 2 versions a step all must be of 1 to 3"),
    ],
)
def test_a_token_of_a_version_that_the_step_may_not_have_stops_it(
    schedule, updates, versions, wrong
):
    config = RunConfig(
        schedule=schedule if isinstance(schedule, dict) else {"lag": schedule},
        algorithm={"mini_batches": updates, "prompts_per_step": updates},
    )
    bounds = MismatchBounds(config, None, "float32")
    groups = [a_group((3, 3)), a_group(versions)]
    if wrong is None:
        bounds.check_ages(5, groups, 3)
    else:
        with pytest.raises(MismatchError, match=f"step 5 updates adapter version 3, .*{wrong}"):
            bounds.check_ages(5, groups, 3)


def test_a_step_without_a_sampled_token_is_refused():
    group = a_group((-1, -1))
    with pytest.raises(MismatchError, match="step 5: none of its tokens was sampled"):
        MismatchBounds(RunConfig(), None, "float32").check_ages(5, [group], 3)
