"""Mend for vLLM: a request with stop strings hands its tokens on one by one, also where several are
sampled in one forward (speculative decoding).

vLLM's front looks for stop strings in the text of each output, and where it finds one it cuts the
text, but not the tokens (`vllm/v1/engine/output_processor.py`): an output of several tokens would
leave those after the match in the sample, and they would be trained on. Once it has found one, it
passes over what else comes of the request.

    stock   t4 t5=match t6 t7     the sample ends with t7
    here    t4 │ t5=match │ …     the sample ends with t5
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput

from lora_moe_rl.rollout.gathered_outputs import JOINED, stock_update
from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "lora_moe_rl/rollout/one_by_one.py"
OF_FIRST = ("events", "prefill_stats")
OF_EACH = ("new_token_ids", "new_logprobs", "routed_experts")
assert {*OF_FIRST, *OF_EACH} == {*JOINED}


def apart(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """An output for each of its tokens, oldest first: the last one is it, changed. Of its rows of
    routes the last ones belong to a token each, and those before them to the first."""
    tokens, logprobs, routes = (getattr(output, name) for name in OF_EACH)
    count = len(tokens)
    if count < 2:
        return [output]
    found = [EngineCoreOutput(output.request_id, [token]) for token in tokens[:-1]] + [output]
    output.new_token_ids = tokens[-1:]
    for i, one in enumerate(found):
        one.trace_headers = output.trace_headers
        if logprobs is not None:
            one.new_logprobs = logprobs.slice_request(i, 1)
        if routes is not None:
            before = len(routes) - count
            assert before >= 0, "there are fewer routes than tokens"
            one.routed_experts = routes[before + i if i else 0 : before + i + 1]
    for name in OF_FIRST:
        value = getattr(output, name)
        setattr(output, name, None)
        setattr(found[0], name, value)
    return found


def install() -> None:
    """Of schedulers whose engine guesses tokens."""
    require_version("vllm", WHO)
    require_parameters(stock_update, ("self", "scheduler_output", "model_runner_output"), WHO)
    if getattr(Scheduler.__init__, "hands_on_one_by_one", False):
        return  # installed already: a process may load its plugins twice
    stock_init = Scheduler.__init__

    def init(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        if self.vllm_config.speculative_config is not None:
            inner = self.update_from_output
            self.update_from_output = lambda *given: _update(self, inner, *given)

    init.hands_on_one_by_one = True  # pyright: ignore[reportFunctionMemberAccess]
    Scheduler.__init__ = init


def _update(self: Scheduler, inner: Any, scheduler_output: Any, sampled: Any) -> dict[int, Any]:
    requests = map(self.requests.get, scheduler_output.num_scheduled_tokens)
    watched = {one.request_id for one in requests if one is not None and _stops(one)}
    found = inner(scheduler_output, sampled)
    for outputs in found.values() if watched else ():
        outputs.outputs = [
            one
            for output in outputs.outputs
            for one in (apart(output) if output.request_id in watched else [output])
        ]
    return found


def _stops(request: Any) -> bool:
    """Whether the front looks for stop strings in it."""
    return request.sampling_params is not None and bool(request.sampling_params.stop)
