"""A model without weights behind requests that may be ended early: which token comes next, its
logprob, and the routes of a token follow from the version that computes them and the tokens up to
there, as in a model that keeps nothing of another version."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from lora_moe_rl.rollout.in_flight import InFlight, Question

SHAPE = SimpleNamespace(moe_layers=(1, 2), num_experts=8, top_k=2)
END = 9


def token_of(version: int, seed: int, before: Sequence[int]) -> int:
    """What is sampled after `before`: END at times."""
    return int(np.random.default_rng([version, seed, len(before), *before]).integers(1, END + 1))


def logprob_of(version: int, token_ids: Sequence[int]) -> float:
    """float32, of the last one."""
    return float(np.float32(-np.random.default_rng([version, *token_ids]).random()))


def route_of(version: int, token_ids: Sequence[int]) -> np.ndarray:
    """int32 `[MoE layers, top_k]`, of the last one's forward."""
    draw = np.random.default_rng([version, 5, *token_ids])
    rows = [draw.permutation(SHAPE.num_experts)[: SHAPE.top_k] for _ in SHAPE.moe_layers]
    return np.array(rows, np.int32)


class Texts:
    def batch_decode(self, token_ids, skip_special_tokens):
        return [" ".join(map(str, ids)) for ids in token_ids]


class VersionedEngine:
    """vLLM's answers. `ends`: after how many tokens each request ends, in the order in which they
    are made, since the next version is there; none are left: to its own end. Keeps the questions.
    """

    def __init__(self, in_flight: InFlight, ends: Sequence[int]):
        self.in_flight, self.ends, self.asked = in_flight, list(ends), []

    async def ask(self, question: Question) -> SimpleNamespace:
        self.asked.append(question)
        ends = [self.ends.pop(0) if self.ends else 10**6 for _ in range(question.n)]
        outputs = [self._output(question, i, end) for i, end in enumerate(ends)]
        if any(output.finish_reason == "abort" for output in outputs):
            self.in_flight.newest = max(self.in_flight.newest, question.version + 1)
        return SimpleNamespace(outputs=outputs)

    def _output(self, question: Question, number: int, end: int) -> SimpleNamespace:
        version, before = question.version, list(question.token_ids)
        said, reason = [], "length"
        while len(said) < question.max_tokens:
            if len(said) == end:
                reason = "abort"
                break
            said.append(token_of(version, question.seed + number, [*before, *said]))
            if said[-1] == END:
                reason = "stop"
                break
        whole = [*before, *said]
        fed = len(whole) - 1 if said else 0
        rows = [route_of(version, whole[: i + 1]) for i in range(question.recorded, fed)]
        layers = [[np.zeros_like(row[0]), *row] for row in rows]  # the dense layer 0 means nothing
        logprobs = [logprob_of(version, whole[: len(before) + i + 1]) for i in range(len(said))]
        return SimpleNamespace(
            token_ids=said,
            logprobs=SimpleNamespace(logprobs=logprobs, start_indices=range(len(said))),
            finish_reason=reason,
            stop_reason=None,
            spec_decode_metrics=None,
            routed_experts=np.array(layers, np.int32) if rows else None,
        )
