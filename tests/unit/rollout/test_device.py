"""What vLLM is asked for on a GPU, and what is refused where it has no effect."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.planner.facts import find
from lora_moe_rl.rollout import device


def of(**rollout) -> tuple[RunConfig, AdapterSpec]:
    config = RunConfig(rollout=rollout)
    return config, AdapterSpec.build(find("qwen3-30b-a3b").shape, config.adapter)


@pytest.mark.parametrize("eager", [False, True])
def test_graphs_are_left_out_where_the_setting_says_so(eager):
    config, spec = of(enforce_eager=eager)
    assert device.engine_args(config, spec, "model", 0, cpu=False)["enforce_eager"] is eager


def test_the_cpu_build_has_no_graphs_to_leave_out(monkeypatch):
    config, spec = of(enforce_eager=True)
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: True)
    with pytest.raises(ConfigError, match="enforce_eager=true has no effect with vLLM's CPU build"):
        device.check_engine(config, spec)
    device.check_engine(*of())
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: False)
    device.check_engine(config, spec)


def test_a_temperature_above_vllms_is_refused():
    with pytest.raises(ConfigError, match="2.01 is above what vLLM samples with; use 2 or less"):
        device.check_engine(*of(temperature=2.01))
    device.check_engine(*of(temperature=2))


def test_on_gpus_routes_are_recorded_with_prefix_caching_alone(monkeypatch):
    config, spec = of(prefix_caching=False)
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match="rollout.prefix_caching=false, and vLLM records"):
        device.check_engine(config, spec)
    dense = AdapterSpec.build(find("qwen3-8b").shape, config.adapter)
    device.check_engine(config, dense)
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: True)
    device.check_engine(config, spec)


def test_vllm_wants_prefix_caching_where_it_records_routes():
    """The check above goes when this fails."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    text = (Path(spec.origin).parent / "config" / "vllm.py").read_text()
    assert "AuxOutput Connector requires prefix caching." in text


def test_engines_on_the_cpu_cannot_map_memory_of_a_gpu(monkeypatch):
    config, spec = RunConfig(refit={"transport": "cuda_ipc"}), of()[1]
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: True)
    with pytest.raises(ConfigError, match="refit.transport=cuda_ipc maps .* use refit.transport="):
        device.check_engine(config, spec)
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: False)
    device.check_engine(config, spec)


def test_a_transport_that_cannot_do_what_is_asked_is_refused_with_the_engine():
    config, spec = of()
    config = RunConfig.model_validate(
        config.model_dump() | {"refit": {"transport": "nixl", "mode": "merged"}}
    )
    with pytest.raises(ConfigError, match="nixl has room for one part .* refit.transport=auto"):
        device.check_engine(config, spec)


@pytest.mark.parametrize("cpu", [False, True])
def test_no_ranks_of_an_engine_are_started_by_ray(cpu):
    """Left to itself, vLLM asks Ray for them wherever a placement group is at hand."""
    config, spec = of(tp=2)
    assert device.engine_args(config, spec, "model", 0, cpu)["distributed_executor_backend"] == "mp"


INT4_CONFIG = {"quantization_config": {"quant_method": "compressed-tensors"}}


def test_int4_experts_are_served_by_the_kernel_that_reads_adapters(tmp_path):
    """vLLM 0.31's Triton experts for INT4 say that they know LoRA, and never read it."""
    config, spec = of()
    (tmp_path / "config.json").write_text(json.dumps(INT4_CONFIG))
    args = device.engine_args(config, spec, str(tmp_path), 0, cpu=False)
    assert args["moe_backend"] == "marlin"
    (tmp_path / "config.json").write_text("{}")
    assert "moe_backend" not in device.engine_args(config, spec, str(tmp_path), 0, cpu=False)


def test_float32_is_refused_where_vllms_kernels_on_gpus_have_16_bits(monkeypatch):
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: False)
    spec, in_float32 = of()[1], {"trainer": {"dtype": "float32"}}
    merged = RunConfig(**in_float32, refit={"mode": "merged"})
    with pytest.raises(ConfigError, match="of adapters .* 16 bits alone; .*refit.mode=merged"):
        device.check_engine(RunConfig(**in_float32), spec)
    device.check_engine(merged, spec)
    device.check_engine(RunConfig(trainer={"dtype": "bfloat16"}), spec)
    for model, kernels in (("moonlight_16b_a3b", "MLA"), ("qwen3_next_80b_a3b", "gated DeltaNet")):
        other = AdapterSpec.build(find(model).shape, merged.adapter)
        with pytest.raises(ConfigError, match=f"of {kernels} .* use trainer.dtype=bfloat16$"):
            device.check_engine(merged, other)


