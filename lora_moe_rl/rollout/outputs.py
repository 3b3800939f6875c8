"""Between vLLM's requests and ours: sampling parameters in, samples, scores and routes out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lora_moe_rl.adapters.sharding import pipeline_chunks
from lora_moe_rl.adapters.spec import ModelShape
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.data.samples import Sample, Segment
from lora_moe_rl.router_replay.table import RouteTable


def sampling_params(config: RunConfig, stop_ids: set[int]) -> Any:
    """vLLM's SamplingParams of a rollout, for one sample and without a seed."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_response_tokens,
        stop_token_ids=sorted(stop_ids | set(config.rollout.stop_token_ids)),
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def group_params(params: Any, n: int, seed: int) -> Any:
    """SamplingParams of one group. vLLM seeds sample i with this seed + i."""
    params = params.clone()
    params.n, params.seed = n, seed
    return params


def scoring_params() -> Any:
    """SamplingParams that score a prompt; vLLM insists on sampling a token."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,  # of the prompt's own tokens only
        flat_logprobs=True,
        detokenize=False,
        skip_reading_prefix_cache=True,  # a cached prefix would have no logprobs
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def samples_and_routes(
    answers: Sequence[Any], version: int, tokenizer, shape: ModelShape
) -> tuple[list[Sample], RouteTable]:
    """Samples in the order of the answers, and one table of their routes."""
    pairs = [(answer, output) for answer in answers for output in answer.outputs]
    texts = tokenizer.batch_decode([out.token_ids for _, out in pairs], skip_special_tokens=True)
    samples = [
        _sample(answer.prompt_token_ids, output, version, text)
        for (answer, output), text in zip(pairs, texts, strict=True)
    ]
    rows = [_moe_rows(output.routed_experts, shape) for _, output in pairs]
    num_rows = [len(sample.prompt_ids) + len(sample.response_ids) - 1 for sample in samples]
    return samples, _table(rows, num_rows, shape)


def scores_and_routes(
    answers: Sequence[Any], shape: ModelShape
) -> tuple[list[np.ndarray], RouteTable]:
    """Logprobs `[L - 1]` and routes of whole sequences."""
    scores, rows = [], []
    for answer in answers:
        flat = answer.prompt_logprobs
        scores.append(np.array([flat.logprobs[i] for i in flat.start_indices[1:]], np.float32))
        routes = _moe_rows(answer.outputs[0].routed_experts, shape)
        # The last token was fed too, to sample the token that vLLM insists on.
        rows.append(None if routes is None else routes[: len(answer.prompt_token_ids) - 1])
    return scores, _table(rows, [len(score) for score in scores], shape)


def routes_checksum(table: RouteTable) -> str:
    """Equal for equal routes, as far as they were recorded."""
    ids = np.where(table.valid[..., None], table.ids, 0)
    return hashlib.sha256(table.valid.tobytes() + ids.tobytes()).hexdigest()


def _sample(prompt_ids: Sequence[int], output, version: int, text: str) -> Sample:
    flat = output.logprobs
    logprobs = np.array([flat.logprobs[i] for i in flat.start_indices], dtype=np.float32)
    response = Segment.sampled(output.token_ids, logprobs, version)
    return Sample((Segment.given("user", prompt_ids), response), output.finish_reason, text)


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


def _table(rows: list, num_rows: list[int], shape: ModelShape) -> RouteTable:
    return RouteTable.build(rows, num_rows, shape.moe_layers, shape.num_experts, shape.top_k)
