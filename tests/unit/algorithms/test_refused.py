"""Settings of algorithms that have no meaning together are refused, and say so."""

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=grop"], "did you mean grpo?"),
        (["algorithm.loss=gsop"], "did you mean gspo?"),
        (["algorithm.advantage=rlo"], "did you mean rloo?"),
        (["algorithm.correction=icepopp"], "did you mean icepop?"),
        (["algorithm.correction=token_truncat"], "did you mean token_truncate?"),
        (["algorithm.aggregation=token_mean"], "did you mean token-mean?"),
        (
            ["algorithm.tau_positive=2"],
            "no setting of algorithm.loss=ppo_clip: it is one of loss=sa",
        ),
        (["algorithm=gspo", "algorithm.rejection=tokens"], "takes single tokens out of it"),
        (["algorithm.loss=gmpo", "algorithm.rejection=tokens"], "takes single tokens out of it"),
        *(
            ([f"algorithm={name}", "algorithm.equal_within=0.1"], f"equal_within=0.1 {said}")
            for name, said in (
                ("ppo", "has no effect with algorithm.advantage=gae"),
                ("vapo", "has no effect with algorithm.advantage=length_adaptive_gae"),
                ("reinforce_pp", "has no effect with algorithm.advantage=reinforce_pp"),
                ("opd", "has no effect with algorithm.advantage=teacher and reward_weight=0"),
            )
        ),
        (["algorithm.correction=mis", "algorithm.rejection=tokens"], "weighs whole samples and"),
        (["algorithm.anchor=rollout", "algorithm.correction=tis"], "with the same ratio once more"),
        (["algorithm.anchor=rollout", "algorithm.loss=reinforce"], "anchor=rollout has no effect"),
        *(
            (
                ["algorithm.loss=reinforce", f"algorithm.{twice}", *more],
                "make 2 updates of the same samples, and algorithm.loss=reinforce has no ratio",
            )
            for twice in ("epochs=2", "mini_batches=2")
            for more in (
                [],
                ["algorithm.correction=tis"],
                ["algorithm.anchor=rollout", "algorithm.rejection=veto"],
            )
        ),
        (
            ["algorithm.loss=clip_cov", "algorithm.top_entropy_quantile=0.2"],
            "loss=clip_cov selects tokens of each optimizer step, and algorithm.top_entropy_quant",
        ),
        (
            ["algorithm=gspo", "algorithm.top_entropy_quantile=0.2"],
            "loss=gspo has one ratio a sample and algorithm.top_entropy_quantile=0.2 trains single",
        ),
        (
            ["algorithm.loss=kl_cov"],
            "algorithm.loss=kl_cov penalises how far tokens have moved since the policy before the "
            "update, and algorithm.epochs=1 with mini_batches=1 is one update",
        ),
        (["algorithm.loss=dro"], "algorithm.loss=dro penalises how far tokens have moved since"),
        (
            ["algorithm.loss=clip_cov", "algorithm.clip_cov_lb=5"],
            "clip_cov_lb=5 is not below clip_cov_ub=5, and no token is between them",
        ),
        (["algorithm.top_entropy_quantile=0"], "top_entropy_quantile=0 must be greater than 0"),
        (
            ["algorithm.clip_cov_ratio=0.1"],
            "no setting of algorithm.loss=ppo_clip: it is one of lo",
        ),
        (["algorithm=sft", "algorithm.top_entropy_quantile=0.2"], "top_entropy_quantile"),
        (["algorithm.kl_estimator=k2"], "kl_estimator=k2 has no effect with algorithm.kl_coef=0"),
        (["algorithm.kl_in=reward"], "kl_in=reward has no effect with algorithm.kl_coef=0"),
        (
            ["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"],
            "kl_estimator=k1 has a gradient of 0 in the mean, and with algorithm.kl_in=loss",
        ),
        (
            ["algorithm=rloo", "algorithm.kl_coef=0.1", "algorithm.kl_estimator=k3+"],
            "kl_estimator=k3+ differs from k3 by its gradient, and with algorithm.kl_in=reward",
        ),
        (
            ["algorithm=max_rl", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
            "advantage=max_rl takes no negative rewards, and algorithm.kl_in=reward makes them",
        ),
        (["algorithm.overlong_penalty=2"], "has no effect with algorithm.overlong_buffer=0"),
        (["algorithm.group_size=1"], "leaves none to compare with"),
        (
            ["algorithm.rejection=sequence_mean", "algorithm.rejection_min=1.1"],
            "rejection_min=1.1 is not below rejection_max=1.001; bounds are absolute ratios",
        ),
        (
            ["algorithm.rejection=veto", "algorithm.rejection_divergence=k3"]
            + ["algorithm.rejection_min=1"],
            "has an upper bound alone",
        ),
        (
            ["algorithm.rejection=tokens", "algorithm.rejection_max=0.9"],
            "rejection_max=0.9 is no upper bound of a ratio",
        ),
        (
            ["algorithm.rejection=sequence_mean,tokens", "algorithm.loss=gspo"],
            "loss=gspo has one ratio a sample and algorithm.rejection=tokens takes single tokens",
        ),
        (
            ["algorithm.rejection=sequence_mean,veto", "algorithm.rejection_max=1.1"],
            "rejection_max has 1 value, and 2 rejections take one each (sequence_mean, veto)",
        ),
        (
            ["algorithm.rejection=sequence_mean,veto", "algorithm.rejection_max=0.9,2"],
            "rejection_max=0.9 is no upper bound of a ratio (k1): it must be above 1 (of "
            "algorithm.rejection=sequence_mean)",
        ),
        (["algorithm.rejection=veto,veto"], "has veto twice, alike"),
        (
            ["algorithm=vapo", "algorithm.nll_weight=0", "algorithm.nll_above=0.5"],
            "nll_above=0.5 has no effect with algorithm.nll_weight=0",
        ),
        (
            ["algorithm=reinforce_pp", "algorithm.gamma=0.5", "algorithm.loss=gmpo"],
            "advantage=reinforce_pp gives each token an advantage of its own",
        ),
        (
            [
                "algorithm=reinforce_pp",
                "algorithm.kl_coef=0.1",
                "algorithm.kl_in=reward",
                "algorithm.loss=gmpo",
            ],
            "advantage=reinforce_pp gives each token an advantage of its own",
        ),
        (
            ["algorithm=ppo", "algorithm.loss=gmpo"],
            "advantage=gae gives each token an advantage of its own, and algorithm.loss=gmpo takes",
        ),
        (
            ["algorithm.loss=reinforce", "algorithm.anchor=rollout", "algorithm.rejection=veto"]
            + ["schedule.lag=1", "refit.slots=3"],
            "schedule.lag=1 trains on tokens of older versions",
        ),
        (["algorithm.rejection=veto,none"], "names several, and one of them is none"),
        (["algorithm.rejection=veto,tokns"], "did you mean tokens?"),
        (
            ["algorithm.correction=decoupled_geo_rs", "algorithm.rejection=veto"],
            "correction=decoupled_geo_rs stands for rejection=sequence_mean too, and "
            "algorithm.rejection=veto is another",
        ),
        (
            ["algorithm=gspo", "algorithm.correction=bypass_ppo_clip"],
            "stands for loss=ppo_clip too, and GSPO's gspo is another",
        ),
        (["algorithm.correction_normalize=true"], "is no setting of algorithm.correction=none"),
        (
            ["algorithm.correction=bypass_pg_is", "algorithm.correction_normalize=true"],
            "with algorithm.anchor=rollout weights are of the policy that is being updated",
        ),
        (
            ["algorithm=max_rl", "algorithm.overlong_buffer=10"],
            "advantage=max_rl takes no negative rewards, and algorithm.overlong_buffer=10 makes",
        ),
        (
            ["algorithm=reinforce_pp", "algorithm.group_size=1", "algorithm.draw_again=2"],
            "which is every prompt with algorithm.group_size=1",
        ),
        (
            ["algorithm.correction=icepop", "algorithm.correction_min=6"],
            "correction_min=6 is not below correction_max=5; bounds are absolute ratios",
        ),
        (
            ["algorithm.correction=icepop", "algorithm.correction_min=1.1"],
            "correction_min=1.1 is above 1, which is the ratio of two policies that agree",
        ),
        (
            ["algorithm.correction=icepop", "algorithm.correction_min=6"]
            + ["algorithm.rejection=veto"],
            "correction_min=6 is not below correction_max=5; bounds are absolute ratios",
        ),
        (
            ["algorithm.correction=icepop", "algorithm.rejection=veto"]
            + ["algorithm.rejection_min=2e4"],
            "rejection_min=20000 is not below rejection_max=10000; bounds are absolute ratios",
        ),
        *(
            (
                [f"algorithm.correction={name}", "algorithm.correction_max=0.2"],
                "correction_max=0.2 is below 1, which is the ratio of two policies that agree; "
                "bounds are absolute ratios of trainer to engine (1.2, and not 0.2)",
            )
            for name in ("token_truncate", "sequence_truncate", "sequence_mask", "mis")
        ),
        (
            ["algorithm.rejection=sequence_sum", "algorithm.rejection_min=0.5"]
            + ["algorithm.rejection_max=0.9"],
            "rejection_max=0.9 is below 1, which is the ratio of two policies that agree",
        ),
        (
            ["algorithm.rejection=veto", "algorithm.rejection_min=1.2"],
            "rejection_min=1.2 is above 1, which is the ratio of two policies that agree",
        ),
    ],
)
def test_what_has_no_meaning_is_refused_and_names_both_sides(settings, message):
    with pytest.raises(ConfigError) as error:
        override(RunConfig(), settings)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_what_has_no_policy_gradient_refuses_an_entropy_bonus(name):
    with pytest.raises(
        ConfigError, match=f"entropy_coef=0.1 is no setting of algorithm.name={name}"
    ):
        override(RunConfig(), [f"algorithm={name}", "algorithm.entropy_coef=0.1"])
