"""The config: derived values, and combinations that cannot be."""

import pickle
import subprocess
import sys

import pytest
from pydantic import ValidationError

from lora_moe_rl import errors
from lora_moe_rl.config import (
    AdapterConfig,
    AlgorithmConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)


def test_importing_the_config_imports_no_torch():
    code = "import sys, lora_moe_rl.config; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"rank": 513}, "adapter.rank=513 is not a rank vLLM can serve"),
        ({"rank_pattern": {"q_proj": 600}}, "adapter.rank_pattern['q_proj']=600 is not a rank"),
        (
            {"rank": 257, "init": "olora"},
            "adapter.rank=257 with adapter.init=olora, which serves 514, is not a rank vLLM can "
            "serve: its largest adapter slot is 512; use a rank from 1 to 256",
        ),
        ({"rank_pattern": {"q_proj": 0}}, "greater than or equal to 1"),
        ({"alpha_pattern": {"q_proj": 0}}, "greater than 0"),
        ({"expert_rank": 2, "expert_rank_over_top_k": True}, "both set the rank of experts"),
        (
            {"rank": 257, "init": "pissa"},
            "adapter.rank=257 with adapter.init=pissa, which serves 514, is not a rank vLLM can",
        ),
        ({"init": "milora", "expert_layout": "shared_outer"}, "adapter.init=milora starts each"),
        ({"init": "olora", "expert_layout": "shared_outer"}, "use per_expert or kaiming"),
        ({"init": "olora", "init_from": "x"}, "adapter.init_from=x and adapter.init=olora both"),
    ],
)
def test_adapters_that_cannot_be(adapter, message):
    with pytest.raises(ValidationError) as caught:
        AdapterConfig(**adapter)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "dp"),
    [
        ({"world_size": 1}, 1),
        ({"world_size": 2, "ep": 2}, 2),
        ({"world_size": 2, "tp": 2, "ep": 2}, 1),
        ({"world_size": 8, "tp": 2, "pp": 2, "ep": 4}, 2),
    ],
)
def test_layouts(layout, dp):
    assert TrainerConfig(**layout).dp == dp


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"world_size": 3, "tp": 2}, "must be a multiple of tp * pp = 2 * 1 = 2"),
        ({"world_size": 2, "tp": 2, "pp": 2}, "must be a multiple of tp * pp = 2 * 2 = 4"),
        ({"world_size": 6, "tp": 2, "cp": 2}, "must be a multiple of tp * cp * pp = 2 * 2 * 1 = 4"),
        (
            {"world_size": 4, "cp": 4, "ep": 3},
            "the 4 ranks of a pipeline stage (tp=1 * cp=4 * dp=1 with",
        ),
        ({"world_size": 2, "pp": 2, "ep": 2}, "does not divide the 1 ranks of a pipeline stage"),
        ({"offload": "both", "recompute": "full"}, "keeps none but layers' inputs"),
    ],
)
def test_layouts_that_do_not_fit(layout, message):
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(**layout)
    assert message in str(caught.value)


def test_one_update_a_step_is_on_policy():
    assert AlgorithmConfig().on_policy
    assert not AlgorithmConfig(epochs=2).on_policy
    assert not AlgorithmConfig(mini_batches=2).on_policy


@pytest.mark.parametrize("temperature", [0.0099, 0.0, -1.0])
def test_a_temperature_that_vllm_would_raise_is_refused(temperature):
    with pytest.raises(ValidationError, match="is not what vLLM would sample with"):
        RolloutConfig(temperature=temperature)
    assert RolloutConfig(temperature=0.01).temperature == 0.01


def test_mini_batches_divide_the_prompts():
    with pytest.raises(ValidationError, match=r"mini_batches=3 does not divide .*=16"):
        RunConfig(algorithm=AlgorithmConfig(mini_batches=3))


def test_a_config_does_not_change_and_crosses_processes():
    config = RunConfig(model="deepseek_v3")
    with pytest.raises(ValidationError):
        config.seed = 1
    assert pickle.loads(pickle.dumps(config)) == config
    assert str(config.run_dir) == "runs/run-deepseek_v3"


def test_every_error_crosses_processes():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) > 10
    for kind in kinds:
        error = kind("engine-0", "died", "tail") if (
            issubclass(kind, errors.ActorFailed)
        ) else kind("what, where, way out")  # fmt: skip
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is kind and str(copy) == str(error)
        assert isinstance(copy, errors.LoraMoeRlError)
        assert copy.exit_code in (1, 2, errors.DISK, errors.FAULT)


def test_there_are_no_fewer_engines_than_the_least():
    assert RunConfig(rollout={"engines": 3}).rollout.firm_engines == 3
    assert RunConfig(rollout={"engines": 3, "least_engines": 2}).rollout.firm_engines == 2
    with pytest.raises(ValueError, match="rollout.least_engines=4 is above rollout.engines=3"):
        RunConfig(rollout={"engines": 3, "least_engines": 4})


def test_data_parallel_ranks_spread_experts_over_nodes_evenly():
    assert RunConfig(rollout={"dp": 8, "ep": True, "nodes": 2}).rollout.ranks == 8
    for rollout, said in (
        ({"dp": 2}, "rollout.dp=2 without rollout.ep=true"),
        ({"dp": 2, "tp": 2, "ep": True}, "use rollout.dp=4 with rollout.tp=1"),
        ({"dp": 8, "ep": True, "nodes": 3}, "rollout.nodes=3 does not divide rollout.dp=8"),
    ):
        with pytest.raises(ValueError, match=said):
            RunConfig(rollout=rollout)
