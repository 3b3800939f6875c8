"""Mend for vLLM on the CPU: recording of router decisions.

vLLM records them in its V2 model runner (`vllm/v1/worker/gpu/model_runner.py`), which needs Triton;
the CPU has the V1 runner (`vllm/v1/worker/cpu_model_runner.py`). Here that runner is given the same
connector (`vllm/distributed/aux_output_connector/`), called at the same points of a step:

    begin_step      before the forward, with the scheduler's view of the requests
    prepare_output  after it: a snapshot of the rows that were captured
    process_output  once the tokens are sampled

The stock check of the config insists on the V2 runner and on prefix caching, which the CPU's MLA
attention does not have; all its other refusals stay. Without prefix caching no block of routes ever
gets a key and moves on to the connector's store: the buffer must hold all tokens in flight.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
from vllm.distributed.aux_output_connector.worker import (
    AuxOutputWorkerConnector,
    PendingAuxOutput,
    get_aux_output_connector,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from lora_moe_rl.rollout import draft_config
from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/rollout/cpu_routes.py"

stock_execute_model = CPUModelRunner.execute_model
stock_sample_tokens = CPUModelRunner.sample_tokens


class RouteRecorder:
    """Drives the connector of one model runner."""

    def __init__(self, runner: CPUModelRunner):
        self.runner = runner
        self.connector = get_aux_output_connector(
            runner.get_model(), runner.vllm_config, runner.kv_cache_config
        )
        if not runner.vllm_config.cache_config.enable_prefix_caching:
            self.connector._buffer = _buffer_of_all_tokens(runner, self.connector._buffer)
        self.pending: PendingAuxOutput | None = None
        self.drafts: np.ndarray | None = None

    def begin(self, scheduler_output) -> None:
        self.connector.begin_step(scheduler_output.aux_output_connector_metadata)

    def snapshot(self, scheduler_output) -> None:
        """Takes the rows of the forward that just ran, in the runner's own batch order."""
        if not scheduler_output.total_num_scheduled_tokens:
            return
        batch = self.runner.input_batch
        requests = list(batch.req_ids)
        counts = [scheduler_output.num_scheduled_tokens[request] for request in requests]
        drafted = scheduler_output.scheduled_spec_decode_tokens
        self.drafts = np.array([len(drafted.get(request, ())) for request in requests])
        self.pending = self.connector.prepare_output(
            SimpleNamespace(
                req_ids=requests,
                query_start_loc_np=np.concatenate(([0], np.cumsum(counts))),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(requests)].copy(),
            )
        )

    def finish(self, output):
        """Adds the routes of the step to the runner's output."""
        pending, self.pending = self.pending, None
        if pending is None:
            return output
        requests = pending.request_ids
        assert list(output.req_ids[: len(requests)]) == requests, "the batch order has changed"
        sampled = [len(tokens) for tokens in output.sampled_token_ids] or [0] * len(requests)
        # Of a draft of k tokens those that were taken are sampled, and one more.
        rejected = np.where(self.drafts > 0, self.drafts + 1 - np.asarray(sampled), 0)
        pending.enqueue_cpu_copy(np.asarray(sampled), rejected)
        output.aux_output_connector_output = pending.process_output()
        return output


def _buffer_of_all_tokens(
    runner: CPUModelRunner, stock: RoutedExpertsBuffer | None
) -> RoutedExpertsBuffer | None:
    """A buffer as large as the KV cache, which bounds the tokens in flight."""
    if stock is None:  # only the first worker of a tensor-parallel group keeps routes
        return None
    config = runner.vllm_config
    tokens = runner.kv_cache_config.num_blocks * config.cache_config.block_size
    return RoutedExpertsBuffer(
        stock.dtype,
        stock.shape_per_token,
        stock.block_size,
        config.scheduler_config.max_num_seqs,
        tokens,
        config.max_concurrent_batches,
    )


def _recorder(runner: CPUModelRunner) -> RouteRecorder | None:
    """The runner's recorder, made at its first step: the KV cache must be there."""
    if not runner.vllm_config.aux_output_config.enabled:
        return None
    if "route_recorder" not in runner.__dict__:
        runner.route_recorder = RouteRecorder(runner)
    return runner.route_recorder


def _execute_model(self, scheduler_output, *args, **kwargs):
    recorder = _recorder(self)
    if recorder is None:
        return stock_execute_model(self, scheduler_output, *args, **kwargs)
    recorder.begin(scheduler_output)
    output = stock_execute_model(self, scheduler_output, *args, **kwargs)
    recorder.snapshot(scheduler_output)
    return output if output is None else recorder.finish(output)


def _sample_tokens(self, *args, **kwargs):
    output = stock_sample_tokens(self, *args, **kwargs)
    recorder = _recorder(self)
    return output if recorder is None or output is None else recorder.finish(output)


def _verify(self) -> None:
    """The stock check, as if the V2 runner and prefix caching were there."""
    view = SimpleNamespace(**vars(self))
    view.use_v2_model_runner = True
    view.cache_config = SimpleNamespace(enable_prefix_caching=True)
    draft_config.verify(view)


def install() -> None:
    """Gives the CPU model runner its recorder."""
    require_version("vllm", WHO)
    require_parameters(stock_execute_model, ("self", "scheduler_output"), WHO)
    require_parameters(
        RoutedExpertsBuffer.__init__,
        ("self", "dtype", "shape_per_token", "block_size", "max_num_seqs")
        + ("max_num_batched_tokens", "max_concurrent_batches"),
        WHO,
    )
    require_attributes(
        AuxOutputWorkerConnector, ("begin_step", "prepare_output", "process_output"), WHO
    )
    CPUModelRunner.execute_model = _execute_model
    CPUModelRunner.sample_tokens = _sample_tokens
    VllmConfig._verify_aux_output_compatibility = _verify
