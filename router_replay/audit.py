"""Compares the routes that Megatron-core used with those that were recorded.

What was used is read from each MoE layer's token dispatcher, once it has taken the router's map:
what it holds then is what tokens are permuted by. What was recorded is read from the packed routes
as they came, with a decoder of its own, at the places that the attention's sequence boundaries
give. Nothing on the way from the one to the other is shared but the sample's number.

Wrapped: `MoEAlltoAllTokenDispatcher.dispatch_preprocess` of megatron-core
(`core/transformer/moe/token_dispatcher.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import MicroBatch
from lora_moe_rl.errors import ReplayError
from lora_moe_rl.kernels.route_codec import RowLayout
from lora_moe_rl.router_replay.layer import LayerReplay
from lora_moe_rl.router_replay.packed import PackedRoutes, valid_rows
from lora_moe_rl.router_replay.replay import Replay
from lora_moe_rl.router_replay.routes import Routes, sequence_shard
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "router_replay/audit.py"


class Audit:
    """`against`: a table to compare with in place of the routes that are replayed; whoever sets it
    wants to see a difference found."""

    def __init__(self, replay: Replay):
        parameters = ("self", "hidden_states", "routing_map", "probs")
        require_version("megatron-core", WHO)
        require_parameters(MoEAlltoAllTokenDispatcher.dispatch_preprocess, parameters, WHO)
        for chunk, layers in enumerate(replay.chunks):
            for layer in layers.values():
                self._watch(chunk, layer)
        self.against: RouteTable | None = None
        self.compared: Counter[int] = Counter()  # tokens by layer, since the audit began
        self.expected = 0  # tokens that each layer has to see at least once, over all ranks
        self.routes: Routes | None = None

    def _watch(self, chunk: int, layer: LayerReplay) -> None:
        dispatcher = layer.moe.token_dispatcher
        stock = dispatcher.dispatch_preprocess

        def dispatch_preprocess(hidden_states, routing_map, probs):
            out = stock(hidden_states, routing_map, probs)
            if self.routes is not None:
                self._compare(chunk, layer, dispatcher.routing_map.cpu().numpy())
            return out

        dispatcher.dispatch_preprocess = dispatch_preprocess

    def start(self, routes: Routes, batch: TrainBatch, num_samples: int) -> None:
        """Looks at some of the batch's samples, from here to `stop`: others in each step."""
        total = len(batch)
        chosen = np.random.default_rng(batch.step).permutation(total)[:num_samples]
        self.routes, self.batch, self.samples = routes, batch, set(chosen.tolist())
        self.compared, self.difference = Counter(), None
        rows = [np.arange(*batch.offsets[sample : sample + 2]) for sample in chosen]
        self.expected = int((~np.isin(np.concatenate(rows), routes.incomplete)).sum())
        self._recorded: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def stop(self) -> None:
        self.routes = None

    def check(self) -> None:
        """Raises ReplayError, naming the first difference found since `start`."""
        if self.routes is not None and self.difference is not None:
            raise ReplayError(self.difference)

    def check_compared(self, step: int, everywhere: Mapping[int, float]) -> None:
        """`everywhere`: `compared`, summed over all ranks. Raises ReplayError for a layer that did
        not come to see all the tokens looked at which have routes."""
        for layer, found in everywhere.items():
            if found < self.expected:
                raise ReplayError(
                    f"the audit of step {step} compared the routes of {found:.0f} tokens in layer "
                    f"{layer}, and {self.expected} of its samples have some: not all came to a "
                    "token dispatcher with the routes that were installed"
                )

    def _compare(self, chunk: int, layer: LayerReplay, used: np.ndarray) -> None:
        data: MicroBatch | None = layer.micro_batch
        if data is None:  # routers choose for themselves
            return
        mine = sequence_shard(len(data.fed))
        if len(used) != mine.stop - mine.start:
            self._differs(f"layer {layer.number} dispatched {len(used)} tokens of {mine}")
            return
        for k, sample in enumerate(data.samples):
            if sample not in self.samples:
                continue
            fed_at = data.fed_at[slice(*data.starts[k : k + 2])]
            tokens = np.flatnonzero((fed_at >= mine.start) & (fed_at < mine.stop))
            if not len(tokens):
                continue
            places = fed_at[tokens]
            if (self.batch.fed(sample)[tokens] != data.input_ids[data.fed[places]]).any():
                self._differs(f"sample {sample} is not what was fed for it at {places.tolist()}")
            ids, valid = self._expected(chunk, sample, layer.number)
            here = used[places - mine.start]
            self._compare_rows(sample, layer.number, tokens, ids[tokens], valid[tokens], here)

    def _compare_rows(self, sample, layer, tokens: np.ndarray, ids, valid, used) -> None:
        """tokens int `[n]`, ids `[n, K]`, valid `[n]`, used bool `[n, E]`."""
        expected = np.zeros_like(used)
        np.put_along_axis(expected, ids.astype(np.int64), True, axis=1)
        wrong = (expected != used).any(axis=1) & valid
        self.compared[layer] += int(valid.sum())
        if wrong.any():
            row = int(np.argmax(wrong))
            self._differs(
                f"token {tokens[row]} of sample {sample} was not routed as recorded in "
                f"layer {layer}: expected experts {np.flatnonzero(expected[row]).tolist()}, used "
                f"{np.flatnonzero(used[row]).tolist()} ({int(wrong.sum())} of the "
                f"{int(valid.sum())} tokens looked at there differ)"
            )

    def _differs(self, what: str) -> None:
        self.difference = self.difference or what

    def _expected(self, chunk: int, sample: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Recorded ids `[n, K]` of a sample in a layer, and which are valid."""
        if self.against is not None:
            table = self.against
            rows = slice(*table.offsets[sample : sample + 2])
            column = table.layers.index(layer)
            return table.ids[rows, column], table.valid[rows, column]
        if (chunk, sample) not in self._recorded:
            turns = [_decode(*turn) for turn in self.routes.received(chunk, sample)]
            ids, valid = (np.concatenate(parts) for parts in zip(*turns, strict=True))
            self._recorded[chunk, sample] = ids, valid
        column = self.routes.received(chunk, sample)[0][0].layers.index(layer)
        ids, valid = self._recorded[chunk, sample]
        return ids[:, column], valid[:, column]


def _decode(packed: PackedRoutes, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """ids `[n, layers, K]` and validity `[n, layers]`, one bit at a time."""
    ids = decode_bits(packed.rows[rows], packed.layout)
    bits = None if packed.valid is None else packed.valid[rows]
    return ids, valid_rows(bits, len(ids), len(packed.layers))


def decode_bits(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    """uint8 `[n, row_bytes]` -> int64 `[n, layers, K]`."""
    bits = np.unpackbits(rows, axis=1, count=layout.num_ids * layout.bits, bitorder="little")
    ids = bits.reshape(len(rows), layout.num_layers, layout.top_k, layout.bits)
    return ids @ (1 << np.arange(layout.bits))


def due(step: int, every: int) -> bool:
    """Whether something is done in a step, the first one among them. Steps count from 1; 0 is a
    forward outside steps."""
    return every > 0 and (step - 1) % every == 0
