"""One rollout engine: a Ray actor around vLLM's AsyncLLM.

    sample     a prompt in; samples and their router decisions out, under one adapter version
    move_on    samples in flight go on under a newer one (rollout/in_flight.py)
    write      a text by the bare base, for a judge
    say        a turn under any version or by the bare base, which is no sample of the run; other
               requests with a manner of their own (rollout/asked.py)
    score      logprobs of given sequences, under a version or the bare base
    probe      the same, with what tells whether two engines took the same routes
    publish    parts of an adapter version in, from each trainer rank; a receipt out
    give_way   memory back, for a trainer on the same devices, until `wake`

Every method is a coroutine: an actor serves them concurrently, so that a version can be published
while another one generates. The class knows nothing of Ray but the address of its node: its creator
applies `ray.remote`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.addresses import own_address, speak_towards
from lora_moe_rl.cluster.log import redirect
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Sample
from lora_moe_rl.errors import EngineDied, NotServed, RefitError
from lora_moe_rl.models.tokenizer import load_tokenizer, stop_ids
from lora_moe_rl.ports import Manner, Receipt, Turn
from lora_moe_rl.refit.parts import PartLayout, SentPart, check_sent, to_json, version_checksum
from lora_moe_rl.refit.transports import Channel, place
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY
from lora_moe_rl.rollout import device as engine_device
from lora_moe_rl.rollout import dp_ranks, outputs, passed_on, stop_strings, unnamed
from lora_moe_rl.rollout.asked import AskedEngine
from lora_moe_rl.rollout.in_flight import Piece, Question
from lora_moe_rl.rollout.spread import Meeting, meeting_at, spread_args
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import SentRoutes, send, taken_apart
from lora_moe_rl.telemetry.clock import Clock
from lora_moe_rl.upstream.uncollected import uncollected

SLOT_POLL_S = 0.005


class RolloutEngine(AskedEngine):
    """Owns one vLLM engine and the adapter versions in its slots. `start` comes first."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: str,
        spec: AdapterSpec,
        index: int,
        log_path: str | None = None,
        held: str | None = None,
    ):
        """`held`: the folder of the base that the trainer holds too; None: this engine's own."""
        super().__init__(config, index)
        self.model_dir, self.spec, self.held = model_dir, spec, held
        self.receipts: dict[int, Receipt] = {}  # versions in slots, oldest first
        self.pinned: int | None = None  # the version whose slot no newer one takes
        self.forgotten: list[int] = []  # versions that are served no more, and still in slots
        self.finished_samples = 0
        self.publishing = asyncio.Lock()
        self.of_run = log_path is not None  # it will be killed, and never shut down
        if log_path is not None:
            redirect(log_path)

    async def meeting(self) -> Meeting:
        """Where ranks of this engine on other nodes find its front."""
        return meeting_at(own_address())

    async def start(self, meeting: Meeting | None = None) -> dict[str, Any]:
        """Loads the model. `meeting`: where ranks on other nodes come to; None: there are none.
        Raises ConfigError when vLLM is not the version we know."""
        started = time.perf_counter()
        with uncollected():
            cpu = engine_device.prepare(self.config)
            import vllm
            from vllm.v1.engine.async_llm import AsyncLLM

            dp_ranks.check_vllm()
            if cpu:
                engine_device.fork_processes(self.config)
        imported = time.perf_counter()
        self.tokenizer = load_tokenizer(self.model_dir, self.config.model.trust_remote_code)
        self.stop_ids = stop_ids(self.model_dir)
        self.sampling = outputs.sampling_params(self.config, self.stop_ids)
        args = self._engine_args(cpu)
        if meeting is not None:
            speak_towards(meeting.host)
            args |= spread_args(self.config.rollout, meeting, 0)
        with passed_on.told_of(self.config):
            self.llm = AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**args))
        if self.of_run:
            await self._held()  # once all have answered, all are connected
            unnamed.forget_names()
        stop_strings.give_tokenizer(self.llm, self.tokenizer)
        ended = time.perf_counter()
        return {
            "vllm": vllm.__version__,
            "device": "cpu" if cpu else "cuda",
            "dtype": engine_device.serving_dtype(self.config, cpu),
            "kv_blocks": self.llm.vllm_config.cache_config.num_gpu_blocks,
            "place": place(),
            "seconds": {"import": imported - started, "total": ended - started},
        }

    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        parts = self.config, self.spec, self.model_dir, self.index, cpu
        return engine_device.engine_args(*parts) | engine_device.held_args(self.held)

    async def sample(
        self,
        token_ids: Sequence[int],
        n: int,
        version: int,
        seed: int,
        turn: Turn | None = None,
        manner: Manner | None = None,
    ) -> tuple[list[Sample], SentRoutes]:
        """`n` samples that go on from `token_ids` under adapter `version`, and their routes, cut as
        the trainer's ranks will fetch them. Of a turn of a conversation only the routes that no
        earlier turn has. After `move_on` they are of the version named there at least, and may be
        of several. In a `manner` of their own, an evaluation's, all are of `version`, and their
        logprobs are of another distribution than the trainer's, or of none.

        A sample depends on `seed` and its place, not on what else the engine does, unless it is
        continued. Raises RefitError when the version is not in a slot.
        """
        own = None if manner is None else manner.max_tokens
        longest = self.config.rollout.max_response_tokens if own is None else own
        limit = longest if turn is None else turn.max_tokens
        first = Question(token_ids, n, seed, limit, version, manner=manner)
        pieces = await self.in_flight.samples(self._ask, first, turn)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self.packing, self._packed, pieces, turn)
        self.finished_samples += n
        return found

    async def sample_in_parts(self, places: int, *asked: Any) -> tuple[Any, ...]:
        """What `sample` gives, as 1 + `places` results of a call: the large parts of the routes
        stand beside the rest, and are the caller's, also when this engine has ended."""
        samples, routes = await self.sample(*asked)
        apart, large = taken_apart(routes, places)
        return (samples, apart), *large

    async def _ask(self, question: Question) -> Any:
        """One request for samples, which `move_on` may end early unless it stays."""
        params = outputs.params_of(self.sampling, question)
        return await self._request(
            question.token_ids, params, question.version, may_end=not question.stays
        )

    def _packed(
        self, pieces: list[list[Piece]], turn: Turn | None
    ) -> tuple[list[Sample], SentRoutes]:
        """What vLLM answered, as samples and routes that are on their way. Not called in the event
        loop, which feeds vLLM meanwhile: long samples with many layers take most of a second."""
        shape, recorded = self.spec.shape, 0 if turn is None else turn.recorded
        samples, table = outputs.samples_and_routes(pieces, self.tokenizer, shape, recorded)
        return samples, send(table, outputs.route_pieces(shape, self.config.trainer))

    async def move_on(self, version: int) -> None:
        """Ends the requests for samples that older versions serve, with what they have; they, and
        all that come from here on, go on under `version`. Returns when none is left that an older
        one serves. Raises RefitError when the version is not in a slot."""
        self._lora_request(version)
        self.in_flight.newest = version
        while older := self.in_flight.older():  # one that vLLM is about to take is not there yet
            try:
                await self.llm.abort(older)
            except Exception as error:
                await self._raise_if_dead(error)
                raise
            await asyncio.sleep(SLOT_POLL_S)

    async def write(
        self, token_ids: list[int], max_tokens: int, temperature: float, seed: int
    ) -> tuple[str, str, int]:
        """What the base without adapters writes after `token_ids`: a text, why it ended (stop or
        length), and how many tokens it has. Samples of the policy have seeds of their own, and do
        not depend on it."""
        params = outputs.writing_params(max_tokens, temperature, seed, self.stop_ids)
        answer = await self._request(token_ids, params, None)
        (written,) = answer.outputs
        text = self.tokenizer.decode(written.token_ids, skip_special_tokens=True)
        return text, written.finish_reason, len(written.token_ids)

    async def score(
        self, sequences: list[list[int]], version: int | None
    ) -> tuple[list[np.ndarray], RouteTable]:
        """Logprobs of each token after the first, float32 `[L - 1]`, at temperature 1; routes. The
        engine's data-parallel ranks take the sequences in turn.

        `version` None is the base without adapters.
        """
        params, ranks = outputs.scoring_params(), self.config.rollout.dp
        answers = await asyncio.gather(
            *(
                self._request(ids, params, version, rank=None if ranks == 1 else i % ranks)
                for i, ids in enumerate(sequences)
            )
        )
        return outputs.scores_and_routes(answers, self.spec.shape)

    async def probe(
        self, sequences: list[list[int]], version: int | None
    ) -> tuple[tuple[list[np.ndarray], str, bool], RouteTable]:
        """What `score` gives, and of the routes a checksum and whether none are missing."""
        scores, table = await self.score(sequences, version)
        return (scores, outputs.routes_checksum(table), bool(table.valid.all())), table

    async def prepare_refit(
        self, layouts: list[PartLayout], channel: Channel = SHARED_MEMORY
    ) -> None:
        """What the trainer ranks will send, and how. Raises RefitError when vLLM has no slot for
        it."""
        self.layouts = layouts
        await self._workers("refit_prepare", to_json(layouts), channel.to_json())

    async def publish(self, version: int, *sent: SentPart) -> Receipt:
        """Takes the parts of all trainer ranks and serves them as `version`. Requests in flight
        finish on the version they began with.

        Either the version is served in full, or an error is raised and the versions that are served
        stay; with refit.slots=1 that is none, once the version before has left its slot, and the
        error says so. Raises RefitError for a version that is not newer than the newest, when no
        slot comes free within refit.timeout_s, or when a worker refuses it.
        """
        async with self.publishing:
            return await self._publish(version, sent)

    async def _publish(self, version: int, sent: tuple[SentPart, ...]) -> Receipt:
        if self.receipts and version <= (newest := max(self.receipts)):
            raise RefitError(
                f"adapter version {version} cannot be published: engine {self.index} has version "
                f"{newest} already, and versions only grow"
            )
        check_sent(self.layouts, sent, version)
        clock = Clock()
        await self._free_slot(version)
        clock.lap("slot")
        forgotten, self.forgotten = self.forgotten, []
        try:
            parts = json.dumps([asdict(part) for part in sent])
            answers = await self._written(version, parts, forgotten, clock)
        except EngineDied:
            raise  # with its slots
        except BaseException as error:
            await self._workers("refit_drop", version)
            if isinstance(error, RefitError) and not self.receipts:
                raise RefitError(f"{error}; engine {self.index} serves no version now") from error
            raise
        clock.lap("commit")
        receipt = Receipt(
            version,
            sum(part.nbytes for part in sent),
            sum(len(part.checksums) for part in sent),
            version_checksum(sent),
            clock.seconds,
            peak_gib=max(answer["peak_gib"] for answer in answers),
        )
        self.receipts[version] = receipt
        return receipt

    async def _written(
        self, version: int, parts: str, forgotten: list[int], clock: Clock
    ) -> list[dict[str, Any]]:
        """Answers of workers that have written `parts` and serve them. Both calls are on their way
        at once, since each waits for vLLM to end a step; workers take them in order, and the second
        is refused where the first was."""
        stage = asyncio.ensure_future(self._workers("refit_stage", version, parts, forgotten))
        commit = asyncio.ensure_future(self._workers("refit_commit", version))
        try:
            await stage
            clock.lap("stage")
            return await commit
        finally:
            commit.cancel()
            await asyncio.gather(stage, commit, return_exceptions=True)

    async def _free_slot(self, version: int) -> None:
        """Forgets the oldest versions but the pinned one until a slot is free, each once its last
        request has ended."""
        deadline = time.monotonic() + self.config.refit.timeout_s
        while len(self.receipts) >= self.config.refit.slots:
            oldest = self.leaving = min(self.receipts.keys() - {self.pinned})
            try:
                await self._unused(oldest, version, deadline)
            finally:
                self.leaving = None
            del self.receipts[oldest]  # from here on no request can ask for it
            self.forgotten.append(oldest)

    async def _unused(self, oldest: int, version: int, deadline: float) -> None:
        """Waits until the last request of `oldest` has ended, for the slot of `version`."""
        while self.running.get(oldest):
            if time.monotonic() > deadline:
                raise RefitError(
                    f"no free slot for adapter version {version}: version {oldest} still "
                    f"serves {self.running[oldest]} requests after refit.timeout_s="
                    f"{self.config.refit.timeout_s:g} s; raise it or refit.slots="
                    f"{self.config.refit.slots}"
                )
            await asyncio.sleep(SLOT_POLL_S)

    async def pin(self, version: int | None) -> None:
        """This version keeps its slot from now on, and no other."""
        self.pinned = version

    async def drop(self, version: int) -> None:
        """Forgets a version that serves no request: to free its slot, or to go back to the one
        before it."""
        # Forgotten first: from here on no request can ask for it.
        self.receipts.pop(version, None)
        await self._workers("refit_drop", version)

    async def differing(self, version: int, *sent: SentPart) -> list[str]:
        """Tensors of a served version that a slot does not hold as they were sent."""
        text = json.dumps([asdict(part) for part in sent])
        answers = await self._workers("refit_compare", version, text)
        return sorted({name for answer in answers for name in answer["differing"]})

    async def state(self) -> dict[str, Any]:
        """Versions in slots, as the workers tell it; requests in flight."""
        answers = await self._workers("refit_state")
        return {
            "versions": sorted({version for answer in answers for version in answer["versions"]}),
            "running": sum(self.running.values()),
            "finished_samples": self.finished_samples,
        }

    def _lora_request(self, version: int):
        """vLLM's name for a version. A name of its own for each: the prefix cache goes by it."""
        if version not in self.receipts:
            raise self._not_served(version)
        from vllm.lora.request import LoRARequest

        from lora_moe_rl.refit.slots import lora_id

        name = f"{self.config.name}/v{version:06d}"
        return LoRARequest(name, lora_id(version), lora_path="in memory")

    def _not_served(self, version: int) -> NotServed:
        served = sorted(self.receipts.keys() - {self.leaving})
        return NotServed(
            f"engine {self.index} was asked for adapter version {version}, but serves "
            f"{served or 'none'}: publish it first",
            served,
        )
