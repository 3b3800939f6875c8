"""The pure parts of `bench step`: the gate, the medians and the table."""

import io
import sys

import pytest
from rich.console import Console

from lora_moe_rl import cli
from lora_moe_rl.bench import step as bench
from lora_moe_rl.bench.report import disturbances
from lora_moe_rl.bench.trl_step import reward
from lora_moe_rl.errors import BenchmarkError


def records(steps: int) -> list[dict]:
    """A right run: step k takes k seconds, of which a tenth is in no stage."""
    return [
        {
            "step": k,
            "adapter/version": k - 1,
            "mismatch/kl": 1e-9,
            "mismatch/max_abs_logprob_diff": 1e-6,
            "replay/coverage": 1.0,
            "rollout/tokens": 1024,
            "time/step": float(k),
            "time/rollout": 0.5 * k,
            "time/reward": 0.0,
            "time/train": 0.3 * k,
            "time/refit": 0.1 * k,
        }
        for k in range(1, steps + 1)
    ]


def test_a_right_run_passes_the_gate():
    assert bench.gate(records(5), 5) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mismatch/kl", 2e-6, "step 2: mismatch/kl is 2e-06, more than 1e-06"),
        ("mismatch/kl", None, "step 2: mismatch/kl is None"),
        ("mismatch/max_abs_logprob_diff", 2e-4, "step 2: mismatch/max_abs_logprob_diff is 0.0002"),
        ("replay/coverage", 0.999, "step 2: replay/coverage is 0.999, not 1"),
        ("replay/coverage", None, "step 2: replay/coverage is None, not 1"),
        ("rollout/tokens", 1023, "step 2: 1023 response tokens, not 1024"),
        ("adapter/version", 0, "grow by one a step from 0, they were [0, 0, 2]"),
    ],
)
def test_one_wrong_step_closes_the_gate(name, value, message):
    run = records(3)
    run[1][name] = value
    (reason,) = bench.gate(run, 3)
    assert message in reason


def test_a_run_that_is_not_right_has_no_figures():
    run = records(bench.WARMUP + 2)
    run[0]["replay/coverage"] = 0.5  # in the warm-up, which is not measured
    with pytest.raises(BenchmarkError, match=r"step 1: replay/coverage is 0\.5") as caught:
        bench.figures(run, 2)
    assert caught.value.exit_code == 1
    with pytest.raises(BenchmarkError, match="4 of 5 steps"):
        bench.figures(records(4), 2)


def test_medians_leave_the_warm_up_out():
    result = bench.figures(records(bench.WARMUP + 4), 4)  # steps of 4, 5, 6 and 7 seconds
    assert result["seconds"] == pytest.approx(
        {"step": 5.5, "rollout": 2.75, "reward": 0, "train": 1.65, "refit": 0.55, "other": 0.55}
    )
    assert result["slowest_step"] == 7
    assert result["tokens_per_second"] == pytest.approx(1024 / 5.5)
    assert result["worst"]["mismatch/kl"] == 1e-9


def compared(busy: float) -> dict:
    """Steps of 4 s beside TRL's of 2 s; `busy`: cores that others used before TRL ran."""
    trl = {"attention": {"seconds": 2.0, "busy_cores_before": busy}}
    result = bench.figures(records(bench.WARMUP + 1), 1)
    return result | {"busy_cores_before": 0.1, "trl": trl}


def table_lines(result: dict) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=100).print(bench.table(result))
    return [" ".join(line.replace("│", " ").split()) for line in text.getvalue().split("\n")]


def test_the_table_compares_with_trl():
    lines = table_lines(compared(busy=0.0))
    assert "rollout 2.000 50%" in lines
    assert "step 4.000 100%" in lines
    assert "TRL, attention 2.000 ours / TRL 2.00" in lines
    assert disturbances(bench.runs(compared(busy=0.0))) == []


def test_a_disturbed_measurement_is_not_compared():
    result = compared(busy=0.7)
    assert "TRL, attention 2.000 not comparable" in table_lines(result)
    (line,) = disturbances(bench.runs(result))
    assert line.startswith("just before TRL, attention, other programs kept 0.70 cores busy")


def test_the_reward_is_the_share_of_even_tokens():
    assert reward([[1, 3], [2, 3], [2, 4]], prompts=None) == [0, 0.5, 1]


def test_without_trl_there_is_nothing_to_compare(tmp_path):
    assert bench.measure_trl(tmp_path, 1, None) is None


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/gone/python", "cannot be run: No such file"),
        pytest.param(sys.executable, "No module named 'trl'", marks=pytest.mark.seconds),
    ],
)
def test_an_interpreter_without_trl(tmp_path, python, message):
    with pytest.raises(BenchmarkError, match=message):
        bench.measure_trl(tmp_path, 1, python)


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "x"], ["--stps", "1"]])
def test_wrong_options(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "step", *arguments])
    assert caught.value.code == 2
    assert "usage: lora-moe-rl bench step" in capsys.readouterr().err
