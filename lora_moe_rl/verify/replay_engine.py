"""A vLLM engine in this process, stepped by hand: its own scheduler, runner and route recorder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.data.samples import Sample
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.parts import STORAGE, Dtype, PartLayout, part_layouts, to_json
from lora_moe_rl.refit.plan import Box, EngineLayout, make_plan
from lora_moe_rl.rollout import device as engine_device
from lora_moe_rl.rollout import outputs
from lora_moe_rl.rollout.facts import slot_rank
from lora_moe_rl.rollout.in_flight import Piece
from lora_moe_rl.router_replay.table import RouteTable

if TYPE_CHECKING:
    from lora_moe_rl.refit.sender import Sender

VERSION = 0
RPC_S = 120


def prepare_process(config: RunConfig) -> None:
    """Prepares this process to hold engines of the CPU: before anything that imports torch, if
    possible."""
    engine_device.prepare_environment(config, cpu=True)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    torch.set_num_threads(config.rollout.cpu_threads)  # what was imported before read no variable


def samples_and_routes(
    answers: Sequence[Any], shape: ModelShape
) -> tuple[list[Sample], RouteTable]:
    """Samples and routes as a rollout engine makes them of vLLM's answers, without texts."""
    pieces = [
        [Piece(answer.prompt_token_ids, output, VERSION, recorded=0)]
        for answer in answers
        for output in answer.outputs
    ]
    return outputs.samples_and_routes(pieces, _NoText(), shape)


class _NoText:
    """Stands in place of a tokenizer."""

    def batch_decode(self, token_ids: Sequence, skip_special_tokens: bool = False) -> list[str]:
        return [""] * len(token_ids)


def sender_of(
    config: RunConfig, spec: AdapterSpec, dtype: Dtype, tensors: Mapping[str, np.ndarray]
) -> tuple[list[PartLayout], Sender]:
    """What sends a whole canonical adapter from this process, as a trainer of one rank does, and
    what an engine of this config is told to expect. Its shared memory lasts as long as it."""
    import torch

    from lora_moe_rl.refit.sender import Sender
    from lora_moe_rl.refit.transports import shm

    engine = EngineLayout.of(config.rollout, slot_rank(spec), merged=False)
    plan = make_plan(spec, TrainerConfig(), engine, STORAGE[dtype].itemsize)
    (layout,) = layouts = part_layouts(plan, spec, dtype)
    held = {
        name: [(Box((0,) * tensor.ndim, tensor.shape), torch.from_numpy(tensor))]
        for name, tensor in tensors.items()
    }
    scales = {site.name: site.scale for site in spec}
    return layouts, Sender(layout, held, scales, shm.Outgoing())


class SteppedEngine:
    """vLLM started as a rollout engine starts it, with `changes` to its arguments."""

    def __init__(self, config: RunConfig, spec: AdapterSpec, model_dir: Path, **changes: Any):
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.config, self.spec = config, spec
        cpu = engine_device.is_cpu()
        self.dtype: Dtype = engine_device.serving_dtype(config, cpu)
        args = engine_device.engine_args(config, spec, str(model_dir), 0, cpu)
        args |= {"disable_log_stats": False} | changes  # its counters are the proof
        # Requests are ended early here, and go on from all their tokens.
        args["additional_config"].pop(engine_device.GATHER_SECONDS, None)
        vllm_config = EngineArgs(**args).create_engine_config()
        # vLLM's CPU platform has just asked for spawn: each worker would import everything anew.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self.llm = LLMEngine.from_vllm_config(vllm_config)
        self.caches_prefixes = self.llm.vllm_config.cache_config.enable_prefix_caching
        self.chunks_prompts = self.llm.vllm_config.scheduler_config.enable_chunked_prefill
        self.requests = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, adapter: bool = False
    ) -> list[Any]:
        """The final output of each request, all at once in the engine."""
        return self.run([self.submit(prompt, params, adapter) for prompt in prompts])

    def submit(self, prompt: Sequence[int], params: Any, adapter: bool = False) -> str:
        """vLLM's name of the request. `adapter`: under the version that `publish` took."""
        from vllm.lora.request import LoRARequest

        from lora_moe_rl.refit.slots import lora_id

        lora = LoRARequest("verify", lora_id(VERSION), lora_path="in memory") if adapter else None
        self.requests += 1
        return self.llm.add_request(
            str(self.requests),
            {"prompt_token_ids": [int(token) for token in prompt]},
            params,
            lora_request=lora,
        )

    def run(self, names: Sequence[str]) -> list[Any]:
        """Steps until these requests have ended."""
        done: dict[str, Any] = {}
        states = self.llm.output_processor.request_states
        external = {states[name].external_req_id: name for name in names}
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                if output.finished and output.request_id in external:
                    done[external[output.request_id]] = output
        return [done[name] for name in names]

    def abort(self, name: str) -> Any:
        """Ends a request as `AsyncLLM.abort` does; its output until then."""
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.output_processor import RequestOutputCollector

        state = self.llm.output_processor.request_states[name]
        state.queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, name)
        self.llm.abort_request([name], internal=True)
        return state.queue.get_nowait()

    def counter(self, name: str) -> int:
        """One of vLLM's own counters, as vllm:num_preemptions."""
        values = [metric.value for metric in self.llm.get_metrics() if metric.name == name]
        if not values:
            raise RuntimeError(f"vLLM has no counter {name} any more")
        return int(sum(values))

    def publish(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Serves a whole canonical adapter, by the way of a refit."""
        layouts, self.sender = sender_of(self.config, self.spec, self.dtype, tensors)
        sent = json.dumps([asdict(self.sender.send(VERSION))])
        self._workers("refit_prepare", to_json(layouts))
        self._workers("refit_stage", VERSION, sent)
        self._workers("refit_commit", VERSION)

    def _workers(self, method: str, *args: Any) -> None:
        for answer in self.llm.collective_rpc(method, timeout=RPC_S, args=args):
            if "error" in answer:
                raise RefitError(answer["error"])
