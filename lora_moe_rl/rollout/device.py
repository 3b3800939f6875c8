"""What differs between an engine on GPUs and one on the CPU: environment and engine arguments."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RolloutConfig, RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.untrusted import read_json
from lora_moe_rl.models import quantised
from lora_moe_rl.refit import transports
from lora_moe_rl.rollout import speculation
from lora_moe_rl.rollout.facts import (
    HIGHEST_TEMPERATURE,
    Dtype,
    served_module,
    slot_rank,
    step_tokens,
    too_large_for_experts,
)
from lora_moe_rl.rollout.late_inductor import import_vllm
from lora_moe_rl.rollout.passed_on import check_passed_on, with_passed_on
from lora_moe_rl.rollout.speculation import check_speculation
from lora_moe_rl.rollout.vllm_plugin import (
    ENGINE_VARIABLE,
    HELD_VARIABLE,
    LEFT_OUT_VARIABLE,
    RANKS_VARIABLE,
)
from lora_moe_rl.upstream.transformers_import import import_transformers
from lora_moe_rl.upstream.versions import installed, vllm_on_cpu

GIB = 2**30
E8M0_VARIABLE = "VLLM_USE_DEEP_GEMM_E8M0"
# By default vLLM quantises dense FP8 weights anew, with scales that are powers of two, and serves
# other numbers than are trained on.
FP8_VARIABLES = {E8M0_VARIABLE: "0"}
# Of INT4 experts with an adapter, on GPUs: what vLLM would fall back to, Triton's, never reads it.
INT4_MOE_BACKEND = "marlin"
# Sizes of a delta rule's heads that FlashInfer's kernel takes.
FLASHINFER_HEADS = {128}
CPU_STEP_TOKENS = 4096  # most tokens of one step of a CPU engine
# Of vLLM's additional_config: our FP8 classes on the CPU quantise activations, too.
FP8_ACTIVATIONS = "lora_moe_rl_fp8_activations"
# And how often requests hand on what they have sampled, in seconds (rollout/gathered_outputs.py).
GATHER_SECONDS = "lora_moe_rl_gather_seconds"
EVERY_S = 1.0


def is_cpu() -> bool:
    """True when the vLLM that is installed is its CPU build."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def check_engine(config: RunConfig, spec: AdapterSpec) -> None:
    """Raises ConfigError for engine settings that vLLM does not know, or cannot serve these
    adapters with."""
    check_passed_on(config)
    check_speculation(config, spec.shape, cpu=vllm_on_cpu())
    if config.rollout.temperature > HIGHEST_TEMPERATURE:
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature:g} is above what vLLM samples with; "
            f"use {HIGHEST_TEMPERATURE:g} or less"
        )
    if config.rollout.fully_sharded and slot_rank(spec) % config.rollout.tp:
        raise ConfigError(
            f"rollout.fully_sharded=true cuts adapter slots, here of rank {slot_rank(spec)}, over "
            f"rollout.tp={config.rollout.tp} ranks, which do not divide it; use another rank or "
            f"leave rollout.fully_sharded out"
        )
    slots = config.refit.mode == "adapter" and not vllm_on_cpu()
    if slots and (why := too_large_for_experts(spec, config.rollout)):
        raise ConfigError(why)
    if config.trainer.dtype == "float32" and not vllm_on_cpu():
        _check_float32(config, spec)
    gpus, ranks = config.rollout.gpus_per_engine, config.rollout.ranks
    if gpus is not None and gpus < ranks and ranks > 1 and not vllm_on_cpu():
        raise ConfigError(
            f"rollout.gpus_per_engine={gpus:g} is less than the {ranks} ranks of an engine "
            f"(rollout.tp={config.rollout.tp}, rollout.dp={config.rollout.dp}), each of which has "
            "a GPU of its own; leave it out, and set placement.mode=colocated for ranks that share "
            "theirs with the trainer's"
        )
    if spec.shape.moe_layers and not config.rollout.prefix_caching and not vllm_on_cpu():
        raise ConfigError(
            "rollout.prefix_caching=false, and vLLM records the routes of a MoE model on GPUs with "
            "prefix caching alone; leave it out"
        )
    if config.placement.gives_back == "weights" and vllm_on_cpu():
        raise ConfigError(
            "placement.gives_back=weights moves weights from GPUs to the host's memory, and vLLM's "
            "CPU build, which is what is installed here, has them there; use "
            "placement.gives_back=cache"
        )
    transports.check(config.refit)
    if config.refit.transport == "cuda_ipc" and vllm_on_cpu():
        raise ConfigError(
            "refit.transport=cuda_ipc maps memory of a trainer's GPU into engines on GPUs, and "
            "vLLM's CPU build is what is installed here; use refit.transport=auto"
        )
    if config.rollout.enforce_eager and vllm_on_cpu():
        raise ConfigError(
            "rollout.enforce_eager=true has no effect with vLLM's CPU build, which is what is "
            "installed here: it has neither torch.compile nor CUDA graphs; leave it out"
        )


