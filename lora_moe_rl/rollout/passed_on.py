"""rollout.engine_args: arguments of vLLM's engine that are handed on as they stand, and those that
are not, since a key of ours sets them or a run rests on them. Imports no vLLM."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.keys import value_text
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.upstream.versions import vllm_on_cpu

CLASSES = ("EngineArgs", "AsyncEngineArgs")

# By which key of ours each is set.
OURS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "model_weights": "model.path",
    "hf_config_path": "model.path",
    "revision": "model.revision",
    "code_revision": "model.revision",
    "tokenizer_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "model.max_length",
    "dtype": "trainer.dtype",
    "seed": "seed",
    "max_num_seqs": "rollout.max_num_seqs",
    "tensor_parallel_size": "rollout.tp",
    "data_parallel_size": "rollout.dp",
    "enable_expert_parallel": "rollout.ep",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enable_prefix_caching": "rollout.prefix_caching",
    "enforce_eager": "rollout.enforce_eager",
    "fully_sharded_loras": "rollout.fully_sharded",
    "enable_moe_shared_loras": "adapter.expert_layout",
    "max_loras": "refit.slots",
    "max_cpu_loras": "refit.slots",
    "max_lora_rank": "adapter.rank",
    "lora_target_modules": "adapter.targets",
    "enable_lora": "refit.mode",
    "enable_sleep_mode": "placement.mode",
    "enable_return_routed_experts": "replay.mode",
}

# What each is for, that a run rests on.
FIXED = {
    **dict.fromkeys(
        ("skip_tokenizer_init", "tokens_only", "runner", "convert"), "token ids in, token ids out"
    ),
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logits_processors", "logprobs_mode"),
        "samples, and their logprobs, are of the whole softmax at rollout.temperature",
    ),
    **dict.fromkeys(
        ("worker_cls", "worker_extension_cls", "scheduler_cls", "additional_config", "lora_dtype",
         "weight_transfer_config", "load_format", "model_loader_extra_config", "disable_log_stats",
         "per_request_spec_decode_metrics"),
        "how adapters get into an engine, and samples out of it",
    ),
    **dict.fromkeys(
        ("distributed_executor_backend", "pipeline_parallel_size", "prefill_context_parallel_size",
         "decode_context_parallel_size", "nnodes", "node_rank", "master_addr", "master_port",
         "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local",
         "data_parallel_address", "data_parallel_rpc_port", "data_parallel_hybrid_lb",
         "data_parallel_external_lb", "data_parallel_multi_port_external_lb",
         "data_parallel_backend", "enable_elastic_ep"),
        "where an engine's ranks are, which rollout.tp, rollout.dp and rollout.nodes say",
    ),
    **dict.fromkeys(
        ("expert_placement_strategy", "enable_eplb", "eplb_config"),
        "which rank of an engine has which experts, and takes their adapters",
    ),
    "hf_token": "a secret, which a config would keep; set HF_TOKEN in the environment",
}  # fmt: skip

# Those that are set for vLLM's CPU build alone.
OF_CPU = ("async_scheduling", "enable_chunked_prefill", "max_num_batched_tokens",
          "kv_cache_memory_bytes", "compilation_config")  # fmt: skip


def check_passed_on(config: RunConfig) -> None:
    """Raises ConfigError for an argument that a key of ours sets, that a run rests on, or that the
    installed vLLM does not know."""
    known = known_arguments() if config.rollout.engine_args else ()
    for name, value in config.rollout.engine_args.items():
        given = f"rollout.engine_args.{name}={value_text(value)}"
        if (ours := OURS.get(name)) is not None:
            raise ConfigError(f"{given} is what {ours} says; leave it out, and use that")
        if (what := FIXED.get(name)) is not None:
            raise ConfigError(f"{given} is set by the run itself ({what}); leave it out")
        if name in OF_CPU and vllm_on_cpu():
            raise ConfigError(
                f"{given} is set by the run itself for vLLM's CPU build, which is what is "
                "installed here; leave it out"
            )
        if name == "max_num_batched_tokens" and config.rollout.dp > 1:
            raise ConfigError(
                f"{given} is set by the run itself with rollout.dp={config.rollout.dp}, whose "
                "ranks exchange buffers of one size; leave it out"
            )
        if known and name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see `vllm serve --help=all`"
            raise ConfigError(f"{given}: vLLM's engine takes no such argument; {hint}")


def with_passed_on(args: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """The engine's arguments with those of the config. Raises ConfigError for one that is among
    them already: neither may go unheard."""
    more = config.rollout.engine_args
    for name in more.keys() & args.keys():
        raise ConfigError(
            f"rollout.engine_args.{name}={value_text(more[name])} is set by the run itself, to "
            f"{args[name]!r}; leave it out"
        )
    return {**args, **more}


@contextmanager
def told_of(config: RunConfig) -> Iterator[None]:
    """Around vLLM's start: raises ConfigError with all that it says of a value that it does not
    take, where there are further arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not config.rollout.engine_args:
            raise
        said = " ".join(str(error).split())
        given = value_text(config.rollout.engine_args)
        raise ConfigError(f"vLLM does not start with rollout.engine_args={given}: {said}") from None


@cache
def known_arguments() -> frozenset[str]:
    """The fields of vLLM's engine arguments, read from its source: to import it takes seconds.
    Empty where it is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    source = Path(found.origin).parent / "engine" / "arg_utils.py"
    classes = [one for one in ast.parse(source.read_text()).body if isinstance(one, ast.ClassDef)]
    fields = [one for each in classes if each.name in CLASSES for one in each.body]
    return frozenset(
        one.target.id
        for one in fields
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    )
