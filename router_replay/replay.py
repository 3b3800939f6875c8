"""Replays router decisions in Megatron-core, through its own `RouterReplay` instances.

One `RouterReplay` belongs to each MoE router of this rank. Before a micro-batch's forward the
routes of its tokens are installed, by global layer number; each router then takes them instead of
its own top-k, gathers its probabilities from its own scores, and its own choice is counted beside
them. Nothing here is optional: a router that did not consume its routes stops the step.

What becomes of them in one router is in `router_replay/layer.py`.

Wrapped: `RouterReplay.get_replay_topk` of megatron-core
(`core/transformer/moe/router_replay.py`), which every unfused top-k calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as ps
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay

from lora_moe_rl.errors import ReplayError
from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.kernels.route_codec import RowLayout
from lora_moe_rl.kernels.route_codec.op import by_layer
from lora_moe_rl.router_replay.dispatch import LayerSizes
from lora_moe_rl.router_replay.layer import LayerReplay
from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "router_replay/replay.py"

# Options of mcore under which a router or its dispatcher does other than its top-k says, and the
# only value that we know to be harmless.
_HARMLESS = {
    "moe_router_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_enable_deepep": False,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_router_padding_for_quantization": False,
    "moe_router_force_load_balancing": False,
    "moe_router_force_biased": None,
    "moe_input_jitter_eps": None,
    "moe_router_load_balancing_type": "none",
    "cuda_graph_impl": "none",
}


@dataclass(frozen=True)
class MicroRoutes:
    """Routes of one rank's tokens of one micro-batch, in the MoE layers of one pipeline chunk.

    pieces: uint8 `[n, row_bytes]` each, packed rows, which together have one of each of the T
    tokens in turn; mostly views of what was fetched. known: bool `[T]`, False for padding. valid:
    bool `[T, layers]`, or None when all known tokens are. sizes: int64 `[ranks, layers, experts]`,
    tokens and padding that each rank that exchanges tokens sends to each expert; None where that is
    not known beforehand.
    """

    layers: tuple[int, ...]
    layout: RowLayout
    pieces: tuple[np.ndarray, ...]
    known: np.ndarray
    valid: np.ndarray | None
    sizes: np.ndarray | None = None

    def rows(self) -> np.ndarray:
        """uint8 `[T, row_bytes]`; a copy where there is more than one piece."""
        pieces = [piece for piece in self.pieces if len(piece)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(self.pieces)


class Replay:
    """The routers of this rank's part of one model: of each of its pipeline chunks."""

    def __init__(self, chunks: Sequence[torch.nn.Module], moe_layers: tuple[int, ...]):
        """Raises ReplayError when the routers are not what the model's config promises, or do not
        do what they are told."""
        parameters = ("self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk")
        require_version("megatron-core", WHO)
        require_parameters(RouterReplay.get_replay_topk, parameters, WHO)
        self.chunks = [_routers(chunk, moe_layers) for chunk in chunks]
        self.layers = {n: layer for chunk in self.chunks for n, layer in chunk.items()}

    @property
    def chunk_layers(self) -> list[tuple[int, ...]]:
        """Global numbers of the MoE layers of each chunk."""
        return [tuple(chunk) for chunk in self.chunks]

    @contextmanager
    def step(self):
        """Cleared when the step ends or fails. Yields self."""
        try:
            yield self
        finally:
            for layer in self.layers.values():
                layer.reset()

    @contextmanager
    def unjudged(self):
        """Inside, forwards in training are not those of the policy, and are not counted."""
        for layer in self.layers.values():
            layer.judged = False
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.judged = True

    def set_stands_for(self, chunk: int, tokens: np.ndarray, device: torch.device) -> None:
        """Before a forward: int64 `[T]`, how many of the samples' tokens each of this rank's is fed
        for (of a prompt that several share, so many); 0 for padding."""
        here = None if (tokens == 1).all() else on_device(torch.from_numpy(tokens), device)
        for layer in self.chunks[chunk].values():
            layer.stands_for = here

    def install(
        self, chunk: int, routes: MicroRoutes | None, micro_batch: Any, device: torch.device
    ) -> None:
        """Routes of one micro-batch; None for a chunk without MoE layers."""
        if routes is None:
            return
        ids_of = by_layer(routes.rows(), routes.layout, device)
        known = on_device(torch.from_numpy(routes.known), device)
        all_known = routes.known.all()
        sizes = _of_layers(routes.sizes, len(routes.layers), device)
        valid = None
        if routes.valid is not None:
            valid = on_device(torch.from_numpy(routes.valid.T.copy()), device)
        for column, number in enumerate(routes.layers):
            layer = self.chunks[chunk][number]
            layer.micro_batch = micro_batch
            counted, free = None if all_known else known, None
            if valid is not None:
                counted, free = known & valid[column], known & ~valid[column]
            layer.set_target(partial(ids_of, column), counted, free, sizes[column])

    def install_recorded(self, chunk: int, recorded: dict[int, torch.Tensor]) -> None:
        """Routes that `take_recorded` returned for the same micro-batch; `set_stands_for` has said
        what of it is padding."""
        for number, layer in self.chunks[chunk].items():
            layer.micro_batch = None
            counted = None if layer.stands_for is None else layer.stands_for > 0
            layer.set_target(partial(recorded.__getitem__, number), counted)

    def clear_routes(self, chunk: int) -> None:
        """The routers choose for themselves again, and record what they choose."""
        for layer in self.chunks[chunk].values():
            layer.micro_batch = None
            layer.clear_target()

    def take_recorded(self, chunk: int) -> dict[int, torch.Tensor]:
        """The routers' own choices in the last forward, `{layer: int64 [T, K]}`."""
        return {number: layer.recorded for number, layer in self.chunks[chunk].items()}

    def chose(
        self, routes: MicroRoutes, recorded: dict[int, torch.Tensor], device: torch.device
    ) -> bool:
        """Whether `take_recorded` of the same micro-batch found these routes, in whatever order a
        token's experts stand; where there are none, any will do."""
        counted = routes.known[:, None]
        if routes.valid is not None:
            counted = counted & routes.valid
        ids_of = by_layer(routes.rows(), routes.layout, device)
        differs = []
        for column, number in enumerate(routes.layers):
            wanted = ids_of(column).sort(-1).values
            differs.append((recorded[number].sort(-1).values != wanted).any(-1))
        counted = on_device(torch.from_numpy(counted.T.copy()), device)
        return not (torch.stack(differs) & counted).any().item()

    def counts(self) -> dict[int, tuple[int, int]]:
        """By layer: (routes where the trainer's own choice differs, routes replayed), over this
        rank's tokens in training forwards since the step began."""
        layers = self.layers.values()
        found = _read([count for x in layers for count in (x.differing, x.replayed)])
        return dict(zip(self.layers, zip(found[::2], found[1::2]), strict=True))

    def loads(self) -> dict[int, torch.Tensor]:
        """By layer: int64 `[experts]`, how often each was chosen for this rank's tokens in training
        forwards since the step began. Layers without such a forward are left out."""
        return {n: layer.loads for n, layer in self.layers.items() if layer.loads is not None}

    def check_calls(self, forwards: Sequence[int], trained: Sequence[int]) -> None:
        """Raises ReplayError unless, since the step began, every router of chunk i ran
        `forwards[i]` times and, under recomputation, `trained[i]` times again in backward."""
        for chunk, times, again in zip(self.chunks, forwards, trained, strict=True):
            for layer in chunk.values():
                if layer.calls != times:
                    raise ReplayError(
                        f"layer {layer.number}: its router consulted replay {layer.calls} times in "
                        f"{times} forwards"
                    )
                if layer.recompute and layer.recomputations != again:
                    raise ReplayError(
                        f"layer {layer.number}: its router was recomputed {layer.recomputations} "
                        f"times after {again} forwards in training"
                    )

    def check_sizes(self) -> None:
        """Raises ReplayError where a forward since the step began sent tokens by other sizes than
        those of the routes that it used."""
        wrong = _read([layer.dispatch.wrong for layer in self.layers.values()])
        for number, times in zip(self.layers, wrong, strict=True):
            if times:
                raise ReplayError(
                    f"layer {number}: {times} times an expert was sent another number of tokens "
                    "than the routes of its micro-batch say"
                )