def _check_float32(config: RunConfig, spec: AdapterSpec) -> None:
    """Raises ConfigError where engines on GPUs cannot compute in float32: of MLA one would say so
    as it starts, of adapters (`lora_shrink`) and gated DeltaNet at the first request."""
    if kernels := kernels_of_16_bits(spec, config.refit.mode == "adapter"):
        way_out = ", or refit.mode=merged" if kernels == "adapters" else ""
        raise ConfigError(
            "trainer.dtype=float32 is the dtype of the engines, too, and vLLM's kernels of "
            f"{kernels} on GPUs take 16 bits alone; use trainer.dtype=bfloat16{way_out}"
        )


def kernels_of_16_bits(spec: AdapterSpec, slots: bool) -> str | None:
    """Which of vLLM's kernels on GPUs, that the model wants, take 16 bits alone; None: none does.
    `slots`: whether adapters are served in slots."""
    if spec.shape.family.attention == "mla":
        return "MLA"
    if spec.shape.linear_layers:
        return "gated DeltaNet"
    return "adapters" if slots else None


def check_cpu_build(command: str) -> None:
    """Raises ConfigError where a command that compares in float32 has no engine that computes so
    with adapters."""
    if not vllm_on_cpu():
        raise ConfigError(
            f"{command} compares in float32, beside a trainer on the CPU, and vLLM's kernels of "
            "adapters on GPUs take 16 bits alone: it needs vLLM's CPU build, in an environment "
            "that `make setup` makes without GPU=1. On GPUs `lora-moe-rl verify refit` compares, "
            "in bfloat16"
        )


def check_quantised(config: RunConfig, form: str | None) -> None:
    """Raises ConfigError for settings with which a quantised base would be served as another one,
    or not at all. `form`: int4, fp8, or None."""
    if config.trainer.fp8_forward == "engine" and form != "fp8":
        raise ConfigError(
            "trainer.fp8_forward=engine has no effect: it is for linears that the checkpoint has "
            f"in FP8, and this base is {form or 'not quantised'}; leave it out"
        )
    fused = config.trainer.device != "cpu" and installed("transformer-engine") is not None
    if config.trainer.fp8_forward == "engine" and fused:
        raise ConfigError(
            "trainer.fp8_forward=engine rounds what linears read, and Transformer Engine, which is "
            "installed here, normalises and multiplies in one; leave it out, or train without "
            "Transformer Engine"
        )
    if form is None:
        return
    backend = config.rollout.engine_args.get("moe_backend")
    if form == "int4" and backend is not None:
        raise ConfigError(
            f"rollout.engine_args.moe_backend={backend} is set by the run itself, and the base is "
            "int4: what else vLLM has for it never reads an adapter; leave it out"
        )
    if config.refit.mode == "merged":
        raise ConfigError(
            f"refit.mode=merged writes merged weights into the engine, and the base is {form}: "
            "merged weights would have to be quantised anew; use refit.mode=adapter, or numbers: "
            f"{quantised.AS_NUMBERS}"
        )
    if config.adapter.starts_from_base:
        raise ConfigError(
            f"adapter.init={config.adapter.init} starts from the base's own weights in a float "
            f"dtype, and the base is {form}; use adapter.init=kaiming, or numbers: "
            f"{quantised.AS_NUMBERS}"
        )
    if form == "fp8" and os.environ.get(E8M0_VARIABLE, "0") not in ("", "0"):
        raise ConfigError(
            f"{E8M0_VARIABLE}={os.environ[E8M0_VARIABLE]} is set, and the base is fp8: vLLM would "
            "quantise its dense weights anew with scales that are powers of two, and serve other "
            "numbers than are trained on; unset it"
        )


