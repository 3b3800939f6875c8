"""Why no layout fits, and what would make a run fit that does not.

A change is words to add to the command that was planned, as `--rank 8`. Each is planned anew with
them, by the way that the command itself goes, and is there only when the run then fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.config.keys import value_text
from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.planner import plan as plans
from lora_moe_rl.planner.hardware import GIB, GPUS
from lora_moe_rl.planner.proposal import SEARCHED
from lora_moe_rl.planner.request import Request, read
from lora_moe_rl.planner.search import MARGIN, Search
from lora_moe_rl.planner.turns import turns

Words = tuple[str, ...]
TIMES_MORE_GPUS, LEAST_NODES = 8, 8
LEAST_LENGTH, LEAST_SEQUENCES = 512, 16


@dataclass(frozen=True)
class Change:
    """`words` to add to the command; `harm`: what they do to the run."""

    words: Words
    harm: str


@dataclass(frozen=True)
class Axis:
    """One way to need less or have more: words, mildest first. `dear`: the strongest takes long to
    plan, so that milder ones are tried first."""

    harm: str
    steps: list[Words]
    dear: bool = False


def search_of(request: Request) -> Search:
    return Search(request.facts, request.config, request.assumed, request.kept)


def reasons(search: Search) -> list[str]:
    """Why a search found nothing, in sentences with numbers."""
    hardware, found = search.assumed.hardware, []
    memory, gpus = hardware.spec.memory, hardware.gpus
    trainer, rank = search.lightest()
    if rank.total > search.room:
        largest, size = rank.largest
        cp = f" cp={trainer.cp}" if trainer.cp > 1 else ""
        found.append(
            f"a trainer rank needs at least {rank.total / GIB:.1f} GiB (trainer.world_size="
            f"{trainer.world_size} tp={trainer.tp}{cp} pp={trainer.pp} ep={trainer.ep} recompute="
            f"{trainer.recompute}), most of it its {largest} ({size / GIB:.1f}); a "
            f"proposal uses {search.room / GIB:.1f} of {memory:g}, which leaves {MARGIN:.0%} for "
            "what the plan does not know"
        )
    engines = list(search.engines())
    fitting = [rollout.ranks for rollout, engine in engines if engine.sequences]
    if not engines:
        found.append(_no_kind(search))
    elif not fitting:
        rollout, engine = max(engines, key=lambda pair: pair[1].kv_cache)
        size = f"dp={rollout.dp}" if rollout.dp > 1 else f"tp={rollout.tp}"
        cut = " ep=true" if rollout.ep else ""
        found.append(
            f"an engine rank of rollout.{size}{cut} (one node has "
            f"{hardware.gpus_per_node} GPUs) takes {engine.weights / GIB:.1f} GiB of weights, "
            f"{engine.slots / GIB:.1f} of adapter slots and {engine.working / GIB:.1f} to work "
            f"with; vLLM's share of {engine.budget / GIB:.1f} leaves no room for a sequence of "
            f"{search.config.model.max_length:,} tokens "
            f"({engine.kv_token * search.config.model.max_length / GIB:.2f})"
        )
    if not found and search.config.placement.colocated:
        found.append(_of_turns(search))
    elif not found:
        found.append(
            f"no split of {gpus} GPUs gives the trainer the {search.fewest()} that it needs and an "
            f"engine the {min(fitting)}{_as_kept(search)}"
        )
    return found


def _no_kind(search: Search) -> str:
    """Why there is no kind of engine: vLLM serves none of such adapters, or none is as kept."""
    problems = plans.not_served(search.config, search.spec)
    if problems:
        return f"no engine of up to {search.hardware[1]} GPUs serves these adapters: {problems[0]}"
    return f"no engine on a node of {search.hardware[1]} GPUs divides the model{_as_kept(search)}"


def _as_kept(search: Search) -> str:
    kept = [f"{s}.{k}={value_text(v)}" for s, keys in search.kept.items() for k, v in keys.items()]
    return f", with {' '.join(kept)} as given" if kept else ""


def _of_turns(search: Search) -> str:
    """Why not even the lightest trainer and the lightest engines can take turns."""
    if not any(True for total in search.totals for _ in search.on_all(total)):
        return f"no engines are on all of the GPUs{_as_kept(search)}"
    trainer, rank = search.lightest()
    engine = min((engine for _, engine in search.engines()), key=lambda e: e.weights + e.slots)
    config = search.config.model_copy(update={"trainer": trainer})
    of_rollout, of_update = turns(config, [rank], engine)
    held = of_rollout.trainer + engine.weights + engine.slots + engine.working
    return (
        f"the lightest trainer rank and engine that take turns hold {held / GIB:.1f} GiB in the "
        f"turn of the rollout, without a cache of keys and values, and {of_update.total / GIB:.1f} "
        f"in that of the update; a proposal uses {search.room / GIB:.1f} of "
        f"{search.assumed.hardware.spec.memory:g}"
    )


def what_would_fit(argv: Sequence[str]) -> list[Change]:
    """Changes of a command whose run does not fit, what does least harm first: each on its own, or,
    where none is enough, several together. Empty when those are not enough either."""
    return _Trials(argv).changes(_axes(read(argv)))


class _Trials:
    """Plans of one command with words added, each made once."""

    def __init__(self, argv: Sequence[str]):
        self.argv = argv
        self.made: dict[Words, Words | None] = {}

    def changes(self, axes: list[Axis]) -> list[Change]:
        alone = [(axis, self._mildest(axis)) for axis in axes]
        found = [(axis, words) for axis, words in alone if words is not None]
        if any(() in axis.steps for axis, _ in found):
            # Another layout alone is enough: of the rest, what keeps the one there is.
            found = [(axis, words) for axis, words in found if {(), words} & {*axis.steps}]
        return [Change(words, axis.harm) for axis, words in found] or self._together(axes)

    def _together(self, axes: list[Axis]) -> list[Change]:
        """As many changes as it takes, the harmless ones first; then without each that is not
        needed, and each as mild as can be, the harmful ones first."""
        chosen: dict[str, Words] = {}
        for axis in axes:
            chosen[axis.harm] = axis.steps[-1]
            if self.fitting(_all(chosen)) is not None:
                break
        else:
            return []
        for harm in reversed(list(chosen)):
            others = {other: words for other, words in chosen.items() if other != harm}
            if self.fitting(_all(others)) is not None:
                chosen = others
        for axis in reversed(axes):
            if axis.harm in chosen:
                others = {other: words for other, words in chosen.items() if other != axis.harm}
                last = len(axis.steps) - 1
                chosen[axis.harm] = self._bisect(axis, _all(others), 0, last)
        words = self.fitting(_all(chosen))
        return [] if words is None else [Change(words, "; ".join(chosen))]

    def _mildest(self, axis: Axis) -> Words | None:
        """What makes the run fit by the mildest of the steps that does, or None."""
        last, low = len(axis.steps) - 1, 0
        high = 0 if axis.dear else last
        while self.fitting(axis.steps[high]) is None:
            if high == last:
                return None
            low, high = high + 1, min(2 * high + 1, last)
        return self.fitting(self._bisect(axis, (), low, high))

    def _bisect(self, axis: Axis, others: Words, low: int, high: int) -> Words:
        """The mildest step between two, of which the stronger makes the run fit beside `others`. A
        stronger step is taken to fit where a milder one does; the one returned does fit."""
        while low < high:
            middle = (low + high) // 2
            if self.fitting((*others, *axis.steps[middle])) is None:
                low = middle + 1
            else:
                high = middle
        return axis.steps[high]

    def fitting(self, words: Words) -> Words | None:
        """`words`, with a layout where the command has one that does not fit, when the command with
        them plans a run that fits; else None."""
        if words not in self.made:
            try:
                self.made[words] = self._plan(words)
            except LoraMoeRlError:  # such a run cannot be
                self.made[words] = None
        return self.made[words]

    def _plan(self, words: Words) -> Words | None:
        request = read([*self.argv, *words])
        if request.has_layout and _fits(request):
            return words
        best = search_of(request).best(1)
        if not best:
            return None
        if not request.has_layout:
            return words if _fits(replace(request, config=best[0].config)) else None
        words = (*words, *_layout(request.config, best[0].config))
        return words if _fits(read([*self.argv, *words])) else None


def _all(chosen: dict[str, Words]) -> Words:
    return tuple(word for words in chosen.values() for word in words)


def _fits(request: Request) -> bool:
    return not plans.make(request.facts, request.config, request.assumed).problems


def _layout(own: RunConfig, other: RunConfig) -> Words:
    """The settings by which the layout of `other` differs from one's own."""
    found = []
    for section, keys in SEARCHED.items():
        mine, theirs = getattr(own, section), getattr(other, section)
        for key in keys:
            if getattr(mine, key) != getattr(theirs, key):
                found.append(f"{section}.{key}={value_text(getattr(theirs, key))}")
    return tuple(found)


