"""What the memory of each node's host holds: the run's own process, ranks, and what lies between.

Trainer ranks stand on the first nodes, engines on those behind them, as GPUs are counted; the run's
own process is on the first. Bytes of samples, routes, copies and offloaded tensors follow from the
config; processes are allowances.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.planner.facts import Format
from lora_moe_rl.planner.formats import itemsize
from lora_moe_rl.planner.hardware import GIB, Hardware
from lora_moe_rl.planner.held import HeldPart
from lora_moe_rl.planner.rollout import EngineRank
from lora_moe_rl.planner.traffic import Routes
from lora_moe_rl.planner.trainer import RankClass

# Of a process of the run with its imports, of one that scores, and of Ray's own on a node, as they
# were on the CPU; and what CUDA's libraries and context add to a rank, which was not measured.
PROCESS_BYTES, WORKER_BYTES, RAY_BYTES = 600 * 2**20, 64 * 2**20, GIB // 2
CUDA_BYTES = int(2.4 * GIB)
# Of a token: its id, its logprob, its version and whether it may be in the loss
# (`data/samples.py`); of one that was sampled also its advantage and its weight, and its text. A
# group has its prompt's ids once more, as Python's numbers in a list.
TOKEN_BYTES, SIGNAL_BYTES, TEXT_BYTES, PROMPT_BYTES = 13, 8, 4, 36
SAMPLE_BYTES = 2400  # Python's objects of a sample of one turn: two segments, ten arrays
STATE_BYTES = 12  # of a weight in a copy for ranks that are started anew, with Adam's moments


@dataclass(frozen=True)
class NodeHost:
    """Bytes in the host's memory of each of `nodes` alike, by what they are for."""

    nodes: int
    trainer_ranks: int
    engine_ranks: int
    controller: bool
    memory: dict[str, int]

    @property
    def name(self) -> str:
        held = [(self.trainer_ranks, "trainer"), (self.engine_ranks, "engine")]
        ranks = [f"{count} {whose}" for count, whose in held if count]
        several = sum(count for count, _ in held) > 1
        return ", ".join(["run"] * self.controller + ranks) + (" ranks" if several else " rank")

    @property
    def total(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class HostMemory:
    """What a run takes of its machine's own memory. `served`: the engines' format; `routes` and
    `engine` are None where nothing is sampled. `held`: the base's parts, as `held_parts` says; none
    where each side has its own."""

    config: RunConfig
    classes: Sequence[RankClass]
    engine: EngineRank | None
    routes: Routes | None
    lengths: Lengths
    served: Format
    adapter_parameters: int
    held: Sequence[HeldPart]
    weights: Format

    def nodes(self, gpus: tuple[int, int, bool], per_node: int) -> list[NodeHost]:
        """`gpus`: of trainer, of engines, and whether they share them, as `plan.gpus_of`."""
        mine, theirs, shared = gpus
        trainer = _spread(self.config.trainer.world_size, mine, per_node)
        if shared:
            ranks = self.config.num_engines * self.config.rollout.ranks
            engines = _spread(ranks, theirs, per_node)
        else:
            engines = self._engines_behind(mine, per_node)
        count = 1 + max((*trainer, *engines))
        kinds = Counter((node == 0, trainer[node], engines[node]) for node in range(count))
        return [
            NodeHost(nodes, t, e, head, self._node(head, t, e))
            for (head, t, e), nodes in kinds.items()
        ]

    def _engines_behind(self, gpu: int, per_node: int) -> Counter[int]:
        """Ranks by node, of engines from a GPU on. What an engine has on one node stands together:
        where the rest of a node is too small for it, on the next."""
        rollout, found = self.config.rollout, Counter[int]()
        together = rollout.ranks // rollout.nodes
        for _ in range(self.config.num_engines * rollout.nodes):
            if gpu % per_node + together > per_node:
                gpu += -gpu % per_node
            found[gpu // per_node] += together
            gpu += together
        return found

    def _node(self, head: bool, trainer: int, engines: int) -> dict[str, int]:
        kept = {
            "processes": self._processes(trainer, engines),
            "tensors": self._tensors(trainer, engines),
            "held base": self._held if head else 0,
            "refit": trainer * self._sent(),
            "object store": self._store(head, trainer, engines),
            "samples": 0,
        }
        if head:
            functions = 0 if self.config.offline else sum(map(len, self.config.rewards().values()))
            workers = functions * self.config.reward.workers
            kept["processes"] += PROCESS_BYTES + workers * WORKER_BYTES
            kept["samples"] = samples_bytes(self.config, self.lengths)
        return kept

    def _processes(self, trainer: int, engines: int) -> int:
        """Of ranks, of vLLM's front in each engine, and of Ray."""
        ranks, fronts = trainer + engines, math.ceil(engines / self.config.rollout.ranks)
        cuda = 0 if self.config.trainer.device == "cpu" else CUDA_BYTES
        return RAY_BYTES + PROCESS_BYTES * (ranks + fronts) + cuda * ranks

    @property
    def _held(self) -> int:
        """Of a file that all ranks of the one machine map; on GPUs it is in their memory."""
        trainer = self.config.trainer
        if trainer.device != "cpu":
            return 0
        experts, dense = trainer.ep * trainer.etp, trainer.tp
        return trainer.pp * sum(
            part.shared[self.weights] * (experts if part.part == "experts" else dense)
            for part in self.held
        )

    def _tensors(self, trainer: int, engines: int) -> int:
        """What waits for GPUs; on the CPU all tensors of the ranks, but for those held once."""
        held = trainer * max(c.host + c.host_in_step for c in self.classes)
        shared = sum(part.shared[self.weights] for part in self.held)
        rollout, engine = self.config.rollout, self.engine
        if self.config.trainer.device == "cpu":
            held += trainer * (max(c.tensors for c in self.classes) - shared)
            if engine is not None:
                cache = int(rollout.cpu_kv_cache_gib * GIB) * rollout.dp
                own = engine.weights + engine.slots + (cache - self._held) // rollout.ranks
                held += engines * own
        elif engine is not None and self.config.placement.gives_back == "weights":
            held += engines * (engine.weights + engine.slots)
        return held

    def _sent(self) -> int:
        """A rank's part of a version on its way: at most all of the adapter that it holds."""
        if self.engine is None:
            return 0
        return max(c.adapter_parameters for c in self.classes) * itemsize(self.served)

    def _store(self, head: bool, trainer: int, engines: int) -> int:
        """Ray's: routes on the nodes of the engines that recorded them until they are trained, and
        on those of the ranks that train them; a step's batch; copies of the trainer's state."""
        config, found = self.config, 0
        if self.routes is not None:
            sampled = self.routes.step * (config.schedule.lag + 1)
            found += sampled * engines // max(1, config.num_engines * config.rollout.ranks)
            parts = config.trainer.pp * config.trainer.dp
            found += self.routes.step * min(trainer, parts) // parts
        if head or trainer:
            found += batch_bytes(config, self.lengths)
        copy = STATE_BYTES * self.adapter_parameters
        if config.trainer.max_restarts and copy <= config.trainer.max_copy_gib * GIB:
            found += 2 * copy * trainer // config.trainer.world_size
        return found


def samples_bytes(config: RunConfig, lengths: Lengths) -> int:
    """The bytes of all samples that the run's own process may hold at once: those of a step, and of
    as many as engines may be ahead."""
    prompts, size = config.algorithm.prompts_per_step, config.algorithm.group_size
    sampled = TOKEN_BYTES + TEXT_BYTES
    each = SAMPLE_BYTES + TOKEN_BYTES * lengths.prompt + sampled * lengths.response
    group = size * each + PROMPT_BYTES * lengths.prompt
    signals = SIGNAL_BYTES * lengths.response * prompts * size
    return (config.schedule.lag + 1) * prompts * group + signals


def batch_bytes(config: RunConfig, lengths: Lengths) -> int:
    """The bytes of a step's batch as ranks are sent it (`data/batch.py`)."""
    count = config.algorithm.prompts_per_step * config.algorithm.group_size
    return count * (4 * lengths.sample + (TOKEN_BYTES - 4 + SIGNAL_BYTES) * lengths.response)


def warnings(nodes: Sequence[NodeHost], hardware: Hardware) -> Iterator[str]:
    """One sentence for each kind of node whose host holds too much, with a way out."""
    for node in nodes:
        if node.total > hardware.node_memory * GIB:
            most = max(node.memory, key=lambda what: node.memory[what])
            yield (
                f"a node of {node.name} holds {node.total / GIB:,.1f} GiB in its host's memory of "
                f"{hardware.node_memory:,.0f}: most of it is its {most} "
                f"({node.memory[most] / GIB:,.1f} GiB); {WAYS_OUT[most]}, or name the memory that "
                "there is with --host-memory"
            )


WAYS_OUT = {
    "processes": "place fewer ranks on a node",
    "tensors": "offload less (trainer.offload, placement.gives_back), over more GPUs",
    "held base": "take a smaller model",
    "refit": "lower adapter.rank, or cut the trainer over more GPUs",
    "object store": "lower algorithm.prompts_per_step, schedule.lag or trainer.max_copy_gib",
    "samples": "lower algorithm.prompts_per_step, algorithm.group_size or schedule.lag",
}


def _spread(ranks: int, gpus: int, per_node: int) -> Counter[int]:
    """Ranks by node, where they stand evenly on the first `gpus`."""
    return Counter(rank * gpus // ranks // per_node for rank in range(ranks))
