"""Router decisions of what was sampled, found again by its tokens: clients send tokens, and nothing
with them says which sample they are of.

A token's routes depend on the tokens up to it. So a datum may have those of whatever was sampled
that begins as it does, as far as that goes; for the rest there are none:

    sampled    p0  p1  r0  r1  r2           rows of p0 to r1: the last token is not fed
    datum      p0  p1  r0  r1  r2  t0       its first four rows are replayed, two are missing

A datum that has logprobs of what was sampled gets the routes of that sample, whichever of its
model's states sampled it: it is trained on what the policy did. One that has none is a text whose
probability is asked for: it gets routes of the model's state of now alone, which are those that the
engines would choose; routers choose for themselves where there are none.

Shape letters: L tokens of a sample, R of them sampled, N tokens of a datum.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lora_moe_rl.adapters.spec import ModelShape
from lora_moe_rl.cluster.ray_start import store_bytes
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.kernels.route_codec import RowLayout
from lora_moe_rl.rollout.outputs import route_pieces
from lora_moe_rl.router_replay import travel
from lora_moe_rl.router_replay.table import token_sum
from lora_moe_rl.router_replay.travel import SentRoutes
from lora_moe_rl.service.prefixes import Node, Prefixes

TOKEN_BYTES = 8  # a token and its logprob


class Origin(NamedTuple):
    """Whose a sample or a datum is: the numbers of a model and of its state."""

    model: int
    state: int


ORIGIN = Origin(0, 0)


@dataclass(frozen=True)
class Found:
    """Routes of one datum, of N rows, of which the first `recorded` are those of a sample."""

    routes: SentRoutes
    recorded: int


@dataclass(frozen=True)
class _Recorded:
    """One sample: its L - 1 rows and the sum of their tokens, logprobs, float32 [R], and the state
    that sampled it."""

    routes: SentRoutes
    token_sum: int
    logprobs: np.ndarray
    bytes: int
    node: Node
    state: int

    def equal_logprobs(self, logprobs: np.ndarray, rows: int) -> int:
        """How many of a datum's first logprobs, float32, are bit for bit those of this sample."""
        first = self.routes.num_rows - len(self.logprobs)
        theirs = logprobs[first:rows]
        own = self.logprobs[: len(theirs)]
        return int((own.view(np.int32) == theirs[: len(own)].view(np.int32)).sum())


