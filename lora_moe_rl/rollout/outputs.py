"""Between vLLM's requests and ours: sampling parameters in, samples, scores and routes out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from lora_moe_rl.adapters.sharding import pipeline_chunks
from lora_moe_rl.adapters.spec import ModelShape
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.data.samples import Sample, Segment
from lora_moe_rl.data.told import ToldPrompt
from lora_moe_rl.data.top import Top
from lora_moe_rl.errors import ReplayError, RolloutError
from lora_moe_rl.rollout import stop_strings
from lora_moe_rl.rollout.in_flight import Piece, Question
from lora_moe_rl.router_replay import table
from lora_moe_rl.router_replay.table import RouteTable, token_sum


def sampling_params(config: RunConfig, stop_ids: set[int]) -> Any:
    """vLLM's SamplingParams of a rollout, for one sample and without a seed."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_response_tokens,
        stop_token_ids=sorted(stop_ids | set(config.rollout.stop_token_ids)),
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        **_stop_strings(config.rollout.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _stop_strings(stop: Sequence[str]) -> dict[str, Any]:
    """Nothing is decoded for others. Special tokens are a part of the text that is looked at, which
    is used for nothing else."""
    if not stop:
        return {"detokenize": False}
    return {"detokenize": True, "stop": list(stop), "skip_special_tokens": False}


def params_of(params: Any, question: Question) -> Any:
    """SamplingParams of one request. vLLM seeds its sample i with the question's seed + i."""
    params = params.clone()
    params.n, params.seed, params.max_tokens = question.n, question.seed, question.max_tokens
    params.logprobs = question.top
    params.routed_experts_prompt_start = question.recorded
    if (own := question.manner) is not None:
        params.temperature, params.top_p, params.top_k = own.temperature, own.top_p, own.top_k
        params.stop_token_ids = sorted({*params.stop_token_ids, *own.stop_token_ids})
        stop = dict.fromkeys([*params.stop, *own.stop])
        for name, value in _stop_strings([*stop]).items():
            setattr(params, name, value)
    return params


def writing_params(max_tokens: int, temperature: float, seed: int, stop_ids: set[int]) -> Any:
    """SamplingParams of a text that is not a sample of the policy."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=sorted(stop_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params(top: int = 0) -> Any:
    """SamplingParams that score a prompt, and tell the `top` likeliest tokens at each place; vLLM
    insists on sampling a token."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=top,  # besides those of the prompt's own tokens
        flat_logprobs=True,
        detokenize=False,
        skip_reading_prefix_cache=True,  # a cached prefix would have no logprobs
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def samples_and_routes(
    pieces: Sequence[Sequence[Piece]], tokenizer, shape: ModelShape, recorded: int = 0
) -> tuple[list[Sample], RouteTable]:
    """A sample of each one's pieces, and one table of their routes, without the rows of the first
    `recorded` tokens of each, which are there already: those that a piece has recorded anew are a
    part of their own (`Sample.splits`), after those of the parts before it. Raises ReplayError when
    vLLM answers with more rows than were asked for, and RolloutError for logprobs that are
    not one a token, or for a sample that went on after its stop string."""
    for one in pieces:
        stop_strings.check_ended(one[-1].output, tokenizer)
    texts = tokenizer.batch_decode(
        [one[-1].token_ids[len(one[0].before) :] for one in pieces], skip_special_tokens=True
    )
    cuts, rows, num_rows, sums = [], [], [], []
    for of_sample in pieces:
        there, splits, found, total = recorded, [], [], 0
        fed: list[int] = []
        for piece in of_sample:
            if piece.recorded != there:
                splits.append(there + 1)
            there = len(piece.token_ids) - 1
            found.append(_segment(total, piece, there - piece.recorded, shape))
            fed += piece.token_ids[piece.recorded : there]
            total += there - piece.recorded
        cuts.append(tuple(splits))
        rows.append([segment for segment in found if segment is not None])
        num_rows.append(total)
        sums.append(token_sum(fed))
    routes = _table(rows, num_rows, shape, sums)
    heads = [b""] * len(pieces) if recorded else _prompt_routes(pieces, routes)
    parts = zip(pieces, texts, cuts, heads, strict=True)
    return [_sample(*one) for one in parts], routes


def _prompt_routes(pieces: Sequence[Sequence[Piece]], routes: RouteTable) -> list[bytes]:
    """Of each sample: equal for prompts on equal routes."""
    found = []
    for of_sample, start in zip(pieces, routes.offsets.tolist(), strict=False):
        rows = slice(start, start + len(of_sample[0].before))
        ids = np.where(routes.valid[rows, :, None], routes.ids[rows], 0)
        checksum = hashlib.blake2b(routes.valid[rows].tobytes(), digest_size=16)
        checksum.update(ids.tobytes())
        found.append(checksum.digest())
    return found


def _segment(start: int, piece: Piece, expected: int, shape: ModelShape) -> table.Segment | None:
    """The rows of a piece, from row `start` of its sample's on; None without any."""
    rows = _moe_rows(piece.output.routed_experts, shape)
    if rows is None:
        return None
    if len(rows) > expected:
        raise ReplayError(
            f"vLLM recorded the routes of {len(rows)} tokens for a request that was to record "
            f"{expected} (adapter version {piece.version})"
        )
    return table.Segment(start, rows)


def scores_and_routes(
    answers: Sequence[Any], shape: ModelShape
) -> tuple[list[np.ndarray], RouteTable]:
    """Logprobs `[L - 1]` and routes of whole sequences."""
    scores, rows, sums = [], [], []
    for answer in answers:
        scores.append(_after_the_first(answer.prompt_logprobs))
        sums.append(token_sum(answer.prompt_token_ids[:-1]))
        routes = _moe_rows(answer.outputs[0].routed_experts, shape)
        # The last token was fed too, to sample the token that vLLM insists on.
        rows.append(None if routes is None else routes[: len(answer.prompt_token_ids) - 1])
    return scores, _table(rows, [len(score) for score in scores], shape, sums)


def prompt_scores(answer: Any, top: int) -> ToldPrompt:
    """Of one prompt that was scored."""
    flat = answer.prompt_logprobs
    nothing = np.full(1, np.nan, np.float32)  # comes before the first token
    logprobs = np.concatenate([nothing, _after_the_first(flat)])
    return ToldPrompt(logprobs, likeliest(flat, top))


def _after_the_first(flat: Any) -> np.ndarray:
    """Logprobs of a prompt's tokens, float32 [P - 1]."""
    return np.array([flat.logprobs[i] for i in flat.start_indices[1:]], np.float32)


def likeliest(flat: Any, top: int) -> Top | None:
    """Of vLLM's logprobs of some places the `top` likeliest tokens at each; None for none."""
    if not top:
        return None
    ids = np.full((len(flat), top), -1, np.int32)
    logprobs = np.full((len(flat), top), np.nan, np.float32)
    for place, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        if start < end:  # the token that stands there comes first
            ids[place] = flat.token_ids[start + 1 : end]
            logprobs[place] = flat.logprobs[start + 1 : end]
    return Top(ids, logprobs)


def routes_checksum(table: RouteTable) -> str:
    """Equal for equal routes, as far as they were recorded."""
    ids = np.where(table.valid[..., None], table.ids, 0)
    return hashlib.sha256(table.valid.tobytes() + ids.tobytes()).hexdigest()


def _sample(
    pieces: Sequence[Piece], text: str, splits: tuple[int, ...], prompt_routes: bytes
) -> Sample:
    segments = [Segment.given("user", pieces[0].before)]
    for piece in pieces:
        flat = piece.output.logprobs
        logprobs = np.array([flat.logprobs[i] for i in flat.start_indices], dtype=np.float32)
        if len(logprobs) != len(piece.output.token_ids):
            raise RolloutError(
                f"vLLM answered with {len(piece.output.token_ids)} tokens and the logprobs of "
                f"{len(logprobs)} (adapter version {piece.version})"
            )
        drafts = _drafts(piece.output)
        segments.append(Segment.sampled(piece.output.token_ids, logprobs, piece.version, drafts))
    reason = pieces[-1].output.finish_reason
    return Sample(tuple(segments), reason, text, splits=splits, prompt_routes=prompt_routes)


def _drafts(output: Any) -> tuple[int, int] | None:
    """Guessed tokens, and those of them that were taken, where vLLM tells: not of a request that
    was ended from outside."""
    told = output.spec_decode_metrics
    if told is None:
        return None
    return told.num_draft_tokens, sum(taken * times for taken, times in enumerate(told.histogram))


def route_pieces(shape: ModelShape, trainer: TrainerConfig) -> list[tuple[int, ...]]:
    """The MoE layers of each of the trainer's pipeline pieces, in the order of the model."""
    sizes = pipeline_chunks(shape.num_layers, trainer.pp * trainer.vpp)
    ends = np.cumsum([0, *sizes])
    return [
        tuple(layer for layer in shape.moe_layers if start <= layer < stop)
        for start, stop in pairwise(ends)
    ]


def _moe_rows(routes: np.ndarray | None, shape: ModelShape) -> np.ndarray | None:
    """vLLM's rows of all layers -> rows of the MoE layers."""
    return None if routes is None else routes[:, list(shape.moe_layers)]


def _table(rows: list, num_rows: list[int], shape: ModelShape, sums: list[int]) -> RouteTable:
    sizes = shape.moe_layers, shape.num_experts, shape.top_k
    return replace(RouteTable.build(rows, num_rows, *sizes), token_sums=np.array(sums, np.uint64))