def _axes(request: Request) -> list[Axis]:
    """All that is tried, what does least harm first."""
    config = request.config
    length, tokens = config.model.max_length, config.trainer.micro_batch_tokens
    axes = [
        Axis("another layout, the same training", [()] if request.has_layout else []),
        Axis("engines may use more of their GPUs", [
            (f"rollout.gpu_memory_utilization={share:g}",)
            for share in (0.9, 0.95) if share > config.rollout.gpu_memory_utilization
        ]),
        Axis("smaller micro-batches: slower, the same training", [
            (f"trainer.micro_batch_tokens={n}",) for n in _halves(tokens, length)
        ]),
        Axis("ranks share a micro-batch's tokens: the same training, on fewer samples at once", [
            (f"trainer.cp={n}",) for n in (2, 4, 8) if n > config.trainer.cp
        ]),
        Axis("fewer sequences decoded at once: slower", [
            (f"rollout.max_num_seqs={n}",)
            for n in _halves(config.rollout.max_num_seqs, LEAST_SEQUENCES)
        ]),
        Axis("a refit waits for requests of the version before", _slots(config)),
        Axis("Adam's moments wait in the host's memory: the same training, no GPU has timed it",
             _moments(config.trainer)),
        Axis("trainer and engines take turns on the same GPUs: the same training, no GPU has "
             "timed it", _turns(config)),
        Axis("more of the same GPUs", _more_gpus(request), dear=True),
        Axis("a checkpoint of fewer bits, which trainer and engines must be able to read: served "
             "and trained weights differ by its rounding", _served(request)),
        Axis("experts share a matrix: another adapter", _shared_outer(request)),
        Axis("a smaller adapter", _ranks(config)),
        Axis("shorter prompts and responses", _contexts(config)),
        Axis("other GPUs", _other_gpus(request)),
    ]  # fmt: skip
    return [axis for axis in axes if axis.steps]