class RouteStore:
    """Of a model with routers. Keeps routes up to `limit` bytes, None for half of what Ray's store
    holds on this machine; those go first that were last used longest ago.

    `bytes`: what is kept, as rows in Ray's store on the hosts of the engines and as tokens here.
    `counts`: for metrics; data that were asked for and those of which all or some rows were found,
    these rows, and samples that went for others.
    """

    def __init__(self, shape: ModelShape, trainer: TrainerConfig, limit: int | None = None):
        self.pieces = tuple(piece for piece in route_pieces(shape, trainer) if piece)
        assert self.pieces, "a dense model has no routes"
        self.top_k, self.num_experts = shape.top_k, shape.num_experts
        self.limit = store_bytes() // 2 if limit is None else limit
        self.bytes = 0
        self.counts: Counter[str] = Counter()
        self._prefixes = Prefixes()
        self._recorded: OrderedDict[int, _Recorded] = OrderedDict()  # the last used one last
        self._next = 0

    def __len__(self) -> int:
        return len(self._recorded)

    def put(
        self,
        tokens: np.ndarray,
        routes: SentRoutes,
        logprobs: np.ndarray,
        of: Origin = ORIGIN,
    ) -> None:
        """A sample: tokens int32 [L], its L - 1 rows, logprobs float32 [R] of what was sampled.
        Only data of the same model are given its routes. Raises ValueError for routes that are not
        of it, or cut for another trainer."""
        sample = (len(tokens) - 1,), self.pieces, self.top_k, self.num_experts
        rows = tuple(np.diff(routes.offsets).tolist())
        if (rows, routes.pieces, routes.top_k, routes.num_experts) != sample:
            raise ValueError(
                f"routes of {rows} rows, layers {routes.pieces}, {routes.top_k} of "
                f"{routes.num_experts} experts are not of a sample with {sample}"
            )
        if not 1 <= len(logprobs) < len(tokens):
            raise ValueError(
                f"{len(logprobs)} logprobs are not of a sample of {len(tokens)} tokens"
            )
        number, self._next = self._next, self._next + 1
        node = self._prefixes.add(_owned(of.model, tokens[:-1]), number)
        logprobs = np.array(logprobs, np.float32)
        size = self._row_bytes(routes) * routes.num_rows + TOKEN_BYTES * len(tokens)
        tokens_fed = token_sum(tokens[:-1])
        self._recorded[number] = _Recorded(routes, tokens_fed, logprobs, size, node, of.state)
        self.bytes += size
        while self.bytes > self.limit:
            self._forget_one()

    def find(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray | None = None,
        of: Origin = ORIGIN,
    ) -> Found:
        """Routes of a datum's N tokens, int32, all of which are fed. `logprobs`: float32 [N], those
        of its targets when they were sampled, 0 for those that were not. Of several samples that
        have as many of its rows, that one which has most of its logprobs; of a datum without, the
        newest, where that is of the state `of`."""
        node, matched = self._prefixes.match(_owned(of.model, tokens))
        common, found = max(matched - 1, 0), self.missing(len(tokens))
        number = None
        if logprobs is not None and common:
            number = self._with_logprobs(node, common, logprobs)
        if number is None:  # nothing of it was sampled
            number, common = self._of_state(node, common, of.state)
        if common:
            self._recorded.move_to_end(number)
            common, found = self._begun_with(self._recorded[number], common, tokens)
        self.counts["data"] += 1
        self.counts["rows"] += len(tokens)
        self.counts["data_in_full"] += common == len(tokens)
        self.counts["data_in_part"] += 0 < common < len(tokens)
        self.counts["rows_found"] += common
        return Found(found, common)

    def _begun_with(
        self, recorded: _Recorded, rows: int, tokens: np.ndarray
    ) -> tuple[int, SentRoutes]:
        """A datum whose first `rows` tokens are those of a sample: how many, since a sample's
        rows are cut where one lacks a layer; and all of them."""
        routes, num_rows = recorded.routes, len(tokens)
        if rows < routes.num_rows and len(routes.incomplete):
            rows = min(rows, int(routes.incomplete[0]))
        if rows == 0:
            return 0, self.missing(num_rows)
        first = travel.head(routes, rows, recorded.token_sum, token_sum(tokens[:rows]))
        if rows == num_rows:
            return rows, first
        return rows, travel.join([[first, self.missing(num_rows - rows)]])

    def missing(self, num_rows: int) -> SentRoutes:
        """What stands for the routes of a datum that nobody sampled."""
        return travel.absent(self.pieces, self.top_k, self.num_experts, num_rows)

    def _of_state(self, node: Node, common: int, state: int) -> tuple[int, int]:
        """The newest sample at or below a node, or one above it, where it is of a state: and how
        many of the datum's tokens it begins with; 0 where there is none. A sample of that state
        that stands behind a newer one of another is not looked for."""
        while common and self._recorded[node.newest].state != state:
            node, matched = self._prefixes.above(node)
            common = max(matched - 1, 0)
        return node.newest, common

    def _with_logprobs(self, node: Node, common: int, logprobs: np.ndarray) -> int | None:
        """Which of the samples at or below a node, that all begin with as many of its tokens. None
        where all logprobs are 0, and those of no sample are: of a sure token they may be."""
        given = np.asarray(logprobs, np.float32)

        def fitting(number: int) -> tuple[int, int]:
            return self._recorded[number].equal_logprobs(given, common), number

        best = max(map(fitting, node.sequences()))
        return best[1] if best[0] or given[:common].any() else None

    def _forget_one(self) -> None:
        number, recorded = self._recorded.popitem(last=False)
        self._prefixes.remove(recorded.node, number)
        self.bytes -= recorded.bytes
        self.counts["evicted"] += 1

    def _row_bytes(self, routes: SentRoutes) -> int:
        """Of a packed row of all pieces, with its bits of validity where some rows lack a layer."""
        bits = len(routes.incomplete) > 0
        return sum(
            RowLayout(len(piece), self.top_k, self.num_experts).row_bytes
            + bits * -(-len(piece) // 8)
            for piece in self.pieces
        )


def _owned(model: int, tokens: np.ndarray) -> np.ndarray:
    """What a sample's tokens are kept under: a model's begin with a number that is no token."""
    return np.concatenate([[-1 - model], tokens]).astype(np.int32)
