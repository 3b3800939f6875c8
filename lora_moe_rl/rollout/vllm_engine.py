"""vLLM's AsyncLLM of one engine: its requests, calls of its workers, its memory; and what it means
when no answer comes.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import DataError, EngineDied, EngineSilent, RefitError
from lora_moe_rl.rollout import dp_ranks
from lora_moe_rl.rollout.in_flight import InFlight

WORKER_GRACE_S = 5.0  # a worker that gives up by itself says more
DEATH_POLL_S = 0.1
DEATH_GRACE_S = 2.0  # within which vLLM tells of the death that an error came from


class VllmEngine:
    """`llm`, once it is there, and what is under way in it."""

    llm: Any
    spec: AdapterSpec

    def __init__(self, config: RunConfig, index: int):
        self.config, self.index = config, index
        self.running: dict[int, int] = {}  # requests in flight, by version
        self.in_flight = InFlight(config.schedule.continued == "split")
        self.ended_requests = 0
        self.request_ids = itertools.count()

    async def give_way(self) -> float:
        """Gives back what placement.gives_back says, of memory that a trainer needs, and returns
        how many GiB its workers hold less then. No request runs, and none comes until `wake`."""
        before = await self._held()
        # With mode="wait" vLLM would not forget recorded routes: it does so only where all is
        # frozen.
        if self.config.placement.gives_back == "weights":
            await self.llm.sleep(1, mode="keep")
        else:
            await self.llm.pause_generation(mode="keep", clear_cache=True)
            await self.llm.release_kv_cache_memory()
        return before - await self._held()

    async def wake(self, what: str) -> None:
        """Has `what` again: weights (slots too), or kv_cache, which is empty. With all of it there
        vLLM takes requests again."""
        await self.llm.wake_up([what])

    async def _held(self) -> float:
        return sum(answer["gib"] for answer in await self._workers("memory_now"))

    async def pulse(self) -> tuple[int, int]:
        """Requests that have ended, and tokens of those that have not: equal as long as vLLM does
        nothing about any."""
        states = self.llm.output_processor.request_states.values()
        tokens = sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer)
        return self.ended_requests, tokens

    async def shutdown(self) -> None:
        """Ends vLLM's processes."""
        self.llm.shutdown()
        del self.llm  # now: at interpreter exit its own clean-up would fail

    async def _request(
        self,
        token_ids: Sequence[int],
        params,
        version: int | None,
        may_end: bool = False,
        cache_salt: str | None = None,
        rank: int | None = None,
        adapter: Any = None,
    ):
        """The final output of one vLLM request, under the version that it counts for. `may_end`:
        early, when requests move on. `adapter`: one of vLLM's own in the version's place.
        `cache_salt`: only requests with an equal one share what the prefix cache holds.
        `rank`: the data-parallel rank that it goes to; None: one that has least to do. Raises
        DataError for ids that the model does not have, which would end vLLM's processes."""
        lora = adapter if version is None else self._lora_request(version)
        ids = self._known(token_ids)
        key = -1 if version is None else version
        name = f"{self.index}-{next(self.request_ids)}"
        where = {} if rank is None else {"data_parallel_rank": rank}
        self.running[key] = self.running.get(key, 0) + 1
        final = None
        # As vLLM's renderer gives it, which has nothing to do here and would do it in a thread.
        prompt: Any = {"type": "token", "prompt_token_ids": ids}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        try:
            with self.in_flight.noted(name, key) if may_end else nullcontext():
                async for output in self.llm.generate(
                    prompt,
                    params,
                    name,
                    lora_request=lora,
                    **where,
                ):
                    final = output
        except Exception as error:
            await self._raise_if_dead(error)
            raise
        finally:
            self.running[key] -= 1
            self.ended_requests += 1
        return final

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        ids, size = [int(token) for token in token_ids], self.spec.shape.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            worst = min(ids) if min(ids) < 0 else max(ids)
            raise DataError(
                f"engine {self.index} was asked to go on from a text with the token {worst}, and "
                f"the model's are 0 to {size - 1} (vocab_size in its config.json): a tokenizer "
                "with added tokens needs a model with an embedding of them "
                "(resize_token_embeddings of transformers)"
            )
        return ids

    async def _workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Calls a method of refit/receiver.py on the workers of all ranks. Raises RefitError if one
        says no, EngineDied when vLLM's processes end, EngineSilent when none answers in time."""
        timeout = self.config.refit.timeout_s + WORKER_GRACE_S
        if self.config.rollout.dp == 1:
            asked = self.llm.collective_rpc(method, timeout=timeout, args=args)
        else:
            asked = dp_ranks.every_worker(self.llm, method, timeout, args)
        call = asyncio.ensure_future(asked)
        ends = time.monotonic() + timeout
        # vLLM leaves a call unanswered for ever when its processes end, or are stopped.
        while not (await asyncio.wait([call], timeout=DEATH_POLL_S))[0]:
            if self.llm.errored or time.monotonic() > ends + WORKER_GRACE_S:
                call.cancel()
                raise self._dead() if self.llm.errored else self._silent(method)
        try:
            answers = call.result()
        except Exception as error:
            await self._raise_if_dead(error)
            if time.monotonic() > ends:
                raise self._silent(method) from error
            raise
        for answer in answers:
            if "error" in answer:
                raise RefitError(f"engine {self.index}, {answer['error']}")
        return answers

    async def _raise_if_dead(self, error: Exception) -> None:
        """Raises EngineDied when `error` comes from the end of vLLM's processes."""
        deadline = time.monotonic() + DEATH_GRACE_S
        while not self.llm.errored and time.monotonic() < deadline:
            await asyncio.sleep(DEATH_POLL_S)
        if self.llm.errored:
            raise self._dead() from error

    def _dead(self) -> EngineDied:
        return EngineDied(f"vLLM's processes of engine {self.index} have ended")

    def _silent(self, method: str) -> EngineSilent:
        return EngineSilent(
            f"the workers of engine {self.index} gave no answer to {method} within "
            f"refit.timeout_s={self.config.refit.timeout_s:g} s"
        )