def serving_dtype(config: RunConfig, cpu: bool) -> Dtype:
    """Dtype of the engine's base weights and adapter slots: the trainer's."""
    if config.trainer.dtype != "auto":
        return config.trainer.dtype
    return "float32" if cpu else "bfloat16"


def prepare(config: RunConfig) -> bool:
    """Imports what comes before all else in an engine's process, and prepares its environment.
    Returns whether vLLM is its CPU build. Raises ConfigError when vLLM is not the version we
    know."""
    import_transformers()
    import_vllm()
    cpu = is_cpu()
    prepare_environment(config, cpu)
    return cpu


def prepare_environment(config: RunConfig, cpu: bool) -> None:
    """Sets what vLLM reads from the environment, for this process and those it starts."""
    os.environ |= environment(config.rollout, cpu)


def environment(config: RolloutConfig, cpu: bool) -> dict[str, str]:
    """What vLLM and our plug-in in it read from the environment. Raises ConfigError when the
    plug-in is not installed, which vLLM's CPU build needs."""
    variables = {ENGINE_VARIABLE: "1", RANKS_VARIABLE: str(config.dp)}
    if not cpu:
        return variables | {
            **FP8_VARIABLES,
            # By default vLLM forks where this process has not used its GPU. Where it has computed
            # on several cores, the forked one waits for ever for threads that it does not have.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
    if not entry_points(group="vllm.general_plugins", name="lora_moe_rl"):
        raise ConfigError(
            "vLLM's CPU build needs our plug-in, but the package lora_moe_rl is not installed in "
            "this environment: run `make setup`"
        )
    return variables | {
        "OMP_NUM_THREADS": str(config.cpu_threads),
        # Not bound to cores, as vLLM does by default: several engines would share the first one.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V2 runner needs Triton
        # A few helpers are compiled at their first call, for seconds; with LoRA the model is not.
        "TORCHDYNAMO_DISABLE": "1",
        # Threads that wait for work sleep at once. Otherwise they spin, and where the trainer's
        # processes share the cores a rollout of 0.3 s was seen to take 16 s.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def fork_processes(config: RunConfig) -> None:
    """vLLM's CPU processes come of this one by a fork, where they can. Imports what they need."""
    from lora_moe_rl.rollout import forked

    forked.install(config.rollout.cpu_threads)


def engine_args(
    config: RunConfig, spec: AdapterSpec, model_dir: str, index: int, cpu: bool
) -> dict[str, Any]:
    """Keywords of vLLM's AsyncEngineArgs. Raises ConfigError for one in rollout.engine_args that is
    set here."""
    dtype = serving_dtype(config, cpu)
    args: dict[str, Any] = {
        "model": model_dir,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # not the model's own sampling defaults
        "dtype": dtype,
        "seed": config.seed + index,
        "max_model_len": config.model.max_length,
        "max_num_seqs": config.rollout.max_num_seqs,
        "tensor_parallel_size": config.rollout.tp,
        "data_parallel_size": config.rollout.dp,
        "enable_expert_parallel": config.rollout.ep,
        "gpu_memory_utilization": config.rollout.gpu_memory_utilization,
        # vLLM keeps states of linear attention only where prompts are computed in chunks, as they
        # are not on the CPU.
        "enable_prefix_caching": (
            config.rollout.prefix_caching and not (cpu and spec.shape.linear_layers)
        ),
        "enforce_eager": config.rollout.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "enable_return_routed_experts": bool(spec.shape.moe_layers),
        "disable_log_stats": True,
        "additional_config": _additional(config, cpu),
    }
    args |= _language_args(spec) | speculation.engine_args(config)
    if not cpu and _is_triton_delta(spec):
        args["gdn_prefill_backend"] = "triton"
    if config.placement.colocated and not cpu:
        args["enable_sleep_mode"] = True  # what it gives back is allocated so that it can be
    if config.refit.mode == "merged":
        args["worker_extension_cls"] = "lora_moe_rl.refit.merged.MergedReceiver"
    else:
        args |= _lora_args(config, spec)
        if not cpu and _is_int4(model_dir):
            args["moe_backend"] = INT4_MOE_BACKEND
    if config.rollout.tp > 1:
        # The engine's own node has all its ranks. Unasked, vLLM has Ray start them where a
        # placement group is at hand, which the CPU build refuses.
        args["distributed_executor_backend"] = "mp"
    if config.rollout.dp > 1:
        args["max_num_batched_tokens"] = step_tokens(config.rollout)
    if cpu:
        args |= _cpu_args(config, spec)
    return with_passed_on(args, config)


def _is_triton_delta(spec: AdapterSpec) -> bool:
    """Whether Triton's kernel alone computes this delta rule. By itself vLLM takes FlashInfer's
    for all of them on an H100, and an engine would end at its first request."""
    if not spec.shape.linear_layers:
        return False
    heads = {spec.shape.dims["linear_key_dim"], spec.shape.dims["linear_value_dim"]}
    return heads != FLASHINFER_HEADS


def _language_args(spec: AdapterSpec) -> dict[str, Any]:
    """Of a language model inside a larger one: vLLM's class of the language model by itself. Tells
    the plug-in of vLLM's processes, which read it from the environment, what else is there."""
    inside = spec.shape.family.inside
    os.environ[LEFT_OUT_VARIABLE] = "" if inside is None else ",".join(inside.left_out)
    return {} if inside is None else {"hf_overrides": {"architectures": [inside.architecture]}}


def _additional(config: RunConfig, cpu: bool) -> dict[str, Any]:
    """What our plug-in in vLLM's processes is told. Requests that go on from all their tokens under
    the next version hand each on at once."""
    said: dict[str, Any] = {}
    if config.schedule.in_flight != "continue":
        said[GATHER_SECONDS] = EVERY_S
    if cpu and config.trainer.fp8_forward == "engine":
        said[FP8_ACTIVATIONS] = True
    return said


def _is_int4(model_dir: str) -> bool:
    path = Path(model_dir) / "config.json"
    return path.is_file() and quantised.form(read_json(path)) == "int4"


def held_args(folder: str | None) -> dict[str, Any]:
    """More keywords, where the base is held in `folder` for the trainer too. Tells the plug-in of
    vLLM's processes, which read it from the environment."""
    if folder is None:
        return {}
    os.environ[HELD_VARIABLE] = "1"
    from lora_moe_rl.base import loader

    return loader.engine_args(folder)


def _lora_args(config: RunConfig, spec: AdapterSpec) -> dict[str, Any]:
    modules = {served_module(spec.shape, site)[0].rpartition(".")[2] for site in spec}
    return {
        "enable_lora": True,
        "max_loras": config.refit.slots,
        "max_cpu_loras": config.refit.slots,
        "max_lora_rank": slot_rank(spec),
        "fully_sharded_loras": config.rollout.fully_sharded,
        # A slot has what all experts share once, as the plan counts it, and not for each expert.
        "enable_moe_shared_loras": any(site.shared for site in spec),
        "lora_dtype": "auto",  # the dtype of the base
        "lora_target_modules": sorted(modules),
        "worker_extension_cls": "lora_moe_rl.refit.receiver.Receiver",
    }


def _cpu_args(config: RunConfig, spec: AdapterSpec) -> dict[str, Any]:
    args: dict[str, Any] = {
        "enforce_eager": True,
        "async_scheduling": False,
        # A seeded request that is prefilled in chunks crashes vLLM 0.31 here: "CPU Generator does
        # not use offset". Without chunks, the longest prompt must fit into one step.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.model.max_length, CPU_STEP_TOKENS),
        "kv_cache_memory_bytes": int(config.rollout.cpu_kv_cache_gib * GIB),
    }
    if config.rollout.tp == 1:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        # As a class, not by its name "uni", which vLLM's CPU platform turns into "mp": a process
        # more to start, and one more exchange of messages for every token.
        args["distributed_executor_backend"] = UniProcExecutor
    if spec.shape.family.attention == "mla":
        # vLLM 0.31's C++ CPU rotary op is wrong for MLA's 3-D input; the torch one is right.
        args["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    return args
