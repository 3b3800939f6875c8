"""vLLM's entry point `vllm.general_plugins`: runs in every vLLM process before anything else.

It does nothing unless the process belongs to one of our engines. There `gathered_outputs` and
`gathered_requests` spare what streaming costs, and a message a request; `one_by_one` lets stop
strings end a sample where several tokens are sampled at once. Where an engine's experts
are spread over data-parallel ranks, vLLM loses adapters: `dp_lora` mends that. `left_out` passes
over weights of a checkpoint that are not the language model's; `config_types` knows model types
that transformers does not. Its GPU build needs no other mend; its CPU build lacks twelve things,
each mended in a file of its own:

    cpu_lora     LoRA on linears, right in batches that mix adapters and the base
    cpu_delta    gated DeltaNet in float32
    cpu_experts  LoRA on routed experts; experts shared out to ranks
    cpu_int4     LoRA on routed experts that are INT4
    cpu_mxfp4    LoRA on routed experts that are MXFP4
    cpu_fp8      FP8 bases, with LoRA
    cpu_routes   recording of router decisions
    cpu_drafts   each request's temperature for the tokens that are proposed
    cpu_cache    giving the cache of keys and values back
    cpu_router   sigmoid scores, and corrections of a softmax, without groups of experts
    cpu_dp       experts over data-parallel ranks
    cpu_vision   models of text and images without torchvision

There it also gets a load format, for a base that the trainer holds too (base/loader.py); on GPUs
where it does.
"""

from __future__ import annotations

import gc
import os
from multiprocessing.util import Finalize

ENGINE_VARIABLE = "LORA_MOE_RL_ENGINE"
RANKS_VARIABLE = "LORA_MOE_RL_ENGINE_DP"  # data-parallel ranks of the engine
LEFT_OUT_VARIABLE = "LORA_MOE_RL_ENGINE_LEFT_OUT"  # of names of weights, with commas between
HELD_VARIABLE = "LORA_MOE_RL_ENGINE_HELD"  # whether the trainer holds its base too


def register() -> None:
    if os.environ.get(ENGINE_VARIABLE) != "1":
        return
    keep_no_semaphore()
    collect_nothing_at_the_end()
    from vllm.platforms import current_platform

    from lora_moe_rl.models import config_types
    from lora_moe_rl.rollout import (
        draft_config,
        gathered_outputs,
        gathered_requests,
        one_by_one,
    )

    config_types.register()
    gathered_outputs.install()
    gathered_requests.install()
    one_by_one.install()
    draft_config.install()
    if os.environ.get(RANKS_VARIABLE, "1") != "1":
        from lora_moe_rl.rollout import dp_lora

        dp_lora.install()
    if prefixes := os.environ.get(LEFT_OUT_VARIABLE):
        from lora_moe_rl.rollout import left_out

        left_out.install(tuple(prefixes.split(",")))
    if not current_platform.is_cpu():
        if os.environ.get(HELD_VARIABLE) == "1":
            from lora_moe_rl.base import loader

            loader.install()
        return
    from lora_moe_rl.base import loader
    from lora_moe_rl.rollout import (
        cpu_cache,
        cpu_delta,
        cpu_dp,
        cpu_drafts,
        cpu_experts,
        cpu_fp8,
        cpu_int4,
        cpu_lora,
        cpu_mxfp4,
        cpu_router,
        cpu_routes,
        cpu_vision,
    )

    cpu_lora.install()
    cpu_delta.install()
    cpu_experts.install()
    cpu_int4.install()
    cpu_mxfp4.install()
    cpu_fp8.install()
    cpu_routes.install()
    cpu_drafts.install()
    cpu_cache.install()
    cpu_router.install()
    cpu_dp.install()
    cpu_vision.install()
    loader.install()


def collect_nothing_at_the_end() -> None:
    """An engine that fails to start leaves contexts of zmq with open sockets, each of which waits
    for them for ever where it is collected (`Context.__del__`). A forked process ends before that.
    In one that is spawned, as on GPUs, Ray imports modules at the end, which collects, and zmq's
    own `atexit` comes later: the run would wait for an engine that has failed, until its time is
    up."""
    Finalize(None, gc.disable, exitpriority=0)


def keep_no_semaphore() -> None:
    """tqdm's lock between processes is a semaphore with a name, which stays in shared memory when
    vLLM's process is killed; each of our engines draws its bars in one process."""
    from tqdm.std import TqdmDefaultWriteLock

    TqdmDefaultWriteLock.mp_lock = None  # pyright: ignore[reportAttributeAccessIssue]