def test_delta_rules_that_flashinfer_has_not_are_computed_by_triton():
    """vLLM 0.31 takes FlashInfer's kernel for every model on an H100, and its engine would end at
    the first request."""
    shape, config = find("qwen3_next_80b_a3b").shape, RunConfig()

    def asked(cpu=False, **sizes):
        of_these = replace(shape, dims={**shape.dims, **sizes})
        spec = AdapterSpec.build(of_these, config.adapter)
        return device.engine_args(config, spec, "model", 0, cpu).get("gdn_prefill_backend")

    assert asked() is None
    assert asked(linear_key_dim=16) == asked(linear_value_dim=64) == "triton"
    assert asked(cpu=True, linear_key_dim=16) is None
    args = device.engine_args(config, of()[1], "model", 0, cpu=False)
    assert "gdn_prefill_backend" not in args


def test_processes_on_gpus_are_not_forked():
    assert device.environment(of()[0].rollout, cpu=False)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_fp8_weights_are_served_as_they_are():
    assert device.environment(of()[0].rollout, cpu=False)["VLLM_USE_DEEP_GEMM_E8M0"] == "0"


@pytest.mark.parametrize(
    ("form", "settings", "named"),
    [
        ("int4", {"refit": {"mode": "merged"}}, "refit.mode=merged"),
        ("fp8", {"adapter": {"init": "olora"}}, "adapter.init=olora"),
    ],
)
def test_settings_that_a_quantised_base_excludes(form, settings, named, monkeypatch):
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match=named):
        device.check_quantised(RunConfig(**settings), form)
    device.check_quantised(RunConfig(**settings), None)
    device.check_quantised(RunConfig(), form)


@pytest.mark.parametrize("form", [None, "int4"])
def test_activations_in_8_bits_are_of_fp8_bases(form):
    engine = RunConfig(trainer={"fp8_forward": "engine"})
    with pytest.raises(ConfigError, match="trainer.fp8_forward=engine has no effect"):
        device.check_quantised(engine, form)
    device.check_quantised(engine, "fp8")


def test_activations_in_8_bits_are_not_for_transformer_engine(monkeypatch):
    engine = RunConfig(trainer={"fp8_forward": "engine"})
    monkeypatch.setattr(device, "installed", {"transformer-engine": "2.14"}.get)
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match="normalises and multiplies in one"):
        device.check_quantised(engine, "fp8")
    on_cpu = RunConfig(trainer={"fp8_forward": "engine", "device": "cpu"})
    device.check_quantised(on_cpu, "fp8")


def test_cpu_engines_quantise_activations_where_the_trainer_does():
    config, spec = of()
    engine = config.model_copy(update={"trainer": TrainerConfig(fp8_forward="engine")})
    told = [
        device.engine_args(one, spec, "model", 0, cpu)["additional_config"]
        for one, cpu in ((config, True), (engine, True), (engine, False))
    ]
    assert [device.FP8_ACTIVATIONS in one for one in told] == [False, True, False]


def test_requests_that_may_go_on_under_the_next_version_hand_on_each_token():
    config, spec = of()
    going_on = RunConfig(schedule={"lag": 1, "in_flight": "continue"})
    for cpu in (True, False):
        args = device.engine_args(config, spec, "model", 0, cpu)
        assert args["additional_config"] == {device.GATHER_SECONDS: 1.0}
        assert device.engine_args(going_on, spec, "model", 0, cpu)["additional_config"] == {}


def test_requantised_fp8_is_refused(monkeypatch):
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: False)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "1")
    with pytest.raises(ConfigError, match="VLLM_USE_DEEP_GEMM_E8M0=1"):
        device.check_quantised(RunConfig(), "fp8")
    device.check_quantised(RunConfig(), "int4")


@pytest.mark.parametrize(
    ("adapter", "rollout", "refused"),
    [
        ({"rank": 128}, {}, False),
        ({"rank": 256}, {}, True),
        ({"rank": 128, "init": "olora"}, {}, True),  # of twice the rank
        ({"rank": 16, "rank_pattern": {"layers.3.o_proj": 129}}, {}, True),  # one slot for all
        ({"rank": 256}, {"tp": 2, "fully_sharded": True}, False),
        ({"rank": 256, "targets": ["*_proj"]}, {}, False),
    ],
)
def test_on_gpus_slots_of_experts_are_not_larger_than_vllms_kernels_take(
    monkeypatch, adapter, rollout, refused
):
    config = RunConfig(adapter=adapter, rollout=rollout)
    spec = AdapterSpec.build(find("qwen3-30b-a3b").shape, config.adapter)
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: False)
    if refused:
        with pytest.raises(ConfigError, match="up to 128; lower .*tp above 1, and without"):
            device.check_engine(config, spec)
    else:
        device.check_engine(config, spec)
    monkeypatch.setattr(device, "vllm_on_cpu", lambda: True)
    device.check_engine(config, spec)


def test_slots_have_once_what_all_experts_share():
    for layout in ("per_expert", "shared_outer"):
        config = RunConfig(adapter={"expert_layout": layout})
        spec = AdapterSpec.build(find("qwen3-30b-a3b").shape, config.adapter)
        args = device.engine_args(config, spec, "model", 0, cpu=False)
        assert args["enable_moe_shared_loras"] is (layout == "shared_outer")