def _moments(trainer: TrainerConfig) -> list[Words]:
    if trainer.offloads_moments:
        return []
    return [(f"trainer.offload={'both' if trainer.offloads_activations else 'optimizer'}",)]


def _halves(value: int, least: int) -> list[int]:
    """Halves of `value`, halves of these, and so on down to `least`, which is the last."""
    found = []
    while value > least:
        value = max(value // 2, least)
        found.append(value)
    return found


def _slots(config: RunConfig) -> list[Words]:
    can = config.refit.mode == "adapter" and config.refit.slots > 1 and not config.schedule.lag
    return [("refit.slots=1",)] if can else []


def _turns(config: RunConfig) -> list[Words]:
    if config.placement.colocated or config.schedule.lag:
        return []
    return [("placement.mode=colocated",)]


def _more_gpus(request: Request) -> list[Words]:
    """Up to a node one by one, then whole nodes."""
    hardware = request.assumed.hardware
    gpus, node = hardware.gpus, hardware.gpus_per_node
    most = max(TIMES_MORE_GPUS * gpus, LEAST_NODES * node)
    counts = [*range(gpus + 1, node), *range(max(node, gpus // node * node + node), most + 1, node)]
    return [("--gpus", str(count)) for count in counts if count > gpus]


def _served(request: Request) -> list[Words]:
    """FP8, and INT4, which is of experts alone."""
    formats = {"float32": ["fp8", "int4"], "bf16": ["fp8", "int4"], "fp8": ["int4"]}
    known = formats.get(request.assumed.served, [])
    experts = bool(request.facts.shape.num_experts)
    return [("--served", form) for form in known if form != "int4" or experts]


def _shared_outer(request: Request) -> list[Words]:
    adapter = request.config.adapter
    can = request.facts.shape.num_experts and not adapter.starts_from_base
    if not can or adapter.expert_layout == "shared_outer":
        return []
    return [("adapter.expert_layout=shared_outer",)]


def _ranks(config: RunConfig) -> list[Words]:
    adapter = config.adapter
    if adapter.expert_rank is not None:
        return [(f"adapter.expert_rank={n}",) for n in _halves(adapter.expert_rank, 1)]
    return [("--rank", str(n)) for n in _halves(adapter.rank, 1)]


def _contexts(config: RunConfig) -> list[Words]:
    """Prompt and response in the ratio they have; micro-batches no longer than a sample."""
    length, response = config.model.max_length, config.rollout.max_response_tokens
    found: list[Words] = []
    for n in _halves(length, LEAST_LENGTH):
        shorter = max(1, response * n // length)
        words = (f"model.max_length={n}", f"rollout.max_response_tokens={shorter}")
        if n < config.trainer.micro_batch_tokens:
            words = (*words, f"trainer.micro_batch_tokens={n}")
        found.append(words)
    return found


def _other_gpus(request: Request) -> list[Words]:
    hardware = request.assumed.hardware
    kinds = sorted(GPUS.values(), key=lambda gpu: gpu.memory)
    memory = hardware.gpu_memory is not None
    return [
        ("--gpu", gpu.name, *(("--gpu-memory", f"{gpu.memory:g}") if memory else ()))
        for gpu in kinds
        if gpu.memory > hardware.spec.memory
    ]
