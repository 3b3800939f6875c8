"""One rank's training engine: the Megatron model with adapters, its schedule and its optimizer.

    logprobs:  samples -> micro-batches -> schedule, forward only  -> logprobs of response tokens
    update:    samples -> micro-batches -> schedule with backward -> gradients -> Adam: next version

Every rank calls the same methods with the same arguments; each picks its own micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.attach import Adapters
from lora_moe_rl.adapters.base_start import BaseStart
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.base.held import Held
from lora_moe_rl.base.shared import Shared
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.micro_batches import plan_for
from lora_moe_rl.data.packing import MicroBatch, pack, unpack
from lora_moe_rl.errors import FrozenStartError
from lora_moe_rl.router_replay.audit import Audit, due
from lora_moe_rl.router_replay.replay import MicroRoutes, Replay
from lora_moe_rl.router_replay.routes import Routes, Sent, context_shard, sequence_shard
from lora_moe_rl.router_replay.sizes import Exchange
from lora_moe_rl.trainer.critic import Critic
from lora_moe_rl.trainer.device import Device
from lora_moe_rl.trainer.head import Head
from lora_moe_rl.trainer.host_activations import HostActivations
from lora_moe_rl.trainer.model import build_model
from lora_moe_rl.trainer.optimizer import AdapterOptimizer
from lora_moe_rl.trainer.packed_sequences import as_tensor, packed_params
from lora_moe_rl.trainer.reference import FrozenAdapter

# From a micro-batch and what the last stage gives: logprobs `[T]` of a head, else what the model's
# output layer gives, `[1, T, …]`.
LossFunction = Callable[["Work", torch.Tensor], tuple]


@dataclass
class Work:
    """One micro-batch on its way: arrays, routes, and the logprobs found so far `{name: [T]}`.

    `mask`: bool `[T]`, tokens in the loss; of the data, until it is chosen (`objective.py`).
    Known too, where it is wanted: `entropy` of the forward before the update, `rewards`, `returns`,
    and `selected` (`selection.py`).
    `step_mean`: of the whole step, where the algorithm asks for one. `entropy`: float32 `[T]`, of
    the last forward with gradients, with a gradient itself until the loss has been made of it.
    `divergence`: the same of that from a teacher, where the loss goes by it.

    `routes`: to be replayed, of each pipeline chunk; None when routers choose. `complete`: bool
    `[T]`, tokens with routes in all layers of the model.
    """

    data: MicroBatch
    routes: Sequence[MicroRoutes | None] | None
    complete: np.ndarray | None = None
    recorded: dict[int, torch.Tensor] = field(default_factory=dict)
    known: dict[str, torch.Tensor] = field(default_factory=dict)
    mask: np.ndarray = field(init=False)
    step_mean: float | None = None
    entropy: torch.Tensor | None = None
    divergence: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.mask = self.data.mask

    @property
    def stands(self) -> np.ndarray:
        """int64 [T], how many times each token stands in the loss."""
        return self.mask * self.data.copies


class TrainingEngine:
    """Built once a rank, after `init_process_groups`."""

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        device: Device,
        held: str | None = None,
    ):
        """`held`: the folder of the base that engines hold too; None: this rank has its own."""
        self.config, self.spec, self.device = config, spec, device
        self.algorithm = algorithms.make(config)
        self.shared = None
        if held is not None:
            base = Held.of_run(held, model_dir, device.dtype_name, config, device.kind == "cuda")
            self.shared = Shared.of(base, config.trainer, device.kind)
        self.chunks = self._build(model_dir)
        inner = [getattr(chunk, "module", chunk) for chunk in self.chunks]  # Float16Module
        start = None
        if config.adapter.starts_from_base:
            start = BaseStart(config.adapter.init, model_dir, spec.shape, device.torch_device)
        self.adapters = Adapters(inner, spec, config.seed, start, config.trainer.lora_kernel)
        self.replay = Replay(inner, spec.shape.moe_layers)
        self.audit = Audit(self.replay)
        self.exchange = Exchange(device.torch_device)
        if config.trainer.recompute == "full":
            _train_through_embeddings(inner)
        self.on_host = None
        if config.trainer.offloads_activations:
            self.on_host = HostActivations(inner, device.torch_device)
        self.optimizer = AdapterOptimizer(
            config.trainer,
            self.adapters,
            algorithms.optimizer_steps(config),
            spec.lr_factors(config.trainer.lr_pattern),
        )
        for chunk in inner:
            chunk.config.finalize_model_grads_func = self._finalize_gradients
            chunk.config.grad_scale_func = None
        self.version = 0
        self._training, self._divisor = self.adapters, 1.0
        self.forwards = [0] * len(self.chunks)
        self.trained = [0] * len(self.chunks)
        self.reference: FrozenAdapter | None = None
        settings = self.algorithm.critic
        self.critic = None if settings is None else Critic(self, settings)

    def _build(self, model_dir: Path) -> list[torch.nn.Module]:
        """The frozen base."""
        layers = self.spec.shape.num_layers
        return build_model(model_dir, self.config.trainer, layers, self.device, self.shared)

    def set_reference(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Freezes this adapter, whole canonical tensors, as what the policy is measured against."""
        self.reference = FrozenAdapter(self.adapters, tensors)

    @property
    def frozen_start(self) -> FrozenAdapter | None:
        """What the policy is measured against, if not the base. Raises FrozenStartError when it
        was not set."""
        if not self.algorithm.from_start:
            return None
        if self.reference is None:
            raise FrozenStartError(
                "algorithm.reference=start, and this rank was not given the adapter that the run "
                "starts from"
            )
        return self.reference

    def as_reference(self) -> AbstractContextManager[None]:
        """Inside, the model is what the policy is measured against."""
        frozen = self.frozen_start
        return self.adapters.off() if frozen is None else frozen.on()

    @property
    def is_last_stage(self) -> bool:
        return ps.is_pipeline_last_stage(ignore_virtual=True)

    def my_work(
        self, batch: TrainBatch, samples, routes: Routes | None, dp_size: int, dp_rank: int
    ) -> list[Work]:
        """This rank's micro-batches of the given samples, with their routes if there are any."""
        return self.my_works(batch, [samples], routes, dp_size, dp_rank)[0]

    def my_works(
        self, batch: TrainBatch, steps: Sequence, routes: Routes | None, dp_size: int, dp_rank: int
    ) -> list[list[Work]]:
        """The same of each of several optimizer steps, whose micro-batches may also go through one
        schedule together. steps: the samples of each."""
        trainer = self.config.trainer
        plans = [plan_for(trainer, samples, batch, dp_size)[dp_rank] for samples in steps]
        # The interleaved schedule wants micro-batches equally long.
        longest = max(map(batch.fed_together, chain(*plans))) if trainer.vpp > 1 else 0
        return [self._works(batch, plan, routes, longest) for plan in plans]

    def _works(
        self, batch: TrainBatch, plan: list[list[int]], routes: Routes | None, longest: int
    ) -> list[Work]:
        trainer = self.config.trainer
        data = [pack(batch, chunk, trainer.tp * trainer.cp, longest) for chunk in plan]
        if routes is None:
            return [Work(one, None) for one in data]
        routes.fetch((sample for one in data for sample in one.samples), batch.fed)
        told = self.exchange.tell([routes.micro(one) for one in data])
        pairs = zip(data, told, strict=True)
        return [Work(one, here, routes.complete(one)) for one, here in pairs]

    def routes(self, batch: TrainBatch, parts: Sequence[Sent]) -> Routes | None:
        """The routes of a step, None without parts and for a dense model. Raises ReplayError when
        they are not those of the model or the batch, or miss some under replay.missing=error."""
        if not parts or not self.spec.shape.moe_layers:
            return None
        routes = Routes(parts, self.replay.chunk_layers)
        routes.check_model(self.spec.shape)
        routes.check_samples(batch.lengths())
        routes.check_missing(self.config.replay.missing)
        return routes

    @torch.no_grad()
    def forward(
        self,
        works: list[Work],
        name: str,
        temperature: float,
        record=False,
        replay=True,
        entropy=False,
    ) -> None:
        """Adds `known[name]`, logprobs of the response's tokens, to each work (on the last stage).

        `record`: also keep the routes the routers chose by themselves, for r2. `replay=False`: let
        them choose whatever routes there are. `entropy`: add `known["entropy"]` too, in nats.
        """

        def keep(work: Work, logprobs: torch.Tensor):
            work.known[name] = logprobs.detach()
            if entropy:
                assert work.entropy is not None
                work.known["entropy"], work.entropy = work.entropy, None
            return logprobs.sum(), torch.tensor(0, dtype=torch.int), {}

        self.evaluate(works, keep, self.head(temperature, entropy), record, replay)

    @torch.no_grad()
    def evaluate(
        self, works: list[Work], keep: LossFunction, head: Head | None, record=False, replay=True
    ) -> None:
        """A forward of each work; `keep` gets what it gives (on the last stage)."""
        for chunk in self.chunks:
            chunk.eval()
        self._schedule(works, keep, head, forward_only=True, record=record, replay=replay)

    def head(self, temperature: float, entropy: bool = False) -> Head:
        """Logprobs in the place of logits, and the entropy of a forward with gradients, or of any
        that is to tell it."""
        size, algorithm = self.spec.shape.vocab_size, self.algorithm
        divergence = algorithm.divergence
        return Head(temperature, size, algorithm.trains_entropy, entropy, divergence)

    def forward_backward(
        self,
        works: list[Work],
        loss: LossFunction,
        head: Head | None,
        divisor: float,
        adapters: Adapters | None = None,
        replay: bool = True,
    ) -> list:
        """Accumulates gradients of the summed loss of all ranks / `divisor`, of `adapters` (None:
        the policy's); returns `loss`'s third value for each work (on the last stage). `loss(work,
        what the model gives)` returns (sum, token count, anything)."""
        self._training, self._divisor = adapters or self.adapters, divisor
        for chunk in self.chunks:
            chunk.train()
        self._training.gradients.zero()
        with nullcontext() if self.on_host is None else self.on_host.step():
            return self._schedule(works, loss, head, forward_only=False, replay=replay)

    def _schedule(self, works, loss, head, forward_only, record=False, replay=True) -> list:
        def forward_step(iterator, model):
            work = next(iterator)
            return self._forward_one(work, model, head, record, replay), partial(loss, work)

        trainer = self.config.trainer
        interleaved = trainer.vpp > 1
        run = get_forward_backward_func(
            pp_size=trainer.pp, vp_size=trainer.vpp if interleaved else None
        )
        return run(
            forward_step_func=forward_step,
            data_iterator=[iter(works) for _ in self.chunks] if interleaved else iter(works),
            model=self.chunks if interleaved else self.chunks[0],
            num_microbatches=len(works),
            seq_length=len(works[0].data.fed),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _finalize_gradients(self, chunks, num_tokens: torch.Tensor, **_) -> None:
        """Called by the schedule after the last backward. The divisor is known beforehand: it is
        that of the whole step, and need not be a number of tokens."""
        self._training.gradients.reduce()
        divisor = torch.full((), self._divisor or 1.0, device=num_tokens.device)
        self._training.gradients.scale(1.0 / divisor)

    def _forward_one(
        self, work: Work, model, head: Head | None, record: bool, replay: bool
    ) -> torch.Tensor:
        data, device = work.data, self.device.torch_device
        chunk = self.chunks.index(model)
        stands_for = np.bincount(data.fed_at[data.counted], minlength=len(data.fed))
        self.replay.set_stands_for(chunk, stands_for[sequence_shard(len(data.fed))], device)
        if work.routes is not None and replay:
            self.replay.install(chunk, work.routes[chunk], data, device)
        elif record or not replay or not work.recorded:
            self.replay.clear_routes(chunk)
        else:
            self.replay.install_recorded(chunk, work.recorded)
        mine = context_shard(len(data.fed))
        fed = data.fed[mine]
        output = model(
            input_ids=as_tensor(data.input_ids[fed].astype(np.int64), device)[None],
            position_ids=as_tensor(data.positions[fed], device)[None],
            attention_mask=None,
            packed_seq_params=packed_params(data, self.device, mine),
            output_processor=head,
            output_processor_context=work,
        )
        self.forwards[chunk] += 1
        self.trained[chunk] += model.training
        if record:
            work.recorded |= self.replay.take_recorded(chunk)
        return output

    def score(self, batch: TrainBatch, *parts: Sent) -> list[np.ndarray] | None:
        """Logprobs of the response tokens of each sample, at temperature 1, from one rank (the
        others return None). Every data-parallel rank scores all samples: this is for a few."""
        routes = self.routes(batch, parts)
        with self.watched_replay(batch, routes):
            works = self.my_work(batch, range(len(batch)), routes, 1, 0)
            self.forward(works, "score", temperature=1.0)
        return self.scores_in(works, len(batch))

    def scores_in(self, works: list[Work], count: int) -> list[np.ndarray] | None:
        """What a forward named `score` found."""
        if (
            not self.is_last_stage
            or ps.get_tensor_model_parallel_rank()
            or ps.get_context_parallel_rank()
            or ps.get_data_parallel_rank()
        ):
            return None
        out: dict[int, np.ndarray] = {}
        for work in works:
            out |= unpack(work.data, work.known["score"].cpu().numpy())
        return [out[i] for i in range(count)]

    @contextmanager
    def watched_replay(self, batch: TrainBatch, routes: Routes | None):
        """Around forwards: routes are cleared at its end, and every router must have consulted them
        in every forward. In an audited step, raises ReplayError for routes not used as recorded."""
        self.forwards = [0] * len(self.chunks)
        self.trained = [0] * len(self.chunks)
        settings = self.config.replay
        audited = routes is not None and due(batch.step, settings.audit)
        with self.replay.step():
            if audited:
                self.audit.start(routes, batch, settings.audit_samples)
            try:
                yield self.replay
                self.audit.check()
            finally:
                self.audit.stop()
            self.replay.check_calls(self.forwards, self.trained)
            self.replay.check_sizes()


def _train_through_embeddings(chunks: Sequence[torch.nn.Module]) -> None:
    """Recomputation gives no gradients to what is inside it unless its input wants one, and the
    frozen embedding's output does not."""

    def want_gradient(module, args, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    for chunk in chunks:
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(want_gradient)
