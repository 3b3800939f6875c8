"""One trainer rank as a Ray actor. Ray is applied in `cluster/trainer.py`; a test may run a
rank in a process of its own. Importing this file imports neither torch nor Megatron."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_moe_rl.adapters.shards import Shard
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.addresses import own_address, reserve
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.trainer import check_gloo
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.files.trainer_state import CRITIC, POLICY, Done, Saved, Whose, file_name
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.refit.transports import Channel, place
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.trainer.environment import without_trackers
from lora_moe_rl.trainer.traces import traced
from lora_moe_rl.upstream.uncollected import uncollected

if TYPE_CHECKING:
    from lora_moe_rl.adapters.attach import Adapters
    from lora_moe_rl.algorithms.base import Pass
    from lora_moe_rl.router_replay.routes import Sent
    from lora_moe_rl.trainer.engine import TrainingEngine
    from lora_moe_rl.trainer.optimizer import AdapterOptimizer
    from lora_moe_rl.trainer.service_models import Models
    from lora_moe_rl.trainer.state import Held


class TrainerWorker:
    """Methods are called on all ranks together, with the same arguments, but for `update`."""

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        rank: int,
        held: str | None = None,
    ):
        """`held`: see `TrainingEngine`."""
        self.config, self.spec, self.model_dir, self.rank = config, spec, model_dir, rank
        self.held = held
        self._held_port: socket.socket | None = None

    def address(self) -> str:
        """host:port for torch.distributed, asked of rank 0, which holds it until it listens."""
        host = own_address()
        self._held_port = reserve(host)
        return f"{host}:{self._held_port.getsockname()[1]}"

    def start(self, address: str, threads: int) -> dict:
        """Builds the model and the adapters. Returns what `doctor`-like output shows."""
        with uncollected():
            from lora_moe_rl.trainer.device import Device

            device = Device.choose(self.config.trainer)
            if device.kind == "cpu":
                check_gloo(self.config.trainer)
            without_trackers()
            device.prepare(threads)
            from megatron.core import parallel_state as ps

            from lora_moe_rl.trainer import bridge
            from lora_moe_rl.trainer.engine import TrainingEngine
            from lora_moe_rl.trainer.model import init_process_groups

            bridge.load()
        init_process_groups(self.config.trainer, device, self.rank, address)
        if self._held_port:
            self._held_port.close()
        parts = self.config, self.spec, self.model_dir, device
        self.use(TrainingEngine(*parts, self.held))
        trainable = sum(p.numel() for p in self.engine.adapters.parameters())
        return {
            "device": device.kind,
            "dtype": device.dtype_name,
            "trainable": trainable,
            "place": place(),
            "dp_rank": ps.get_data_parallel_rank(),
        }

    def use(self, engine: TrainingEngine) -> None:
        """Works on this model from now on."""
        from lora_moe_rl.trainer.ahead import Ahead

        self.engine, self.ahead = engine, Ahead(engine)
        self.models: Models | None = None

    def memory(self) -> dict[str, int]:
        """Bytes this rank holds of the frozen base, adapters, their gradients and Adam's state;
        `host`: of moments that are offloaded, if they are, not on its device."""
        from lora_moe_rl.trainer import packed_experts
        from lora_moe_rl.trainer.host_moments import MOMENTS

        engine = self.engine
        packed = packed_experts.held(engine.chunks)["packed"]
        held = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
        trained = [(engine.adapters, engine.optimizer)]
        if engine.critic is not None:
            trained.append((engine.critic.adapters, engine.critic.optimizer))
        # Some twice: an A of several sites.
        adapters = [s.tensor for one, _ in trained for s in one.slices()]
        mine = {id(tensor) for tensor in adapters}
        states = [state for _, one in trained for state in one.adam.state.values()]
        optimizer = _nbytes(t for state in states for t in state.values())
        moments = _nbytes(state[key] for state in states for key in MOMENTS if key in state)
        frozen = 0 if engine.reference is None else engine.reference.nbytes
        host = {"host": moments} if self.config.trainer.offloads_moments else {}
        return {
            "base": _nbytes(t for t in held if id(t) not in mine) + packed,
            "adapter": _nbytes(adapters) + frozen,
            "gradients": _nbytes(
                flat for one, _ in trained for flat in one.gradients.flat.values()
            ),
            "optimizer": optimizer - sum(host.values()),
            **host,
        }

    def update(self, batch: TrainBatch, *parts: Sent):
        """One step's optimizer steps: see `trainer/update.py`. `batch`: the whole, or this rank's
        share; `parts`: routes of the groups in turn."""
        from lora_moe_rl.trainer.update import update

        with traced(self.config, self.engine.device.kind, self.rank, batch.step):
            found = update(self.engine, batch, parts)
        if self.engine.shared is not None:
            self.engine.shared.check()
        self._give_back()
        return found

    def _give_back(self) -> None:
        """Engines on the same device have their turn next."""
        if self.config.placement.colocated:
            self.engine.device.give_back()

    def gradients(self, batch: TrainBatch, *parts: Sent):
        """(loss, gradient norm, shards of the gradient) of one step: see `trainer/update.py`."""
        from lora_moe_rl.trainer.update import gradients

        return gradients(self.engine, batch, parts)

    def judge(self, batch: TrainBatch) -> dict[Pass, list[np.ndarray]] | None:
        """Logprobs of answers, from the first rank (None from the others): see
        `trainer/update.py`."""
        from lora_moe_rl.trainer.update import judge

        found = judge(self.engine, batch)
        return None if self.rank else found

    def critic_gradients(self, batch: TrainBatch, *parts: Sent):
        """(loss, values of each sample, shards of the gradient) of the critic: see
        `trainer/update.py`."""
        from lora_moe_rl.trainer.update import critic_gradients

        return critic_gradients(self.engine, batch, parts)

    def score(
        self, sequences: list[list[int]], table: RouteTable | None, adapters: bool
    ) -> list[np.ndarray] | None:
        """Logprobs of every token after the first, at temperature 1, from one rank (None from the
        others). `adapters=False`: the frozen base."""
        if adapters:
            found = self.ahead.score(sequences, table)
        else:
            parts = () if table is None else (table,)
            with self.engine.adapters.off():
                found = self.engine.score(TrainBatch.from_sequences(sequences), *parts)
        self._give_back()
        return found

    def score_ahead(self, sequences: list[list[int]]) -> None:
        """What `score` will be asked for next, with adapters."""
        self.ahead.begin(sequences)

    def prepare_refit(self, layouts: list[PartLayout], channel: Channel) -> None:
        """What the ranks send to engines, and how: this one's part among them, if it has one."""
        from lora_moe_rl.refit.sender import Sender, held_by

        scales = {site.name: site.scale for site in self.spec}
        held = held_by(self.engine.adapters.served())
        for layout in layouts:
            if layout.source == self.rank:
                outgoing = channel.outgoing(layout, own_address())
                self.sender = Sender(layout, held, scales, outgoing)

    def send(self) -> SentPart:
        """Writes this rank's part of the current version and offers it to the engines. Only ranks
        that have one are asked."""
        self.sender.factor = self.engine.adapters.switch.factor
        return self.sender.send(self.engine.version)

    def of_models(self, method: str, *args: Any) -> Any:
        """What `Models` does, for a training service."""
        if self.models is None:
            from lora_moe_rl.trainer.service_models import Models

            self.models = Models(self.engine, self.ahead.forget)
        found = getattr(self.models, method)(*args)
        self._give_back()
        return found

    def served_as(self, version: int) -> None:
        """What is sent next is this version."""
        self.engine.version = version

    def export(self) -> list[Shard]:
        """This rank's shards of the current version."""
        return self.engine.adapters.export()

    def version(self) -> int:
        return self.engine.version

    def save(self, directory: Path) -> Saved:
        """Writes this rank's files."""
        from lora_moe_rl.trainer import state

        files = {}
        for whose, trained in self._trained().items():
            name = file_name(self.rank, whose)
            files[name] = state.save(directory / name, *trained)
        return Saved(self._meta(), files)

    def _trained(self) -> dict[Whose, tuple[Adapters, AdapterOptimizer]]:
        """What is trained: the policy, and the critic if there is one."""
        engine = self.engine
        found: dict[Whose, tuple[Adapters, AdapterOptimizer]] = {
            POLICY: (engine.adapters, engine.optimizer)
        }
        if engine.critic is not None:
            found[CRITIC] = engine.critic.adapters, engine.critic.optimizer
        return found

    def _meta(self) -> dict[str, int]:
        """What has to be known besides tensors: the version, and steps of each optimizer."""
        updates = self.config.algorithm.updates_per_step
        meta = {"version": self.engine.version}
        for whose, (_, optimizer) in self._trained().items():
            meta |= Done(optimizer.steps, optimizer.scheduled).as_meta(whose, updates)
        return meta

    def copy(self) -> tuple[int, Held]:
        """(Bytes, a copy in memory) of all that `save` would write of this rank."""
        from lora_moe_rl.trainer import state

        tensors: dict[Whose, state.Tensors] = {
            whose: state.collect(*trained) for whose, trained in self._trained().items()
        }
        held = state.Held.of(self._meta(), tensors)
        return sum(values.nbytes for of in tensors.values() for values in of.values()), held

    def load_copy(self, *parts: Held) -> None:
        """Goes on from what all ranks of the same layout gave as `copy`. Raises CheckpointError
        when that is damaged, or not of one moment."""
        from lora_moe_rl.trainer import state

        state.check_held(parts)
        self._load(parts[0].meta, functools.partial(state.load_held, parts))

    def load(self, directory: Path, meta: dict) -> None:
        """Raises CheckpointError when an element of the policy is missing, or of the critic, if
        there is one."""
        from lora_moe_rl.trainer import state

        self._load(meta, functools.partial(state.load, directory))

    def _load(self, meta: dict, load: Callable[..., None]) -> None:
        updates = self.config.algorithm.updates_per_step
        for whose, trained in self._trained().items():
            load(whose, *trained, Done.of(meta, whose, updates))
        self.engine.version = meta["version"]
        self.ahead.forget()

    def set_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        """Writes whole canonical tensors (tests, and starting from an adapter)."""
        self.engine.adapters.load(tensors)
        self.ahead.forget()

    def set_reference(self, tensors: dict[str, np.ndarray]) -> None:
        """Whole canonical tensors of the frozen adapter that the policy is measured against."""
        self.engine.set_reference(tensors)


def _nbytes(tensors) -> int:
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
