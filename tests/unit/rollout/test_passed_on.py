"""What of vLLM's engine arguments may be handed on, against vLLM's own classes."""

from __future__ import annotations

import dataclasses

import pytest

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.base.loader import engine_args as held_args
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import read_config_file, to_yaml
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.planner.facts import find
from lora_moe_rl.rollout import device, passed_on
from lora_moe_rl.rollout.spread import Meeting, spread_args

pytestmark = pytest.mark.seconds  # imports vLLM


def of(*settings: str, model: str = "qwen3-30b-a3b") -> tuple[RunConfig, AdapterSpec]:
    config = override(RunConfig(), list(settings))
    return config, AdapterSpec.build(find(model).shape, config.adapter)


@pytest.mark.parametrize("build", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["rollout.tp=2"],
        ["rollout.dp=4", "rollout.ep=true", "rollout.nodes=2"],
        ["refit.mode=merged"],
        ["placement.mode=colocated"],
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3"])
def test_all_that_a_run_sets_is_refused_beforehand(monkeypatch, build, settings, model):
    config, spec = of(*settings, model=model)
    args = device.engine_args(config, spec, "model", 0, cpu=build == "cpu") | held_args("folder")
    if config.rollout.nodes > 1:
        args |= spread_args(config.rollout, Meeting("host", 1), 1)
    assert len(args) > 15
    monkeypatch.setattr(passed_on, "vllm_on_cpu", lambda: build == "cpu")
    for name in args:
        given = config.rollout.model_copy(update={"engine_args": {name: 1}})
        with pytest.raises(ConfigError, match=rf"rollout\.engine_args\.{name}=1 is"):
            passed_on.check_passed_on(config.model_copy(update={"rollout": given}))


def test_what_is_known_is_what_vllm_takes():
    import vllm

    fields = {field.name for field in dataclasses.fields(vllm.AsyncEngineArgs)}
    assert passed_on.known_arguments() == fields
    assert fields >= passed_on.OURS.keys() | passed_on.FIXED.keys() | set(passed_on.OF_CPU)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("max_model_len=99", "max_model_len=99 is what model.max_length says"),
        ("logprobs_mode=raw_logprobs", "is set by the run itself .samples, and their logprobs"),
        ("expert_placement_strategy=round_robin", "which rank of an engine has which experts"),
        ("enable_eplb=true", "which rank of an engine has which experts"),
        ("hf_token=abc", "set HF_TOKEN in the environment"),
        ("kv_cache_dtyp=fp8", "no such argument; did you mean kv_cache_dtype"),
        ("kv-cache-dtype=fp8", "no such argument; did you mean kv_cache_dtype"),
        ("zzz=1", "no such argument; see `vllm serve --help=all`"),
        ("max_num_batched_tokens=64", "for vLLM's CPU build"),
    ],
)
def test_others_are_refused_with_the_way_out(monkeypatch, given, message):
    monkeypatch.setattr(passed_on, "vllm_on_cpu", lambda: True)
    with pytest.raises(ConfigError, match=message):
        device.check_engine(*of(f"rollout.engine_args.{given}"))


def test_on_gpus_tokens_of_a_step_may_be_set_unless_ranks_exchange_them(monkeypatch):
    monkeypatch.setattr(passed_on, "vllm_on_cpu", lambda: False)
    tokens = "rollout.engine_args.max_num_batched_tokens=64"
    passed_on.check_passed_on(of(tokens)[0])
    with pytest.raises(ConfigError, match="with rollout.dp=2"):
        passed_on.check_passed_on(of(tokens, "rollout.dp=2", "rollout.ep=true")[0])


def test_int4_experts_keep_their_kernel():
    config = of("rollout.engine_args.moe_backend=triton")[0]
    device.check_quantised(config, None)
    with pytest.raises(ConfigError, match="moe_backend=triton.*never reads an adapter"):
        device.check_quantised(config, "int4")


def test_they_reach_vllm_as_they_stand_and_a_saved_config_has_them(tmp_path):
    import vllm

    config, spec = of(
        "rollout.engine_args.scheduling_policy=priority",
        'rollout.engine_args.hf_overrides={"rms_norm_eps": 0.5}',
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = RunConfig.model_validate(read_config_file(tmp_path / "config.yaml"))
    assert again.rollout.engine_args == config.rollout.engine_args
    device.check_engine(again, spec)
    args = vllm.AsyncEngineArgs(**device.engine_args(again, spec, "model", 0, cpu=False))
    assert (args.scheduling_policy, args.hf_overrides) == ("priority", {"rms_norm_eps": 0.5})


def test_what_vllm_says_of_a_value_is_told_in_full():
    from vllm.config import SchedulerConfig

    config = of("rollout.engine_args.scheduling_policy=whatever")[0]
    with pytest.raises(ConfigError) as caught, passed_on.told_of(config):
        SchedulerConfig(policy="whatever", max_model_len=64, is_encoder_decoder=False)
    said = 'with rollout.engine_args={"scheduling_policy": "whatever"}: 1 validation error'
    assert said in str(caught.value) and "'fcfs'" in str(caught.value)
    with pytest.raises(ValueError, match="other"), passed_on.told_of(RunConfig()):
        raise ValueError("other")


def test_one_that_is_there_already_is_an_error_at_the_engine_too():
    config, spec = of("rollout.engine_args.seed=3")
    with pytest.raises(ConfigError, match="engine_args.seed=3 is set by the run itself, to 0"):
        device.engine_args(config, spec, "model", 0, cpu=False)