def _routers(model: torch.nn.Module, moe_layers: tuple[int, ...]) -> dict[int, LayerReplay]:
    for name, value in _HARMLESS.items():
        if (found := getattr(model.config, name)) != value:
            raise ReplayError(
                f"Megatron-core's {name}={found} changes or bypasses replayed routes; only "
                f"{name}={value} is known not to"
            )
    replays = {}
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        moes = [m for m in layer.modules() if isinstance(m, MoELayer)]
        if len(moes) != (number in moe_layers):
            raise ReplayError(
                f"layer {number} has {len(moes)} routers; the model's config says "
                f"{int(number in moe_layers)}"
            )
        for moe in moes:
            if moe.router.router_replay is None:
                raise ReplayError(f"layer {number}: its router bypasses replay")
            replays[number] = LayerReplay(number, layer, moe)
    return replays


def _of_layers(
    sizes: np.ndarray | None, layers: int, device: torch.device
) -> Sequence[LayerSizes | None]:
    """Of each layer, from `MicroRoutes.sizes`."""
    if sizes is None:
        return [None] * layers
    rank = ps.get_expert_tensor_and_model_parallel_rank()
    mine = on_device(torch.from_numpy(sizes[rank]), device)
    return [LayerSizes(sizes[:, column], mine[column]) for column in range(sizes.shape[1])]


def _read(counts: Sequence[torch.Tensor | int]) -> list[int]:
    """All at once: a device is waited for once."""
    tensors = [count for count in counts if isinstance(count, torch.Tensor)]
    known = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(known) if isinstance(count, torch.Tensor) else count for count in counts]
