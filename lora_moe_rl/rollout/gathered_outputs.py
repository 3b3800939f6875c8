"""Mend for vLLM: what requests have sampled is handed on once a second, or when they end.

vLLM's core sends each token of each request to its front as an output of its own, with arrays for
its logprobs and its routes (`vllm/v1/core/sched/scheduler.py`). That is for clients that stream; we
ask for whole answers (RequestOutputKind.FINAL_ONLY), and the front only puts them together again.
Here the scheduler does so: an output of several tokens is what vLLM itself sends with speculative
decoding, and its front takes it as it takes one token.

    stock      t0 │ t1 │ t2 │ t3+end          an output a step
    here            t0 t1 t2 t3+end           one

What is handed on is equal. Requests that do stream are left as they are, and so are those with stop
strings, which the front looks for (rollout/stop_strings.py). A front that ends a
request early has not seen its last second, so that engines whose requests are to go on from all
their tokens (schedule.in_flight=continue) do not gather.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from lora_moe_rl.rollout.device import GATHER_SECONDS
from lora_moe_rl.upstream.checks import require_attributes, require_parameters, require_version

WHO = "lora_moe_rl/rollout/gathered_outputs.py"

# What is put together from all outputs of a request, and what the last one may say alone.
JOINED = ("new_token_ids", "new_logprobs", "routed_experts", "events", "prefill_stats")
OF_LAST = ("request_id", "trace_headers", "num_nans_in_logits")
OTHERS = tuple(set(EngineCoreOutput.__struct_fields__) - {*JOINED, *OF_LAST})

stock_update = Scheduler.update_from_output


class Gathered:
    """Outputs of one scheduler's requests that have not been handed on; all are, every `seconds`
    seconds."""

    def __init__(self, seconds: float):
        self.seconds, self.handed_on = seconds, time.monotonic()
        self.kept: dict[str, list[EngineCoreOutput]] = {}

    def of_step(
        self, outputs: Sequence[EngineCoreOutput], there: Mapping[str, Any]
    ) -> list[EngineCoreOutput]:
        """What is handed on after a step that gave `outputs`, one a request. `there`: the
        scheduler's requests after that step, without those that it has ended."""
        all_of_them = time.monotonic() - self.handed_on >= self.seconds
        if all_of_them:
            self.handed_on = time.monotonic()
        ready = []
        for output in outputs:
            if all_of_them or not may_wait(output, there):
                ready.append(joined([*self.kept.pop(output.request_id, ()), output]))
            else:
                self.kept.setdefault(output.request_id, []).append(output)
        if len(self.kept) > len(there):  # some were ended from outside: nobody waits for theirs
            self.kept = {name: kept for name, kept in self.kept.items() if name in there}
        return ready


def may_wait(output: EngineCoreOutput, there: Mapping[str, Any]) -> bool:
    """Whether it says nothing but tokens and what belongs to each of them, not even an end, to a
    front that wants the whole answer, and looks for nothing in it."""
    if any(getattr(output, name) is not None for name in OTHERS):
        return False
    params = there[output.request_id].sampling_params
    return params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop


def joined(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """One output for all of a request's, oldest first: its last one, changed."""
    last = parts[-1]
    if len(parts) > 1:
        last.new_token_ids = [token for part in parts for token in part.new_token_ids]
        last.new_logprobs = _logprobs([part.new_logprobs for part in parts])
        routes = [part.routed_experts for part in parts if part.routed_experts is not None]
        last.routed_experts = np.concatenate(routes) if routes else None
        last.events = [event for part in parts for event in part.events or ()] or None
        last.prefill_stats = next(filter(None, (part.prefill_stats for part in parts)), None)
    return last


def _logprobs(parts: Sequence[LogprobsLists | None]) -> LogprobsLists | None:
    """Of each token its own logprob and then those of the likeliest, as far as every part has them:
    in a step with requests that ask for more of these, all have as many."""
    there = [part[:3] for part in parts if part is not None]
    if not there:
        return None
    columns = min(ids.shape[1] for ids, _, _ in there)
    cut = [(ids[:, :columns], values[:, :columns], ranks) for ids, values, ranks in there]
    return LogprobsLists(*map(np.concatenate, zip(*cut)))


def _update(self: Scheduler, *args: Any, **kwargs: Any) -> dict[int, Any]:
    found = stock_update(self, *args, **kwargs)
    gathered: Gathered | None = self.__dict__.get("gathered")
    if gathered is None:
        return found
    for outputs in found.values():
        outputs.outputs = gathered.of_step(outputs.outputs, self.requests)
    return {client: one for client, one in found.items() if one.outputs or _says_more(one)}


def _says_more(outputs: Any) -> bool:
    return outputs.scheduler_stats is not None or bool(outputs.finished_requests)


def install() -> None:
    """Makes schedulers gather, of engines whose config says so."""
    require_version("vllm", WHO)
    require_parameters(stock_update, ("self", "scheduler_output", "model_runner_output"), WHO)
    require_attributes(VllmConfig, ("additional_config",), WHO)
    if Scheduler.update_from_output is _update:
        return  # installed already: a process may load its plugins twice
    stock_init = Scheduler.__init__

    def init(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        seconds = self.vllm_config.additional_config.get(GATHER_SECONDS)
        if seconds is not None:
            self.__dict__["gathered"] = Gathered(seconds)

    Scheduler.__init__ = init
    Scheduler.update_from_output = _update
