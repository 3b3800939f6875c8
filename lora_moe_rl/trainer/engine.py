"""One rank's training engine: the Megatron model with adapters, its schedule and its optimizer.

    logprobs:  samples -> micro-batches -> schedule, forward only  -> logprobs of response tokens
    update:    samples -> micro-batches -> schedule with backward -> gradients -> Adam: version + 1

Every rank calls the same methods with the same arguments; each picks its own micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from lora_moe_rl.adapters.attach import Adapters
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ReplayError
from lora_moe_rl.router_replay.replay import Replay
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.trainer.batch import MicroBatch, TrainBatch, pack, plan_micro_batches, unpack
from lora_moe_rl.trainer.device import Device
from lora_moe_rl.trainer.logprobs import token_logprobs
from lora_moe_rl.trainer.model import build_model
from lora_moe_rl.trainer.optimizer import AdapterOptimizer

LossFunction = Callable[["Work", torch.Tensor, torch.Tensor], tuple]


@dataclass
class PackedParams(PackedSeqParams):
    """Adds where each packed token stands in a right-padded batch (for local attention)."""

    batch_index: torch.Tensor | None = None  # int64 [T]
    batch_shape: tuple[int, int] = (0, 0)


@dataclass
class Work:
    """One micro-batch on its way: arrays, routes, and the logprobs found so far `{name: [T]}`."""

    data: MicroBatch
    table: RouteTable | None
    recorded: dict[int, torch.Tensor] | None = None
    known: dict[str, torch.Tensor] = field(default_factory=dict)


class TrainingEngine:
    """Built once a rank, after `init_process_groups`."""

    def __init__(self, config: RunConfig, spec: AdapterSpec, model_dir: Path, device: Device):
        self.config, self.spec, self.device = config, spec, device
        base = build_model(model_dir, config.trainer, device)
        inner = base.module if hasattr(base, "module") else base  # Float16Module
        self.adapters = Adapters(inner, spec, config.seed)
        self.replay = Replay(inner, spec.shape.moe_layers)
        self.model = DistributedDataParallel(
            inner.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            base,
        )
        self.optimizer = AdapterOptimizer(config.trainer, self.model)
        inner.config.finalize_model_grads_func = finalize_model_grads
        inner.config.grad_scale_func = None
        self.version = 0
        self.forwards = 0

    @property
    def is_last_stage(self) -> bool:
        return ps.is_pipeline_last_stage(ignore_virtual=True)

    def my_work(
        self, batch: TrainBatch, samples, table: RouteTable | None, dp_size: int, dp_rank: int
    ) -> list[Work]:
        """This rank's micro-batches of the given samples."""
        plan = plan_micro_batches(
            samples, batch.lengths(), self.config.trainer.micro_batch_tokens, dp_size
        )
        tp = self.config.trainer.tp
        return [Work(pack(batch, chunk, multiple=tp), table) for chunk in plan[dp_rank]]

    @torch.no_grad()
    def forward(self, works: list[Work], name: str, temperature: float, record=False) -> None:
        """Adds `known[name]`, the logprobs of every label, to each work (on the last stage).

        `record`: also keep the routes the routers chose by themselves, for r2.
        """

        def keep(work: Work, logprobs: torch.Tensor, logits: torch.Tensor):
            work.known[name] = logprobs.detach()
            return logprobs.sum(), torch.tensor(0, dtype=torch.int), {}

        self.model.eval()
        self._schedule(works, keep, temperature, forward_only=True, record=record)

    def forward_backward(self, works: list[Work], loss: LossFunction, temperature: float) -> list:
        """Accumulates gradients of the token-mean loss; returns `loss`'s third value for each work
        (on the last stage). `loss(work, logprobs, logits)` returns (sum, token count, anything)."""
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._schedule(works, loss, temperature, forward_only=False)

    def _schedule(self, works, loss, temperature, forward_only, record=False) -> list:
        def forward_step(iterator, model):
            work = next(iterator)
            logits = self._forward_one(work, model, record)
            return logits, lambda out: self._last_stage(work, out, loss, temperature)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(works),
            model=self.model,
            num_microbatches=len(works),
            seq_length=len(works[0].data.input_ids),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward_one(self, work: Work, model, record: bool) -> torch.Tensor:
        data, device = work.data, self.device.torch_device
        if work.recorded is not None:
            self.replay.install_recorded(work.recorded)
        elif work.table is not None:
            self.replay.install(work.table, data.rows, device)
        else:
            self.replay.clear_routes()
        logits = model(
            input_ids=_tensor(data.input_ids, device)[None],
            position_ids=_tensor(data.positions, device)[None],
            attention_mask=None,
            packed_seq_params=_packed_params(data, device),
        )
        self.forwards += 1
        if record:
            work.recorded = self.replay.take_recorded()
        return logits

    def _last_stage(self, work: Work, logits, loss, temperature):
        labels = _tensor(work.data.labels, self.device.torch_device)[None]
        logprobs = token_logprobs(logits, labels, temperature, self.spec.shape.vocab_size)
        return loss(work, logprobs, logits)

    def score(self, batch: TrainBatch, table: RouteTable | None) -> list[np.ndarray] | None:
        """Logprobs of the response tokens of each sample, at temperature 1, from one rank (the
        others return None). Every data-parallel rank scores all samples: this is for a few."""
        with self.watched_replay():
            works = self.my_work(batch, range(len(batch.token_ids)), table, 1, 0)
            self.forward(works, "score", temperature=1.0)
        if (
            not self.is_last_stage
            or ps.get_tensor_model_parallel_rank()
            or ps.get_data_parallel_rank()
        ):
            return None
        out: dict[int, np.ndarray] = {}
        for work in works:
            out |= unpack(work.data, work.known["score"].cpu().numpy())
        return [out[i] for i in range(len(batch.token_ids))]

    def watched_replay(self):
        """A context around forwards: routes are cleared at its end, and every router must have
        consulted them in every forward."""
        return _Watched(self)


class _Watched:
    def __init__(self, engine: TrainingEngine):
        self.engine = engine
        self.step = engine.replay.step()

    def __enter__(self):
        self.engine.forwards = 0
        return self.step.__enter__()

    def __exit__(self, kind, value, trace):
        try:
            if kind is None:
                self.engine.replay.check_calls(self.engine.forwards)
        finally:
            self.step.__exit__(kind, value, trace)


def check_coverage(table: RouteTable, missing: str) -> None:
    """Raises ReplayError for missing routes under replay.missing=error."""
    if missing == "error" and not table.valid.all():
        row, column = (int(x[0]) for x in np.nonzero(~table.valid))
        sample = int(np.searchsorted(table.offsets, row, side="right")) - 1
        raise ReplayError(
            f"sample {sample} has no routes for token {row - int(table.offsets[sample])}, layer "
            f"{table.layers[column]} ({1 - table.coverage:.2%} missing); set replay.missing=mask "
            f"or route to go on without them"
        )


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _packed_params(data: MicroBatch, device: torch.device) -> PackedParams:
    cu_seqlens = _tensor(data.cu_seqlens, device)
    longest = data.max_seqlen
    lengths = np.diff(data.cu_seqlens)
    index = np.repeat(np.arange(len(lengths)) * longest, lengths) + data.positions
    return PackedParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        batch_index=_tensor(index, device),
        batch_shape=(len(lengths), longest),
    )
