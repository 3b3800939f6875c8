"""Every preset through the real trainer: loss and gradient equal float64 on the whole step, with
micro-batches, data-parallel ranks and layouts. That the formulas are right is shown in
tests/unit/algorithms."""

from __future__ import annotations

import json

import pytest

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cli import main
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.config.plugins import ALGORITHMS
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.verify.algorithm import BASE, MANY, ONE, Verification, cases_of
from lora_moe_rl.verify.layouts import parse_layouts, placed
from lora_moe_rl.verify.ranks import spec_of

MODEL = "qwen3_moe"
TIGHT = {"rejection_max": 1.1}
WIDE = {"rejection_max": 2.0}
PARTS = {
    "kl": {"kl_coef": 0.1, "kl_estimator": "k3+"},
    "kl_in_reward": {"name": "rloo", "kl_coef": 0.1},
    "kl_to_start": {"kl_coef": 0.3, "reference": "start"},
    "kl_to_start_in_reward": {"name": "rloo", "kl_coef": 0.1, "reference": "start"},
    "pairs_against_start": {"name": "dpo", "reference": "start"},
    "pairs_of_means": {"name": "dpo", "pair_loss": "ipo"},
    "tis": {"correction": "tis"},
    "normalized": {"correction": "decoupled_seq_is", "correction_normalize": True},
    "mis": {"correction": "mis", "correction_max": 30.0},
    "geometric": {"rejection": "sequence_mean", **TIGHT, "aggregation": "seq-mean-token-mean"},
    "token": {"rejection": "tokens", **WIDE},
    "several": {"rejection": "tokens,veto", "rejection_max": (1.8, 2.5)},
    "off_policy": {
        "rejection": "tokens,off_policy",
        "rejection_max": (4.0, 0.1),
        "correction": "tis",
    },
    "bypass": {
        "correction": "bypass_pg_geo_rs_token_tis",
        "rejection_min": 0.8,
        "rejection_max": 1.2,
        "kl_coef": 0.1,
    },
    "prompts": {"rejection": "tokens", **WIDE, "aggregation": "prompt-mean"},
    "reweighted": {"reweight": "pow", "aggregation": "seq-mean-token-mean", "anchor": "rollout"},
    "reweighted_vapo": {"name": "vapo", "reweight": "max_min", "critic_warmup": 0},
    "rejecting_vapo": {"name": "vapo", "rejection": "tokens", **WIDE, "critic_warmup": 0},
    "reweighted_weights": {
        "reweight": "max_random",
        "correction": "decoupled_token_is",
        "correction_normalize": True,
        "rejection": "tokens",
        **WIDE,
        "aggregation": "prompt-mean",
    },
    "entropy": {"entropy_coef": 0.3, "anchor": "rollout"},
    "entropy_in_parts": {
        "entropy_coef": 0.3,
        "rejection": "tokens",
        **WIDE,
        "reweight": "pow",
        "aggregation": "seq-mean-token-mean",
    },
    "entropy_of_ppo": {"name": "ppo", "entropy_coef": 0.3, "correction": "tis"},
    "geometric_mean": {
        "loss": "gmpo",
        "log_clip_low": 0.05,
        "log_clip_high": 0.05,
        "anchor": "rollout",
        "aggregation": "seq-mean-token-mean",
    },
    "reinforce": {"correction": "bypass_pg_is", "aggregation": "seq-mean-token-sum"},
    "clipped_by_covariance": {
        "loss": "clip_cov",
        "clip_cov_ratio": 0.2,
        "clip_cov_lb": 0.0,
        "clip_low": 0.4,
        "clip_high": 0.4,
        "anchor": "rollout",
    },
    "clipped_by_covariance_in_parts": {
        "loss": "clip_cov",
        "clip_cov_ratio": 0.2,
        "clip_cov_lb": 0.0,
        "rejection": "tokens",
        **WIDE,
        "reweight": "pow",
        "correction": "tis",
    },
    "penalised_by_covariance": {
        "loss": "kl_cov",
        "kl_cov_ratio": 0.2,
        "ppo_kl_coef": 0.5,
        "anchor": "rollout",
        "reweight": "max_random",
    },
    "of_high_entropy": {"top_entropy_quantile": 0.3, "entropy_coef": 0.3, "anchor": "rollout"},
    "of_high_entropy_in_parts": {
        "top_entropy_quantile": 0.3,
        "kl_coef": 0.1,
        "rejection": "tokens",
        **WIDE,
        "reweight": "pow",
        "aggregation": "seq-mean-token-mean",
    },
    "weighted_kl": {"kl_coef": 0.3, "kl_weighted": True, "anchor": "rollout"},
    "penalised": {"loss": "dro", "anchor": "rollout", "aggregation": "token-sum"},
    "distilled_in_parts": {
        "name": "distillation",
        "distill_beta": 0.3,
        "entropy_coef": 0.3,
        "kl_coef": 0.1,
        "rejection": "tokens",
        **WIDE,
        "aggregation": "seq-mean-token-mean",
    },
    "of_whole_samples": {"loss": "vespo", "anchor": "rollout", "rejection": "sequence_sum"},
}
CONFIG = with_settings(
    RunConfig(), {**BASE, "model": {"path": MODEL}, "trainer": {**BASE["trainer"], "device": "cpu"}}
)


@pytest.fixture(scope="module")
def model():
    directory = resolve_model(MODEL)
    return directory, spec_of(directory, CONFIG)


def case_of(part: dict) -> RunConfig:
    start = {"init_from": "start"} if "reference" in part else {}
    return with_settings(RunConfig(), {"algorithm": part, "adapter": start})


def verification(model, layouts: list[str]) -> Verification:
    directory, spec = model
    assert isinstance(spec, AdapterSpec)
    cases = cases_of(CONFIG, ALGORITHMS.names())
    cases |= {name: case_of(part) for name, part in PARTS.items()}
    found = placed(parse_layouts(layouts, CONFIG, spec.shape)) if layouts else []
    # Twelve samples: several micro-batches on each of two data-parallel ranks.
    return Verification(CONFIG, spec, directory, found, cases, samples=12)


@pytest.mark.minute
@pytest.mark.parametrize(
    "layouts", [["dp2", "cp2ep2"], pytest.param(["tp2", "pp2"], marks=pytest.mark.slow)], ids=str
)
def test_the_layout_changes_no_algorithm(model, layouts):
    report = verification(model, layouts).run()
    assert report.passed, report.explanations()
    assert [check.quantity for check in report.rows[0].checks] == [ONE, MANY, *layouts]
    losses = {round(row.loss, 6) for row in report.rows}
    assert len(losses) >= len(report.rows) // 2  # several presets are one on-policy


PLANTED = '''
from lora_moe_rl.algorithms.base import Algorithm, Loss, Signal

class Bystanders(Algorithm):
    """Its loss depends on which samples a micro-batch happens to hold."""

    def signal(self, group):
        return Signal.of_samples(group, group.rewards)

    def loss(self, tokens):
        return Loss(-tokens.logprobs * (tokens.advantages - tokens.advantages.mean()))
'''


def test_a_loss_that_depends_on_the_micro_batch_fails(tmp_path, capsys):
    (tmp_path / "own.py").write_text(PLANTED)
    own = f"{tmp_path}/own.py:Bystanders"
    words = ["verify", "algorithm", "--model", MODEL, "--algorithms", own, "--layouts", "dp2"]
    assert main([*words, "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["errors"][MANY] > 1e-3
    assert any(fault.startswith(f"{MANY}: the loss is ") for fault in row["faults"])
